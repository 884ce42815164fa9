// The engine of attention on AMX. Tile products and softmax keep different units of a core busy, and a tile load
// waits for stores to its lines to leave the store buffer. So while the softmax of one block runs, slices of the
// products of its neighbours are issued between its rows: the scores of the block after it and the accumulation of
// the block before it.
#pragma once

#include "attention_impl.h"
#include "attention_tile.h"

namespace tokenspeed::kernels::TS_ISA {

// What attention_impl.h asks of an instruction set.
struct TileEngine {
  using Stored = bf16;
  using Operand = bf16;
  using Session = TileSession;
  static constexpr bool kPipelined = true;
  // Where more tiles of rows than this read the same KV, it is in a near cache after the first of them, and asking
  // for it ahead only costs instructions.
  static constexpr int64_t kFetchingTiles = 3;
  static constexpr int kPanelAlign = 2;  // one tile of probabilities spans 32 positions

  static int block_rows(int64_t) { return 16; }
  TS_INLINE void store_operand(bf16* p, f32x16 x) { store_bf16(p, x); }  // queries
  static void advance(const AttentionArgs& args, RowTile<TileEngine>& tile, BlockStep<TileEngine>* accumulate,
                      BlockStep<TileEngine>* softmax, BlockStep<TileEngine>* scores);
};

using TileStep = BlockStep<TileEngine>;
using TileRows = RowTile<TileEngine>;

// The products to be issued during one softmax, in slices of two output panels.
class ProductSlices {
 public:
  ProductSlices(const AttentionArgs& args, const TileRows& tile, const TileStep* accumulate, const TileStep* scores) {
    const int64_t dim = args.head_dim, ld = args.page_size;
    if (accumulate != nullptr) {
      const TileStep& s = *accumulate;
      values_ = {s.probabilities, ld, s.v, args.page_size * 16, s.panels * 16, tile.o + s.first * dim, dim,
                 bytes(s.next_v)};
      value_panels_ = dim / 16;
      fresh_ = s.fresh;
    }
    if (scores != nullptr) {
      const TileStep& s = *scores;
      keys_ = {tile.q + s.first * dim, dim, s.k, dim * 16, dim, s.scores, ld, bytes(s.next_k)};
      key_panels_ = s.panels;
    }
    key_slices_ = (key_panels_ + 1) / 2;
    count_ = key_slices_ + (value_panels_ + 1) / 2;
  }
  // Issues slices until `part` of `parts` are under way. Scores come first: what they read is old, while the
  // probabilities may still be on their way out of the store buffer.
  inline __attribute__((always_inline)) void issue(int part, int parts) {
    const int64_t until = (count_ * part + parts - 1) / parts;
    for (; done_ < until; ++done_) issue_one();
  }

 private:
  static const std::byte* bytes(const bf16* p) { return reinterpret_cast<const std::byte*>(p); }
  inline __attribute__((always_inline)) void issue_one() {
    tiles_read_memory();
    const bool odd = done_ % 2 == 1;
    const int64_t value_panel = 2 * (done_ - key_slices_);
    if (done_ < key_slices_) {
      tile_slice<false>(keys_, 2 * done_, key_panels_, odd);
    } else if (fresh_) {
      tile_slice<false>(values_, value_panel, value_panels_, odd);
    } else {
      tile_slice<true>(values_, value_panel, value_panels_, odd);
    }
    tiles_read_memory();
  }

  TileProduct values_{}, keys_{};
  bool fresh_ = false;
  int64_t key_panels_ = 0, value_panels_ = 0, key_slices_ = 0, count_ = 0, done_ = 0;
};

// The greatest lane of each of four vectors, by quarter: quarter q of the result holds the four maxima of quarters q.
TS_INLINE __m512 quarter_maxima(const __m512 (&x)[4]) {
  const __m512 a = _mm512_max_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 b = _mm512_max_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  return _mm512_max_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

// Row maxima from four quarter_maxima, in the order of the rows.
TS_INLINE f32x16 row_maxima(const __m512 (&x)[4]) {
  const __m512 a = _mm512_max_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x44), _mm512_shuffle_f32x4(x[0], x[1], 0xee));
  const __m512 b = _mm512_max_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x44), _mm512_shuffle_f32x4(x[2], x[3], 0xee));
  return {_mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd))};
}

// The softmax of 16 rows, four at a time, with slices of products issued in between. Rows beyond the block are
// computed to the next multiple of four, from garbage, and never read.
template <bool Masked>
class TileSoftmax {
 public:
  TileSoftmax(const AttentionArgs& args, TileRows& tile, TileStep& step)
      : step_(step), ld_(args.page_size), scale_(args.scale_log2), maximum_(tile.maximum + step.first),
        lanes_(tile.lanes + step.first * 16), groups_((step.rows + 3) / 4) {}

