#include "ceiling_read.h"

namespace tokenspeed::kernels {

void ceiling_read_avx512(const Invocation& inv) noexcept { avx512::read_all(inv); }

void ceiling_f32_avx512(const Invocation& inv) noexcept {
  const int64_t items = inv.i64(0), iterations = inv.i64(1);
  __m512 a = _mm512_set1_ps(1e-3f);
  const __m512 b = _mm512_set1_ps(1e-2f);
  __m512 sum[16];
  for (int j = 0; j < 16; ++j) sum[j] = _mm512_set1_ps(static_cast<float>(j));  // all different, or they would be one
  while (inv.claim() < items) {
    for (int64_t i = 0; i < iterations; ++i) {
      asm volatile("" : "+v"(a));  // may have changed: the loop cannot be hoisted
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) sum[j] = _mm512_fmadd_ps(a, b, sum[j]);
    }
  }
  for (const __m512& s : sum) asm volatile("" ::"v"(s));  // used: the loop cannot be dropped
}

}  // namespace tokenspeed::kernels
