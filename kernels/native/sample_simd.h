// Lanes that sampling needs beyond simd.h: random bits, small integers and float64 sums.
#pragma once

#include <limits>

#include "philox.h"
#include "simd.h"

namespace tokenspeed::kernels::TS_ISA {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

#if defined(__AVX512F__)

struct u32x16 { __m512i v; };

TS_INLINE u32x16 set1_u32(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
TS_INLINE u32x16 load_u32(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
TS_INLINE u32x16 add(u32x16 a, u32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
TS_INLINE u32x16 bit_xor(u32x16 a, u32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
TS_INLINE void multiply(u32x16 a, uint32_t by, u32x16& high, u32x16& low) {
  const __m512i m = _mm512_set1_epi32(static_cast<int>(by));
  const __m512i even = _mm512_mul_epu32(a.v, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), m);
  high = {_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd)};
  low = {_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32))};
}
// Four vectors as the rows of 4x4 matrices, one in each 128-bit lane, transposed.
TS_INLINE void transpose4(u32x16 x[4]) {
  const __m512i a = _mm512_unpacklo_epi32(x[0].v, x[1].v), b = _mm512_unpackhi_epi32(x[0].v, x[1].v);
  const __m512i c = _mm512_unpacklo_epi32(x[2].v, x[3].v), d = _mm512_unpackhi_epi32(x[2].v, x[3].v);
  x[0] = {_mm512_unpacklo_epi64(a, c)};
  x[1] = {_mm512_unpackhi_epi64(a, c)};
  x[2] = {_mm512_unpacklo_epi64(b, d)};
  x[3] = {_mm512_unpackhi_epi64(b, d)};
}
TS_INLINE f32x16 to_float(u32x16 a) { return {_mm512_cvtepu32_ps(a.v)}; }
TS_INLINE void store_truncated(int32_t* p, f32x16 a) { _mm512_storeu_si512(p, _mm512_cvttps_epi32(a.v)); }
TS_INLINE mask16 mask_of(int lanes) { return {static_cast<__mmask16>(lanes)}; }

struct f64x16 { __m512d lo, hi; };
TS_INLINE f64x16 zero_f64() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
TS_INLINE f64x16 add(f64x16 s, f32x16 a) {
  return {_mm512_add_pd(s.lo, _mm512_cvtps_pd(low_half(a))), _mm512_add_pd(s.hi, _mm512_cvtps_pd(high_half(a)))};
}
TS_INLINE void store_f64(double* p, f64x16 s) {
  _mm512_storeu_pd(p, s.lo);
  _mm512_storeu_pd(p + 8, s.hi);
}

#else

struct u32x16 { __m256i lo, hi; };

TS_INLINE u32x16 set1_u32(uint32_t x) {
  const __m256i v = _mm256_set1_epi32(static_cast<int>(x));
  return {v, v};
}
TS_INLINE u32x16 load_u32(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
TS_INLINE u32x16 add(u32x16 a, u32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
TS_INLINE u32x16 bit_xor(u32x16 a, u32x16 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
TS_INLINE void multiply_half(__m256i a, __m256i m, __m256i& high, __m256i& low) {
  const __m256i even = _mm256_mul_epu32(a, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), m);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
TS_INLINE void multiply(u32x16 a, uint32_t by, u32x16& high, u32x16& low) {
  const __m256i m = _mm256_set1_epi32(static_cast<int>(by));
  multiply_half(a.lo, m, high.lo, low.lo);
  multiply_half(a.hi, m, high.hi, low.hi);
}
TS_INLINE void transpose4_half(__m256i& x0, __m256i& x1, __m256i& x2, __m256i& x3) {
  const __m256i a = _mm256_unpacklo_epi32(x0, x1), b = _mm256_unpackhi_epi32(x0, x1);
  const __m256i c = _mm256_unpacklo_epi32(x2, x3), d = _mm256_unpackhi_epi32(x2, x3);
  x0 = _mm256_unpacklo_epi64(a, c);
  x1 = _mm256_unpackhi_epi64(a, c);
  x2 = _mm256_unpacklo_epi64(b, d);
  x3 = _mm256_unpackhi_epi64(b, d);
}
// Four vectors as the rows of 4x4 matrices, one in each 128-bit lane, transposed.
TS_INLINE void transpose4(u32x16 x[4]) {
  transpose4_half(x[0].lo, x[1].lo, x[2].lo, x[3].lo);
  transpose4_half(x[0].hi, x[1].hi, x[2].hi, x[3].hi);
}
TS_INLINE __m256 to_float_half(__m256i a) {  // the upper part is exact, so the sum is rounded once
  const __m256 upper = _mm256_cvtepi32_ps(_mm256_srli_epi32(a, 16));
  const __m256 lower = _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(0xffff)));
  return _mm256_fmadd_ps(upper, _mm256_set1_ps(65536.0f), lower);
}
TS_INLINE f32x16 to_float(u32x16 a) { return {to_float_half(a.lo), to_float_half(a.hi)}; }
TS_INLINE void store_truncated(int32_t* p, f32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvttps_epi32(a.lo));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), _mm256_cvttps_epi32(a.hi));
}
TS_INLINE mask16 mask_of(int lanes) {
  const __m256i all = _mm256_set1_epi32(lanes);
  const __m256i lo = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), hi = _mm256_slli_epi32(lo, 8);
  return {_mm256_cmpeq_epi32(_mm256_and_si256(all, lo), lo), _mm256_cmpeq_epi32(_mm256_and_si256(all, hi), hi)};
}

