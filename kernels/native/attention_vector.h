// The two matrix products of attention on vector registers. Both have the shape
//   out[row][panel * 16 + lane] (+)= sum over k of a[row][k] * b[panel][k][lane]
// with b in panel16 layout: K has positions in the lanes and k = dims, V has dims in the lanes and
// k = positions. Every output has one accumulator that takes k in order, whatever the blocking.
#pragma once

#include "simd.h"

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
  TS_INLINE void store_operand(float* p, f32x16 x) { store(p, x); }
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
  TS_INLINE void store_operand(float* p, f32x16 x) { store(p, round_to_bf16(x)); }
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
  TS_INLINE void store_operand(bf16* p, f32x16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)));
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

template <class Engine>
class DirectWalk;

// What attention_impl.h asks of an instruction set.
template <class Dot>
struct VectorEngine {
  using Walk = DirectWalk<VectorEngine>;
  using Stored = typename Dot::Stored;
  using Operand = typename Dot::Operand;
  static constexpr bool kCoarseExp = Dot::kCoarseExp;
  static constexpr int kPanelAlign = 1;  // panels of positions are taken in multiples of this
  struct Session {};                     // what a worker sets up for the length of a kernel

  // Rows to take at a time: at most 6, and evenly many in each block.
  static int block_rows(int64_t rows) {
    const int64_t blocks = (rows + 5) / 6;
    return static_cast<int>((rows + blocks - 1) / blocks);
  }

  TS_INLINE void store_operand(Operand* p, f32x16 x) { Dot::store_operand(p, x); }

  // The last argument: where the next tile's K or V lies, to be fetched meanwhile, or null.
  TS_INLINE void scores(const Operand* q, int rows, int64_t head_dim, const Stored* k, int panels, float* s,
                        int64_t ld, const Stored* next_k) {
    product<Dot>({q, head_dim, k, head_dim * 16, head_dim / Dot::kDepth, s, ld, nullptr,
                  reinterpret_cast<const std::byte*>(next_k)},
                 rows, panels);
  }
  // o = o * alpha + p V over the first panels * 16 positions of the page.
  TS_INLINE void accumulate(const Operand* p, int64_t ld, int rows, const Stored* v, int64_t page_size, int panels,
                            int64_t head_dim, const float* alpha, float* o, const Stored* next_v) {
    product<Dot>({p, ld, v, page_size * 16, panels * 16 / Dot::kDepth, o, head_dim, alpha,
                  reinterpret_cast<const std::byte*>(next_v)},
                 rows, head_dim / 16);
  }
};

}  // namespace tokenspeed::kernels::TS_ISA
