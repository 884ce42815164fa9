#include "ceiling_read.h"

namespace tokenspeed::kernels {

void ceiling_read_avx512(const Invocation& inv) noexcept { avx512::read_all(inv); }

void ceiling_f32_avx512(const Invocation& inv) noexcept {
  const int64_t items = inv.i64(0), iterations = inv.i64(1);
  const __m512 a = _mm512_set1_ps(1e-3f), b = _mm512_set1_ps(1e-2f);
  __m512 sum[16];
  for (__m512& s : sum) s = _mm512_setzero_ps();
  while (inv.claim() < items) {
    for (int64_t i = 0; i < iterations; ++i) {
      for (__m512& s : sum) s = _mm512_fmadd_ps(a, b, s);
      for (__m512& s : sum) asm volatile("" : "+v"(s));  // or the compiler would hoist the whole loop
    }
  }
}

}  // namespace tokenspeed::kernels
