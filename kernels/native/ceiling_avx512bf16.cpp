#include "ceiling.h"
#include "simd.h"

namespace tokenspeed::kernels {

void ceiling_bf16_avx512bf16(const Invocation& inv) noexcept {
  const int64_t items = inv.i64(0), iterations = inv.i64(1);
  __m512bh a = (__m512bh)_mm512_set1_ps(1e-3f);
  const __m512bh b = (__m512bh)_mm512_set1_ps(1e-2f);
  __m512 sum[16];
  for (int j = 0; j < 16; ++j) sum[j] = _mm512_set1_ps(static_cast<float>(j));  // all different, or they would be one
  while (inv.claim() < items) {
    for (int64_t i = 0; i < iterations; ++i) {
      asm volatile("" : "+v"(a));  // may have changed: the loop cannot be hoisted
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) sum[j] = _mm512_dpbf16_ps(sum[j], a, b);
    }
  }
  for (const __m512& s : sum) asm volatile("" ::"v"(s));  // used: the loop cannot be dropped
}

}  // namespace tokenspeed::kernels
