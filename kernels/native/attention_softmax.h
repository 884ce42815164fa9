// Online softmax over one KV tile for a block of rows, and the merge of two splits.
#pragma once

#include <limits>

#include "simd.h"

namespace tokenspeed::kernels::TS_ISA {

// The running maximum before the first score: finite, so that differences of maxima are never NaN.
inline constexpr float kNoMaximum = -1e30f;

// The greatest score of no position.
inline constexpr float kNothing = -std::numeric_limits<float>::infinity();

// How far, in powers of two, a row's scores may rise above m before m follows them. A probability is then at most
// 2^slack instead of 1, which costs no precision, and O is hardly ever rescaled.
inline constexpr float kMaximumSlack = 8.0f;

// Powers of two at and below this are exactly 0.
inline constexpr float kLeastExponent = -125.0f;

// 2^x to below an ulp, by a polynomial of r on [-1/2, 1/2] with constant term 1 (so 2^0 is exactly 1), fitted for
// the least relative error.
TS_INLINE f32x16 exp2_full(f32x16 x) {
  constexpr float kCoefficients[6] = {6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f,
                                      9.618436918e-03f, 1.339887502e-03f, 1.535336196e-04f};
  const mask16 alive = greater(x, set1(kLeastExponent));
  const f32x16 n = round_nearest(x);
  const f32x16 r = sub(x, n);
  f32x16 p = set1(kCoefficients[5]);
#pragma GCC unroll 8
  for (int i = 4; i >= 0; --i) p = fma(p, r, set1(kCoefficients[i]));
  p = fma(p, r, set1(1.0f));
  return select(alive, scale2_int(p, n), zero());
}

// 2^x for probabilities that are rounded to bfloat16, a relative error of 2e-3: a cubic on [0, 1), fitted likewise,
// is off by at most 8.6e-5.
TS_INLINE f32x16 exp2_coarse(f32x16 x) {
  constexpr float kCoefficients[3] = {6.951167864e-01f, 2.276449912e-01f, 7.706704200e-02f};
  const mask16 alive = greater(x, set1(kLeastExponent));
#if defined(__AVX512BF16__)
  // The fraction and the power of the whole part are one instruction each. The fraction may round up to 1.
  const f32x16 r = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
#else
  const f32x16 n = round_down(x);
  const f32x16 r = sub(x, n);
#endif
  f32x16 p = fma(set1(kCoefficients[2]), r, set1(kCoefficients[1]));
  p = fma(p, r, set1(kCoefficients[0]));
  p = fma(p, r, set1(1.0f));
#if defined(__AVX512BF16__)
  return {_mm512_maskz_scalef_ps(alive.m, p.v, x.v)};
#else
  return select(alive, scale2_int(p, n), zero());
#endif
}

template <bool Coarse>
TS_INLINE f32x16 exp2_of(f32x16 x) {
  return Coarse ? exp2_coarse(x) : exp2_full(x);
}

// Lets the maxima of 16 rows follow the greatest scores of a tile (`top`, those of no position minus infinity), and
// says what earlier sums shrink by: alpha is 1 where the maximum stays. Returns whether any of `rows` moved; those
// beyond stay.
TS_INLINE bool raise_maxima(f32x16 top, float scale_log2, int rows, float* maximum, float* alpha) {
  const f32x16 before = load(maximum), reached = mul(top, set1(scale_log2));
  const f32x16 raised = select(greater(reached, add(before, set1(kMaximumSlack))), reached, before);
  const f32x16 after = select(first_lanes(rows), raised, before);
  store(alpha, set1(1.0f));
  if (bits(greater(after, before)) == 0) return false;
  store(alpha, exp2_full(sub(before, after)));
  store(maximum, after);
  return true;
}

// Adds the next split of a row to those before it.
TS_INLINE void merge_split(float* m, float* l, float* o, float next_m, float next_l, const float* next_o,
                           int64_t head_dim) {
  const float top = next_m > *m ? next_m : *m;
  const f32x16 keep = exp2_full(set1(*m - top)), gain = exp2_full(set1(next_m - top));
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
