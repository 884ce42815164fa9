// The two matrix products of attention on AMX tiles. A panel of the KV layout is a B operand as it lies: 16
// rows of 64 bytes, each 16 lanes of bfloat16 pairs. A tile always has 16 rows, whatever the block has:
// rows beyond the block hold garbage, reach no other row, and are never read.
#pragma once

#include "simd.h"

namespace tokenspeed::kernels::TS_ISA {

// Tiles: 0-3 outputs, 4 and 5 operands over 32 of the reduced dimension, 6 and 7 over 16 (its odd rest).
class TileSession {
 public:
  TileSession() {
    Config config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = i == 6 ? 32 : 64;
      config.rows[i] = i == 7 ? 8 : 16;
    }
    // GCC 12 declares that _tile_loadconfig reads eight bytes; this makes all 64 real.
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  static_assert(sizeof(Config) == 64);
};

// The tile intrinsics of GCC 12 do not tell the compiler which memory they read; stores before this are done.
TS_INLINE void tiles_read_memory() { asm volatile("" ::: "memory"); }

// Asks for `lines` cache lines to come into the second-level cache.
TS_INLINE void fetch_lines(const std::byte* next, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i) _mm_prefetch(reinterpret_cast<const char*>(next + i * 64), _MM_HINT_T1);
}

// One product as attention_vector.h's, over 16 rows of a and out. `k` is a multiple of 16.
struct TileProduct {
  const bf16* a;
  int64_t lda;
  const bf16* b;
  int64_t panel, k;
  float* out;
  int64_t ldo;
  const std::byte* next;  // what to fetch meanwhile, as many bytes as b has; or null
};

// Tile numbers are part of an instruction, so both pairs of outputs are spelt out. Pair 0 is tiles 0 and 1, pair 1
// is tiles 2 and 3; N says how many of the two are used.
template <int Pair, int N>
TS_INLINE void outputs_zero() {
  if constexpr (Pair == 0) {
    _tile_zero(0);
    if constexpr (N == 2) _tile_zero(1);
  } else {
    _tile_zero(2);
    if constexpr (N == 2) _tile_zero(3);
  }
}
template <int Pair, int N>
TS_INLINE void outputs_load(const float* out, int64_t stride) {
  if constexpr (Pair == 0) {
    _tile_loadd(0, out, stride);
    if constexpr (N == 2) _tile_loadd(1, out + 16, stride);
  } else {
    _tile_loadd(2, out, stride);
    if constexpr (N == 2) _tile_loadd(3, out + 16, stride);
  }
}
template <int Pair, int N>
TS_INLINE void outputs_store(float* out, int64_t stride) {
  if constexpr (Pair == 0) {
    _tile_stored(0, out, stride);
    if constexpr (N == 2) _tile_stored(1, out + 16, stride);
  } else {
    _tile_stored(2, out, stride);
    if constexpr (N == 2) _tile_stored(3, out + 16, stride);
  }
}
template <int Pair, int N>
TS_INLINE void outputs_add(const bf16* b, int64_t panel) {  // tile 4 times panels of 16 rows
  _tile_loadd(5, b, 64);
  if constexpr (Pair == 0) {
    _tile_dpbf16ps(0, 4, 5);
  } else {
    _tile_dpbf16ps(2, 4, 5);
  }
  if constexpr (N == 2) {
    _tile_loadd(5, b + panel, 64);
    if constexpr (Pair == 0) {
      _tile_dpbf16ps(1, 4, 5);
    } else {
      _tile_dpbf16ps(3, 4, 5);
    }
  }
}
template <int Pair, int N>
TS_INLINE void outputs_add_half(const bf16* b, int64_t panel) {  // tile 6 times panels of 8 rows
  _tile_loadd(7, b, 64);
  if constexpr (Pair == 0) {
    _tile_dpbf16ps(0, 6, 7);
  } else {
    _tile_dpbf16ps(2, 6, 7);
  }
  if constexpr (N == 2) {
    _tile_loadd(7, b + panel, 64);
    if constexpr (Pair == 0) {
      _tile_dpbf16ps(1, 6, 7);
    } else {
      _tile_dpbf16ps(3, 6, 7);
    }
  }
}

// Computes N consecutive output panels of a product, or adds to them.
template <int Pair, int N, bool Accumulate>
TS_INLINE void tile_panels(const TileProduct& p, int64_t first_panel) {
  const int64_t stride = p.ldo * static_cast<int64_t>(sizeof(float)), a_stride = p.lda * 2;
  float* out = p.out + first_panel * 16;
  const bf16* b = p.b + first_panel * p.panel;
  const std::byte* next = p.next == nullptr ? nullptr : p.next + first_panel * p.k * 32;
  if constexpr (Accumulate) {
    outputs_load<Pair, N>(out, stride);
  } else {
    outputs_zero<Pair, N>();
  }
  int64_t i = 0;
  for (; i + 32 <= p.k; i += 32) {
    if (next != nullptr) fetch_lines(next + i * N * 32, N * 16);
    _tile_loadd(4, p.a + i, a_stride);
    outputs_add<Pair, N>(b + i * 16, p.panel);
  }
  if (i < p.k) {
    if (next != nullptr) fetch_lines(next + i * N * 32, N * 8);
    _tile_loadd(6, p.a + i, a_stride);
    outputs_add_half<Pair, N>(b + i * 16, p.panel);
  }
  outputs_store<Pair, N>(out, stride);
}

template <bool Accumulate>
TS_INLINE void tile_slice(const TileProduct& p, int64_t first_panel, int64_t panels, bool odd) {
  if (panels - first_panel >= 2) {
    return odd ? tile_panels<1, 2, Accumulate>(p, first_panel) : tile_panels<0, 2, Accumulate>(p, first_panel);
  }
  return odd ? tile_panels<1, 1, Accumulate>(p, first_panel) : tile_panels<0, 1, Accumulate>(p, first_panel);
}

}  // namespace tokenspeed::kernels::TS_ISA
