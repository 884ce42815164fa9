// The two matrix products of attention on vector registers. Both have the shape
//   out[row][panel * 16 + lane] (+)= sum over k of a[row][k] * b[panel][k][lane]
// with b in panel16 layout: K has positions in the lanes and k = dims, V has dims in the lanes and
// k = positions. Every output has one accumulator that takes k in order, whatever the blocking.
#pragma once

#include "attention_impl.h"

namespace tokenspeed::kernels::TS_ISA {

// A Dot says how one 64-byte row of a panel meets the rows of a.
struct DotF32 {
  using Stored = float;
  using Operand = float;  // a: queries and probabilities
  static constexpr int kDepth = 1;  // k of one panel row
  static constexpr int kRowElements = 16;
  static constexpr bool kCoarseExp = false;

  template <int R, int C>
  TS_INLINE void step(f32x16 (&acc)[R][C], const float* a, int64_t lda, const float* b, int64_t panel) {
    f32x16 lanes[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) lanes[c] = load(b + c * panel);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const f32x16 x = set1(a[r * lda]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = fma(x, lanes[c], acc[r][c]);
    }
  }
  template <int N>
  TS_INLINE void store_operands(float* out, const f32x16 (&x)[N]) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) store(out + j * 16, x[j]);
  }
};

// bfloat16 in memory, float32 arithmetic: a is widened beforehand, b as it is read.
struct DotBf16Widened {
  using Stored = bf16;
  using Operand = float;
  static constexpr int kDepth = 2;
  static constexpr int kRowElements = 32;
  static constexpr bool kCoarseExp = true;

  template <int R, int C>
  TS_INLINE void step(f32x16 (&acc)[R][C], const float* a, int64_t lda, const bf16* b, int64_t panel) {
    half_step<R, C, 0>(acc, a, lda, b, panel);
    half_step<R, C, 1>(acc, a + 1, lda, b, panel);
  }
  // All even, then all odd elements of the pairs: both at once would not fit in AVX2's registers.
  template <int R, int C, int Odd>
  TS_INLINE void half_step(f32x16 (&acc)[R][C], const float* a, int64_t lda, const bf16* b, int64_t panel) {
    f32x16 lanes[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      f32x16 other;
      Odd ? load_pairs(b + c * panel, other, lanes[c]) : load_pairs(b + c * panel, lanes[c], other);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const f32x16 x = set1(a[r * lda]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = fma(x, lanes[c], acc[r][c]);
    }
  }
  template <int N>
  TS_INLINE void store_operands(float* out, const f32x16 (&x)[N]) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) store(out + j * 16, round_to_bf16(x[j]));
  }
};

#if defined(__AVX512BF16__)
// vdpbf16ps: both products of a pair and their sum in one instruction.
struct DotBf16Pairs {
  using Stored = bf16;
  using Operand = bf16;
  static constexpr int kDepth = 2;
  static constexpr int kRowElements = 32;
  static constexpr bool kCoarseExp = true;

  template <int R, int C>
  TS_INLINE void step(f32x16 (&acc)[R][C], const bf16* a, int64_t lda, const bf16* b, int64_t panel) {
    __m512bh lanes[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) lanes[c] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + c * panel));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      int pair;
      std::memcpy(&pair, a + r * lda, sizeof(pair));
      const __m512bh x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c].v = _mm512_dpbf16_ps(acc[r][c].v, x, lanes[c]);
    }
  }
  template <int N>
  TS_INLINE void store_operands(bf16* out, const f32x16 (&x)[N]) {
    if constexpr (N % 2 == 0) {
#pragma GCC unroll 4
      for (int j = 0; j < N; j += 2) {
        const __m512bh pair = _mm512_cvtne2ps_pbh(x[j + 1].v, x[j].v);
        _mm512_storeu_si512(out + j * 16, reinterpret_cast<__m512i>(pair));
      }
    } else {
      const __m256bh lanes = _mm512_cvtneps_pbh(x[0].v);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), reinterpret_cast<__m256i>(lanes));
    }
  }
};
#endif

