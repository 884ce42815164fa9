// Online softmax over one KV tile for a block of rows, and the merge of two splits.
#pragma once

#include <limits>

#include "simd.h"

namespace tokenspeed::kernels::TS_ISA {

// The running maximum before the first score: finite, so that differences of maxima are never NaN.
inline constexpr float kNoMaximum = -1e30f;

// Coefficients of r, r^2, ... of 2^r on [-1/2, 1/2] with constant term 1 (so 2^0 is exactly 1), fitted for
// the least relative error: 2.8e-6 for degree 4, below half an ulp for degree 6.
template <int Degree>
inline constexpr float kExp2[Degree] = {};
template <>
inline constexpr float kExp2<4>[4] = {6.931241751e-01f, 2.402409911e-01f, 5.590642616e-02f, 9.582852945e-03f};
template <>
inline constexpr float kExp2<6>[6] = {6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f,
                                      9.618436918e-03f, 1.339887502e-03f, 1.535336196e-04f};

// 2^x for x <= 0 (or a rounding error above); exactly 0 at and below -125, minus infinity included.
template <int Degree>
TS_INLINE f32x16 exp2_nonpositive(f32x16 x) {
  const mask16 alive = greater(x, set1(-125.0f));
  const f32x16 n = round_nearest(x);
  const f32x16 r = sub(x, n);
  f32x16 p = set1(kExp2<Degree>[Degree - 1]);
#pragma GCC unroll 8
  for (int i = Degree - 2; i >= 0; --i) p = fma(p, r, set1(kExp2<Degree>[i]));
  p = fma(p, r, set1(1.0f));
  return select(alive, scale2_int(p, n), zero());
}

// A block of at most 16 rows against one KV tile. Row r sees the first valid[r] positions of the tile; it may
// see none, and then nothing of it changes.
template <class Operand>
struct SoftmaxBlock {
  const float* scores;  // [rows][ld]
  Operand* probabilities;  // [rows][ld]
  int64_t ld;
  int rows, panels;  // panels of 16 positions, the same for all rows
  const int32_t* valid;
  float* maximum;  // m [rows], in powers of two; sixteen are read and written, those beyond rows unchanged
  float* lanes;    // l [rows][16]
  float* alpha;    // out [16]: what the block's earlier sums shrink by
};

template <class Engine, bool Masked>
void softmax_block(const SoftmaxBlock<typename Engine::Operand>& b, float scale_log2) {
  const f32x16 least = set1(-std::numeric_limits<float>::infinity());
  alignas(64) float top[16];
  store(top, least);
  for (int r = 0; r < b.rows; ++r) {
    const float* s = b.scores + r * b.ld;
    f32x16 best = least;
    for (int j = 0; j < b.panels; ++j) {
      f32x16 x = load(s + j * 16);
      if constexpr (Masked) x = select(first_lanes(b.valid[r] - j * 16), x, least);
      best = max(best, x);
    }
    top[r] = reduce_max(best);
  }

  const f32x16 before = load(b.maximum);
  const f32x16 after = max(before, mul(load(top), set1(scale_log2)));
  store(b.alpha, exp2_nonpositive<6>(sub(before, after)));
  store(b.maximum, after);

  const f32x16 factor = set1(scale_log2);
  for (int r = 0; r < b.rows; ++r) {
    const float* s = b.scores + r * b.ld;
    const f32x16 shift = set1(-b.maximum[r]);
    f32x16 sum = zero();
    for (int j = 0; j < b.panels; ++j) {
      f32x16 p = exp2_nonpositive<Engine::kExpDegree>(fma(load(s + j * 16), factor, shift));
      if constexpr (Masked) p = select(first_lanes(b.valid[r] - j * 16), p, zero());
      sum = add(sum, p);
      Engine::store_operand(b.probabilities + r * b.ld + j * 16, p);
    }
    store(b.lanes + r * 16, fma(load(b.lanes + r * 16), set1(b.alpha[r]), sum));
  }
}

// Adds the next split of a row to those before it.
TS_INLINE void merge_split(float* m, float* l, float* o, float next_m, float next_l, const float* next_o,
                           int64_t head_dim) {
  const float top = next_m > *m ? next_m : *m;
  const f32x16 keep = exp2_nonpositive<6>(set1(*m - top)), gain = exp2_nonpositive<6>(set1(next_m - top));
  const f32x16 sum = fma(set1(next_l), gain, mul(set1(*l), keep));  // the same in all lanes
  *l = _mm_cvtss_f32(_mm256_castps256_ps128(low_half(sum)));
  for (int64_t d = 0; d < head_dim; d += 16) {
    store(o + d, fma(load(next_o + d), gain, mul(load(o + d), keep)));
  }
  *m = top;
}

// A row's output. Adding zero turns -0 into +0: which of the two a vanished sum has may depend on how many
// exact zeros were added to it, and those depend on the other rows of the block.
template <class Stored>
TS_INLINE void write_output(const float* o, float l, int64_t head_dim, Stored* out) {
  for (int64_t d = 0; d < head_dim; d += 16) {
    store_from_f32(out + d, add(div(load(o + d), set1(l)), zero()));
  }
}

}  // namespace tokenspeed::kernels::TS_ISA
