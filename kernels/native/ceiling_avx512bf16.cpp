#include "ceiling.h"
#include "simd.h"

namespace tokenspeed::kernels {

void ceiling_bf16_avx512bf16(const Invocation& inv) noexcept {
  const int64_t items = inv.i64(0), iterations = inv.i64(1);
  const __m512bh a = (__m512bh)_mm512_set1_ps(1e-3f), b = (__m512bh)_mm512_set1_ps(1e-2f);
  __m512 sum[16];
  for (__m512& s : sum) s = _mm512_setzero_ps();
  while (inv.claim() < items) {
    for (int64_t i = 0; i < iterations; ++i) {
      for (__m512& s : sum) s = _mm512_dpbf16_ps(s, a, b);
      for (__m512& s : sum) asm volatile("" : "+v"(s));  // or the compiler would hoist the whole loop
    }
  }
}

}  // namespace tokenspeed::kernels