// Panels that R rows can take at once without spilling: 32 registers of 16 lanes, or 16 of 8.
template <int R>
inline constexpr int kMaxPanels =
#if defined(__AVX512F__)
    4;
#else
    R == 1 ? 4 : R <= 3 ? 2 : 1;
#endif

// One product, with a's row length, b's panel length and out's row length in elements.
template <class Dot>
struct Product {
  const typename Dot::Operand* a;
  int64_t lda;
  const typename Dot::Stored* b;
  int64_t panel;
  int64_t steps;  // rows of a panel
  float* out;
  int64_t ldo;
  const float* alpha;     // [R]: what out shrinks by before the product is added; null: out starts at zero
  const std::byte* next;  // what to fetch into the cache meanwhile, as many bytes as b has; or null
};

template <class Dot, bool Fetch, int R, int C>
TS_INLINE void product_steps(const Product<Dot>& p, int64_t first_panel, f32x16 (&acc)[R][C]) {
  const typename Dot::Operand* a = p.a;
  const typename Dot::Stored* b = p.b + first_panel * p.panel;
  const std::byte* next = p.next + (Fetch ? first_panel * p.steps * 64 : 0);
  for (int64_t i = 0; i < p.steps; ++i) {
    if constexpr (Fetch) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) _mm_prefetch(reinterpret_cast<const char*>(next + c * 64), _MM_HINT_T1);
      next += C * 64;
    }
    Dot::step(acc, a, p.lda, b, p.panel);
    a += Dot::kDepth;
    b += Dot::kRowElements;
  }
}

template <class Dot, bool Fetch, int R, int C>
TS_INLINE void product_block(const Product<Dot>& p, int64_t first_panel) {
  f32x16 acc[R][C];
  float* out = p.out + first_panel * 16;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) acc[r][c] = zero();
  }
  if (p.alpha != nullptr) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = mul(load(out + r * p.ldo + c * 16), set1(p.alpha[r]));
    }
  }
  product_steps<Dot, Fetch>(p, first_panel, acc);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(out + r * p.ldo + c * 16, acc[r][c]);
  }
}

template <class Dot, bool Fetch, int R>
__attribute__((noinline)) void product_rows(const Product<Dot>& p, int64_t panels) {
  constexpr int C = kMaxPanels<R>;
  int64_t j = 0;
  for (; j + C <= panels; j += C) product_block<Dot, Fetch, R, C>(p, j);
  if constexpr (C > 2) {
    for (; j + 2 <= panels; j += 2) product_block<Dot, Fetch, R, 2>(p, j);
  }
  if constexpr (C > 1) {
    if (j < panels) product_block<Dot, Fetch, R, 1>(p, j);
  }
}

template <class Dot, bool Fetch>
TS_INLINE void product_dispatch(const Product<Dot>& p, int rows, int64_t panels) {
  switch (rows) {
    case 1: return product_rows<Dot, Fetch, 1>(p, panels);
    case 2: return product_rows<Dot, Fetch, 2>(p, panels);
    case 3: return product_rows<Dot, Fetch, 3>(p, panels);
    case 4: return product_rows<Dot, Fetch, 4>(p, panels);
    case 5: return product_rows<Dot, Fetch, 5>(p, panels);
    default: return product_rows<Dot, Fetch, 6>(p, panels);
  }
}

template <class Dot>
TS_INLINE void product(const Product<Dot>& p, int rows, int64_t panels) {
  p.next == nullptr ? product_dispatch<Dot, false>(p, rows, panels) : product_dispatch<Dot, true>(p, rows, panels);
}

// The softmax of a block's rows, four panels at a time and then one by one.
template <class Dot, bool Masked>
class RowSoftmax {
 public:
  template <class Engine>
  RowSoftmax(const AttentionArgs& args, const RowTile<Engine>& tile, BlockStep<Engine>& step)
      : scores_(step.scores), probabilities_(step.probabilities), ld_(args.page_size), rows_(step.rows),
        panels_(step.panels), valid_(step.valid), scale_(args.scale_log2), maximum_(tile.maximum + step.first),
        lanes_(tile.lanes + step.first * 16), alpha_(step.alpha) {}

