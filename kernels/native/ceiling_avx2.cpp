#include "ceiling_read.h"

namespace tokenspeed::kernels {

void ceiling_read_avx2(const Invocation& inv) noexcept { avx2::read_all(inv); }

void ceiling_f32_avx2(const Invocation& inv) noexcept {
  const int64_t items = inv.i64(0), iterations = inv.i64(1);
  const __m256 a = _mm256_set1_ps(1e-3f), b = _mm256_set1_ps(1e-2f);
  __m256 sum[12];
  for (__m256& s : sum) s = _mm256_setzero_ps();
  while (inv.claim() < items) {
    for (int64_t i = 0; i < iterations; ++i) {
      for (__m256& s : sum) s = _mm256_fmadd_ps(a, b, s);
      for (__m256& s : sum) asm volatile("" : "+x"(s));  // or the compiler would hoist the whole loop
    }
  }
}

}  // namespace tokenspeed::kernels
