// Sixteen float32 lanes, the unit in which every native kernel computes, on AVX2 (two registers) or
// AVX-512 (one). Each operation is the same arithmetic on both, so a kernel written on f32x16 gives the
// same bits on x86-64-v3 and v4. Every translation unit compiles this header into the namespace of its
// instruction set, so no two definitions ever meet in the linker.
#pragma once

// GCC 12's AVX-512 intrinsics start from registers that are undefined on purpose, and warn about it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(TS_ISA_AMX)
#define TS_ISA amx
#elif defined(TS_ISA_AVX512BF16)
#define TS_ISA avx512bf16
#elif defined(TS_ISA_AVX512)
#define TS_ISA avx512
#elif defined(TS_ISA_AVX2)
#define TS_ISA avx2
#else
#error "compile kernels through CMakeLists.txt, which defines TS_ISA_* by file suffix"
#endif

#define TS_INLINE static inline __attribute__((always_inline))

namespace tokenspeed::kernels::TS_ISA {

using bf16 = uint16_t;  // the upper half of a float32; rounded to nearest even

#if defined(__AVX512F__)

struct f32x16 { __m512 v; };
struct mask16 { __mmask16 m; };

TS_INLINE f32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
TS_INLINE f32x16 zero() { return {_mm512_setzero_ps()}; }
TS_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
TS_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
TS_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
TS_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
TS_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
TS_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
TS_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TS_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
TS_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
TS_INLINE mask16 first_lanes(int count) {  // lanes 0 .. count-1; count is clamped to 0..16
  return {count >= 16 ? static_cast<__mmask16>(0xffff) : count <= 0 ? static_cast<__mmask16>(0)
                                                                    : static_cast<__mmask16>((1u << count) - 1u)};
}
TS_INLINE f32x16 load_masked(const float* p, mask16 m) { return {_mm512_maskz_loadu_ps(m.m, p)}; }  // others: 0
TS_INLINE void store_masked(float* p, mask16 m, f32x16 a) { _mm512_mask_storeu_ps(p, m.m, a.v); }
TS_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) { return {_mm512_mask_blend_ps(m.m, no.v, yes.v)}; }
TS_INLINE mask16 greater(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
TS_INLINE int bits(mask16 m) { return m.m; }
TS_INLINE f32x16 round_nearest(f32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
TS_INLINE f32x16 round_down(f32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
}
TS_INLINE f32x16 scale2_int(f32x16 a, f32x16 n) {  // a * 2^n for integral n with 2^n a normal float
  return {_mm512_scalef_ps(a.v, n.v)};
}
TS_INLINE f32x16 load_bf16(const bf16* p) {
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
// Sixteen pairs (even, odd) of bfloat16, as they lie in a pair-interleaved panel row of 64 bytes.
TS_INLINE void load_pairs(const bf16* p, f32x16& even, f32x16& odd) {
  __m512i w = _mm512_loadu_si512(p);
  even = {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
  odd = {_mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
// One pair of bfloat16 in all lanes.
TS_INLINE void broadcast_pair(const bf16* p, f32x16& even, f32x16& odd) {
  int pair;
  std::memcpy(&pair, p, 4);
  __m512i w = _mm512_set1_epi32(pair);
  even = {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
  odd = {_mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
TS_INLINE void store_bf16(bf16* p, f32x16 a) {  // round to nearest even; NaN stays NaN
  __m512i w = _mm512_castps_si512(a.v);
  __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(w, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(w, lsb), _mm512_set1_epi32(0x7fff)), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, _mm512_srli_epi32(w, 16), _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
}
TS_INLINE f32x16 round_to_bf16(f32x16 a) {  // the nearest bfloat16, still in float32 lanes; NaN stays NaN
  const __m512i w = _mm512_castps_si512(a.v);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(w, 16), _mm512_set1_epi32(1));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  __m512i r = _mm512_add_epi32(_mm512_add_epi32(w, lsb), _mm512_set1_epi32(0x7fff));
  r = _mm512_mask_or_epi32(r, nan, w, _mm512_set1_epi32(0x400000));
  return {_mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
TS_INLINE void store_pairs(bf16* p, f32x16 even, f32x16 odd) {  // the inverse of load_pairs; rounds
  const __m512i lower = _mm512_srli_epi32(_mm512_castps_si512(round_to_bf16(even).v), 16);
  _mm512_storeu_si512(p, _mm512_or_si512(lower, _mm512_castps_si512(round_to_bf16(odd).v)));
}
TS_INLINE __m256 low_half(f32x16 a) { return _mm512_castps512_ps256(a.v); }
TS_INLINE __m256 high_half(f32x16 a) { return _mm512_extractf32x8_ps(a.v, 1); }

#else

struct f32x16 { __m256 lo, hi; };
struct mask16 { __m256i lo, hi; };

TS_INLINE f32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TS_INLINE f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TS_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TS_INLINE void store(float* p, f32x16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
TS_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
TS_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
TS_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
TS_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
TS_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
TS_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
TS_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
TS_INLINE mask16 first_lanes(int count) {  // lanes 0 .. count-1; count is clamped to 0..16
  const __m256i c = _mm256_set1_epi32(count);
  return {_mm256_cmpgt_epi32(c, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
          _mm256_cmpgt_epi32(c, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}
TS_INLINE f32x16 load_masked(const float* p, mask16 m) {  // other lanes: 0
  return {_mm256_maskload_ps(p, m.lo), _mm256_maskload_ps(p + 8, m.hi)};
}
TS_INLINE void store_masked(float* p, mask16 m, f32x16 a) {
  _mm256_maskstore_ps(p, m.lo, a.lo);
  _mm256_maskstore_ps(p + 8, m.hi, a.hi);
}
TS_INLINE f32x16 select(mask16 m, f32x16 yes, f32x16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_castsi256_ps(m.lo)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_castsi256_ps(m.hi))};
}
TS_INLINE mask16 greater(f32x16 a, f32x16 b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
          _mm256_castps_si256(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))};
}
TS_INLINE int bits(mask16 m) {
  return _mm256_movemask_ps(_mm256_castsi256_ps(m.lo)) | (_mm256_movemask_ps(_mm256_castsi256_ps(m.hi)) << 8);
}
TS_INLINE f32x16 round_nearest(f32x16 a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
TS_INLINE f32x16 round_down(f32x16 a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
}
TS_INLINE __m256 scale2_half(__m256 a, __m256 n) {
  __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(e));
}
TS_INLINE f32x16 scale2_int(f32x16 a, f32x16 n) {  // a * 2^n for integral n with 2^n a normal float
  return {scale2_half(a.lo, n.lo), scale2_half(a.hi, n.hi)};
}
TS_INLINE __m256 widen_half(const bf16* p) {
  __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
TS_INLINE f32x16 load_bf16(const bf16* p) { return {widen_half(p), widen_half(p + 8)}; }
// Sixteen pairs (even, odd) of bfloat16, as they lie in a pair-interleaved panel row of 64 bytes.
TS_INLINE void load_pairs(const bf16* p, f32x16& even, f32x16& odd) {
  __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper))};
}
// One pair of bfloat16 in all lanes.
TS_INLINE void broadcast_pair(const bf16* p, f32x16& even, f32x16& odd) {
  int pair;
  std::memcpy(&pair, p, 4);
  const __m256i w = _mm256_set1_epi32(pair);
  const __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
  const __m256 high = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  even = {low, low};
  odd = {high, high};
}
TS_INLINE __m128i narrow_half(__m256 a) {
  __m256i w = _mm256_castps_si256(a);
  __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(w, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(w, lsb), _mm256_set1_epi32(0x7fff)), 16);
  __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(w, 16), _mm256_set1_epi32(0x40));
  r = _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
TS_INLINE void store_bf16(bf16* p, f32x16 a) {  // round to nearest even; NaN stays NaN
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_half(a.lo));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), narrow_half(a.hi));
}
TS_INLINE __m256 round_half_to_bf16(__m256 a) {
  const __m256i w = _mm256_castps_si256(a);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(w, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(_mm256_add_epi32(w, lsb), _mm256_set1_epi32(0x7fff));
  const __m256i quiet = _mm256_or_si256(w, _mm256_set1_epi32(0x400000));
  r = _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
  return _mm256_castsi256_ps(_mm256_and_si256(r, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
TS_INLINE f32x16 round_to_bf16(f32x16 a) {  // the nearest bfloat16, still in float32 lanes; NaN stays NaN
  return {round_half_to_bf16(a.lo), round_half_to_bf16(a.hi)};
}
TS_INLINE void store_pair_half(bf16* p, __m256 even, __m256 odd) {
  const __m256i lower = _mm256_srli_epi32(_mm256_castps_si256(round_half_to_bf16(even)), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_or_si256(lower, _mm256_castps_si256(round_half_to_bf16(odd))));
}
TS_INLINE void store_pairs(bf16* p, f32x16 even, f32x16 odd) {  // the inverse of load_pairs; rounds
  store_pair_half(p, even.lo, odd.lo);
  store_pair_half(p + 16, even.hi, odd.hi);
}
TS_INLINE __m256 low_half(f32x16 a) { return a.lo; }
TS_INLINE __m256 high_half(f32x16 a) { return a.hi; }

#endif

// Reductions over the sixteen lanes in one fixed tree: halves of 8, 4, 2, 1.
TS_INLINE float reduce_add(f32x16 a) {
  __m256 s = _mm256_add_ps(low_half(a), high_half(a));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  q = _mm_add_ss(q, _mm_shuffle_ps(q, q, 1));
  return _mm_cvtss_f32(q);
}
TS_INLINE float reduce_max(f32x16 a) {
  __m256 s = _mm256_max_ps(low_half(a), high_half(a));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  q = _mm_max_ss(q, _mm_shuffle_ps(q, q, 1));
  return _mm_cvtss_f32(q);
}

// e^x, relative error below 2 ulp. Range reduction x = n ln2 + r with a two-part ln2 (Cody and Waite),
// then a degree-6 polynomial of e^r on |r| <= ln2/2. Below -87.3 the result is 0, above 88.3 it saturates.
TS_INLINE f32x16 exp(f32x16 x) {
  const f32x16 lowest = set1(-87.3f);
  const mask16 alive = greater(x, lowest);
  x = min(max(x, lowest), set1(88.3f));
  const f32x16 n = round_nearest(mul(x, set1(1.44269504088896341f)));
  f32x16 r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  f32x16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), set1(1.0f));
  return select(alive, scale2_int(p, n), zero());
}

TS_INLINE float bf16_to_f32(bf16 x) {
  const uint32_t w = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &w, 4);
  return f;
}
TS_INLINE bf16 f32_to_bf16(float f) {
  uint32_t w;
  std::memcpy(&w, &f, 4);
  if ((w & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((w >> 16) | 0x40);
  return static_cast<bf16>((w + 0x7fffu + ((w >> 16) & 1u)) >> 16);
}

// The storage types of activations, weights and KV pages: the same calls for float and bf16.
TS_INLINE f32x16 load_as_f32(const float* p) { return load(p); }
TS_INLINE f32x16 load_as_f32(const bf16* p) { return load_bf16(p); }
TS_INLINE void store_from_f32(float* p, f32x16 a) { store(p, a); }
TS_INLINE void store_from_f32(bf16* p, f32x16 a) { store_bf16(p, a); }
TS_INLINE float to_f32(float x) { return x; }
TS_INLINE float to_f32(bf16 x) { return bf16_to_f32(x); }

}  // namespace tokenspeed::kernels::TS_ISA