  void run() const {
    alignas(64) float top[16];
    store(top, set1(kNothing));
    for (int r = 0; r < rows_; ++r) top[r] = greatest(r);
    raise_maxima(load(top), scale_, rows_, maximum_, alpha_);
    for (int r = 0; r < rows_; ++r) {
      f32x16 sum = zero();
      int j = 0;
      for (; j + 4 <= panels_; j += 4) exponentials<4>(r, j, sum);
      for (; j < panels_; ++j) exponentials<1>(r, j, sum);
      store(lanes_ + r * 16, fma(load(lanes_ + r * 16), set1(alpha_[r]), sum));
    }
  }

 private:
  inline __attribute__((always_inline)) f32x16 visible(f32x16 x, int r, int panel, f32x16 otherwise) const {
    return Masked ? select(first_lanes(valid_[r] - panel * 16), x, otherwise) : x;
  }
  inline __attribute__((always_inline)) float greatest(int r) const {
    const f32x16 nothing = set1(kNothing);
    const float* s = scores_ + r * ld_;
    f32x16 best = visible(load(s), r, 0, nothing);
    for (int j = 1; j < panels_; ++j) best = max(best, visible(load(s + j * 16), r, j, nothing));
    return reduce_max(best);
  }
  template <int N>
  inline __attribute__((always_inline)) void exponentials(int r, int panel, f32x16& sum) const {
    const f32x16 factor = set1(scale_), shift = set1(-maximum_[r]);
    const float* s = scores_ + r * ld_ + panel * 16;
    f32x16 p[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      p[j] = visible(exp2_of<Dot::kCoarseExp>(fma(load(s + j * 16), factor, shift)), r, panel + j, zero());
      sum = add(sum, p[j]);
    }
    Dot::store_operands(probabilities_ + r * ld_ + panel * 16, p);
  }

  const float* scores_;
  typename Dot::Operand* probabilities_;
  int64_t ld_;
  int rows_, panels_;
  const int32_t* valid_;
  float scale_;
  float *maximum_, *lanes_, *alpha_;
};

// What attention_impl.h asks of an instruction set.
template <class Dot>
struct VectorEngine {
  using Stored = typename Dot::Stored;
  using Operand = typename Dot::Operand;
  static constexpr bool kPipelined = false;
  static constexpr int64_t kFetchingTiles = std::numeric_limits<int64_t>::max();
  static constexpr int kPanelAlign = 1;  // panels of positions are taken in multiples of this
  struct Session {};                     // what a worker sets up for the length of a kernel

  // Rows to take at a time: at most 6, and evenly many in each block.
  static int block_rows(int64_t rows) {
    const int64_t blocks = (rows + 5) / 6;
    return static_cast<int>((rows + blocks - 1) / blocks);
  }

  TS_INLINE void store_operand(Operand* p, f32x16 x) { Dot::store_operands(p, {x}); }

  static void advance(const AttentionArgs& args, RowTile<VectorEngine>& tile, BlockStep<VectorEngine>* accumulate,
                      BlockStep<VectorEngine>* softmax, BlockStep<VectorEngine>* scores) {
    const int64_t dim = args.head_dim, ld = args.page_size;
    if (scores != nullptr) {
      const auto& s = *scores;
      product<Dot>({tile.q + s.first * dim, dim, s.k, dim * 16, dim / Dot::kDepth, s.scores, ld, nullptr,
                    reinterpret_cast<const std::byte*>(s.next_k)},
                   s.rows, s.panels);
    }
    if (softmax != nullptr && softmax->masked) {
      RowSoftmax<Dot, true>(args, tile, *softmax).run();
    } else if (softmax != nullptr) {
      RowSoftmax<Dot, false>(args, tile, *softmax).run();
    }
    if (accumulate != nullptr) {
      const auto& s = *accumulate;
      product<Dot>({s.probabilities, ld, s.v, args.page_size * 16, s.panels * 16 / Dot::kDepth,
                    tile.o + s.first * dim, dim, s.alpha, reinterpret_cast<const std::byte*>(s.next_v)},
                   s.rows, dim / 16);
    }
  }
};

}  // namespace tokenspeed::kernels::TS_ISA