struct f64x16 { __m256d q[4]; };
TS_INLINE f64x16 zero_f64() {
  const __m256d z = _mm256_setzero_pd();
  return {{z, z, z, z}};
}
TS_INLINE f64x16 add(f64x16 s, f32x16 a) {
  return {{_mm256_add_pd(s.q[0], _mm256_cvtps_pd(_mm256_castps256_ps128(a.lo))),
           _mm256_add_pd(s.q[1], _mm256_cvtps_pd(_mm256_extractf128_ps(a.lo, 1))),
           _mm256_add_pd(s.q[2], _mm256_cvtps_pd(_mm256_castps256_ps128(a.hi))),
           _mm256_add_pd(s.q[3], _mm256_cvtps_pd(_mm256_extractf128_ps(a.hi, 1)))}};
}
TS_INLINE void store_f64(double* p, f64x16 s) {
  for (int i = 0; i < 4; ++i) _mm256_storeu_pd(p + 4 * i, s.q[i]);
}

#endif

TS_INLINE double reduce_add(f64x16 s) {  // lanes in ascending order
  double lanes[16], total = 0;
  store_f64(lanes, s);
  for (double lane : lanes) total += lane;
  return total;
}

TS_INLINE bool any(int lanes) { return lanes != 0; }
TS_INLINE float first_lane(f32x16 a) { return _mm256_cvtss_f32(low_half(a)); }

// Random bits of the 64 tokens from 64 * chunk on, in token order: x[b] lane i belongs to token 16 b + i.
TS_INLINE void random_bits(uint64_t seed, uint32_t position, uint32_t chunk, u32x16 x[4]) {
  // Element 4 L + b computes block 4 b + L, so that the transposition below leaves tokens in order.
  alignas(64) static constexpr uint32_t kBlocks[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  x[0] = set1_u32(position);
  x[1] = add(set1_u32(chunk * 16), load_u32(kBlocks));
  x[2] = x[3] = set1_u32(0);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    u32x16 high0, low0, high1, low1;
    multiply(x[0], kPhiloxMultiplier0, high0, low0);
    multiply(x[2], kPhiloxMultiplier1, high1, low1);
    x[0] = bit_xor(bit_xor(high1, x[1]), set1_u32(key0));
    x[1] = low1;
    x[2] = bit_xor(bit_xor(high0, x[3]), set1_u32(key1));
    x[3] = low0;
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  transpose4(x);
}

// 1 - u of the header, for u = (x + 0.5) / 2^32: to float32's relative precision also where u is near 1.
TS_INLINE f32x16 complement_of_u(u32x16 x) {
  return mul(add(to_float(bit_xor(x, set1_u32(0xffffffffu))), set1(0.5f)), set1(0x1p-32f));
}

// No variate exceeds this: u is at most 1 - 2^-33, and 33 log 2 = 22.874.
inline constexpr float kGumbelMax = 22.88f;

}  // namespace tokenspeed::kernels::TS_ISA
