#include "ceiling_read.h"

namespace tokenspeed::kernels {

void ceiling_read_avx2(const Invocation& inv) noexcept { avx2::read_all(inv); }

void ceiling_f32_avx2(const Invocation& inv) noexcept {
  const int64_t items = inv.i64(0), iterations = inv.i64(1);
  __m256 a = _mm256_set1_ps(1e-3f);
  const __m256 b = _mm256_set1_ps(1e-2f);
  __m256 sum[12];
  for (int j = 0; j < 12; ++j) sum[j] = _mm256_set1_ps(static_cast<float>(j));  // all different, or they would be one
  while (inv.claim() < items) {
    for (int64_t i = 0; i < iterations; ++i) {
      asm volatile("" : "+x"(a));  // may have changed: the loop cannot be hoisted
#pragma GCC unroll 12
      for (int j = 0; j < 12; ++j) sum[j] = _mm256_fmadd_ps(a, b, sum[j]);
    }
  }
  for (const __m256& s : sum) asm volatile("" ::"x"(s));  // used: the loop cannot be dropped
}

}  // namespace tokenspeed::kernels