  void run(ProductSlices& slices) {
    raise_maxima(greatest(), scale_, step_.rows, maximum_, step_.alpha);
    for (int g = 0; g < groups_; ++g) four_rows(g, slices);
  }

 private:
  f32x16 visible(f32x16 x, int row, int panel, f32x16 otherwise) const {
    return Masked ? select(first_lanes(step_.valid[row] - panel * 16), x, otherwise) : x;
  }

  f32x16 greatest() const {
    const f32x16 least = set1(kNothing);
    __m512 quarters[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      quarters[g] = least.v;
      if (g >= groups_) continue;
      __m512 best[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const float* s = step_.scores + (g * 4 + r) * ld_;
        f32x16 top = visible(load(s), g * 4 + r, 0, least);
        for (int j = 1; j < step_.panels; ++j) top = max(top, visible(load(s + j * 16), g * 4 + r, j, least));
        best[r] = top.v;
      }
      quarters[g] = quarter_maxima(best);
    }
    return row_maxima(quarters);
  }

  // Scores are loaded before the products that store to other blocks are issued: those stores would hold up loads
  // of other lines that agree with theirs in the lower twelve bits of the address.
  inline __attribute__((always_inline)) void four_rows(int g, ProductSlices& slices) {
    f32x16 sum[4] = {zero(), zero(), zero(), zero()}, before[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) before[r] = load(lanes_ + (g * 4 + r) * 16);
    int j = 0;
    if (step_.panels >= 4) {
      f32x16 x[4][4];
      take<4>(g, 0, x);
      slices.issue(g + 1, groups_);
      give<4>(g, 0, x, sum);
      j = 4;
    } else {
      slices.issue(g + 1, groups_);
    }
    for (; j < step_.panels; j += 2) {
      f32x16 x[4][2];
      take<2>(g, j, x);
      give<2>(g, j, x, sum);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      store(lanes_ + (g * 4 + r) * 16, fma(before[r], set1(step_.alpha[g * 4 + r]), sum[r]));
    }
  }

  template <int N>
  inline __attribute__((always_inline)) void take(int g, int panel, f32x16 (&x)[4][N]) const {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) x[r][j] = load(step_.scores + (g * 4 + r) * ld_ + (panel + j) * 16);
    }
  }
  template <int N>
  inline __attribute__((always_inline)) void give(int g, int panel, const f32x16 (&x)[4][N], f32x16 (&sum)[4]) const {
    const f32x16 factor = set1(scale_);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const int row = g * 4 + r;
      const f32x16 shift = set1(-maximum_[row]);
      f32x16 p[N];
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) {
        p[j] = visible(exp2_coarse(fma(x[r][j], factor, shift)), row, panel + j, zero());
        sum[r] = add(sum[r], p[j]);
      }
#pragma GCC unroll 4
      for (int j = 0; j < N; j += 2) {
        const __m512bh pair = _mm512_cvtne2ps_pbh(p[j + 1].v, p[j].v);
        _mm512_storeu_si512(step_.probabilities + row * ld_ + (panel + j) * 16, reinterpret_cast<__m512i>(pair));
      }
    }
  }

  TileStep& step_;
  int64_t ld_;
  float scale_;
  float *maximum_, *lanes_;
  int groups_;
};

// What a row's earlier sums shrink by where its maximum moved, which is rare.
TS_INLINE void rescale_block(const AttentionArgs& args, const TileRows& tile, const TileStep& step) {
  const int64_t dim = args.head_dim;
  const int shrinking = bits(greater(set1(1.0f), load(step.alpha)));
  for (int r = 0; shrinking >> r != 0; ++r) {
    if ((shrinking >> r & 1) == 0) continue;
    float* o = tile.o + (step.first + r) * dim;
    for (int64_t d = 0; d < dim; d += 16) store(o + d, mul(load(o + d), set1(step.alpha[r])));
  }
}

inline void TileEngine::advance(const AttentionArgs& args, TileRows& tile, TileStep* accumulate, TileStep* softmax,
                                TileStep* scores) {
  if (accumulate != nullptr && !accumulate->fresh) rescale_block(args, tile, *accumulate);
  ProductSlices slices(args, tile, accumulate, scores);
  if (softmax != nullptr && softmax->masked) {
    TileSoftmax<true>(args, tile, *softmax).run(slices);
  } else if (softmax != nullptr) {
    TileSoftmax<false>(args, tile, *softmax).run(slices);
  }
  slices.issue(1, 1);
}

}  // namespace tokenspeed::kernels::TS_ISA
