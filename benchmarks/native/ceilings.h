// What the machine can do at best, measured by the shortest loops that show it: the ceilings that kernels'
// figures are read against. Each instruction set is compiled by function, so one program serves every CPU.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tokenspeed::benchmarks {

#define TS_TARGET(isa) __attribute__((target(isa), noinline))

// Sum of `bytes` (a multiple of 256) as 64-bit words, four streams of registers; the value keeps the loads alive.
TS_TARGET("avx2") inline int64_t read_all(const char* p, int64_t bytes) {
  __m256i s[8] = {};
  for (int64_t i = 0; i < bytes; i += 256) {
    for (int j = 0; j < 8; ++j) {
      s[j] = _mm256_add_epi64(s[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i + 32 * j)));
    }
  }
  for (int j = 1; j < 8; ++j) s[0] = _mm256_add_epi64(s[0], s[j]);
  return _mm256_extract_epi64(s[0], 0) + _mm256_extract_epi64(s[0], 1) + _mm256_extract_epi64(s[0], 2) +
         _mm256_extract_epi64(s[0], 3);
}

// Each returns the floating-point operations it has done.

TS_TARGET("avx2,fma") inline double fma_avx2(int64_t rounds) {
  __m256 acc[12] = {};
  const __m256 x = _mm256_set1_ps(1e-3f), y = _mm256_set1_ps(1e-2f);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {
      acc[j] = _mm256_fmadd_ps(x, y, acc[j]);
      asm volatile("" : "+x"(acc[j]));
    }
  }
  return static_cast<double>(rounds) * 12 * 8 * 2;
}

TS_TARGET("avx512f") inline double fma_avx512(int64_t rounds) {
  __m512 acc[16] = {};
  const __m512 x = _mm512_set1_ps(1e-3f), y = _mm512_set1_ps(1e-2f);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      acc[j] = _mm512_fmadd_ps(x, y, acc[j]);
      asm volatile("" : "+v"(acc[j]));
    }
  }
  return static_cast<double>(rounds) * 16 * 16 * 2;
}

TS_TARGET("avx512f,avx512bf16") inline double dot_avx512bf16(int64_t rounds) {
  __m512 acc[16] = {};
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3a833a83), y = (__m512bh)_mm512_set1_epi32(0x3c243c24);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      acc[j] = _mm512_dpbf16_ps(acc[j], x, y);
      asm volatile("" : "+v"(acc[j]));
    }
  }
  return static_cast<double>(rounds) * 16 * 16 * 4;
}

// Needs the permission that kernels/native/linear.h asks for.
TS_TARGET("amx-tile,amx-bf16") inline double dot_amx(int64_t rounds) {
  alignas(64) uint8_t config[64] = {1};
  for (int t = 0; t < 8; ++t) {
    config[16 + 2 * t] = 64;
    config[48 + t] = 16;
  }
  asm volatile("" ::"r"(&config) : "memory");  // GCC 12 declares that ldtilecfg reads 8 bytes only
  _tile_loadconfig(config);
  for (int64_t i = 0; i < rounds; ++i) {  // tiles start at zero
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return static_cast<double>(rounds) * 4 * 16 * 16 * 32 * 2;
}

#undef TS_TARGET

}  // namespace tokenspeed::benchmarks
