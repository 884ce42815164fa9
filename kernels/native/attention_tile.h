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

// Adds a[16 rows][k] * b[panel][k][16] to tiles 0 .. N-1 for N consecutive panels, and fetches as many
// bytes at `next` as it reads at b (null: none). `k` is a multiple of 16; lda and panel count elements.
template <int N>
TS_INLINE void tile_products(const bf16* a, int64_t lda, const bf16* b, int64_t panel, int64_t k,
                             const std::byte* next) {
  const int64_t a_stride = lda * static_cast<int64_t>(sizeof(bf16));
  int64_t i = 0;
  for (; i + 32 <= k; i += 32) {
    const bf16* rows = b + i * 16;
    if (next != nullptr) fetch_lines(next + i * N * 32, N * 16);
    _tile_loadd(4, a + i, a_stride);
    _tile_loadd(5, rows, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (N > 1) {
      _tile_loadd(5, rows + panel, 64);
      _tile_dpbf16ps(1, 4, 5);
    }
    if constexpr (N > 2) {
      _tile_loadd(5, rows + 2 * panel, 64);
      _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (N > 3) {
      _tile_loadd(5, rows + 3 * panel, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  if (i == k) return;
  if (next != nullptr) fetch_lines(next + i * N * 32, N * 8);
  const bf16* rows = b + i * 16;
  _tile_loadd(6, a + i, a_stride);
  _tile_loadd(7, rows, 64);
  _tile_dpbf16ps(0, 6, 7);
  if constexpr (N > 1) {
    _tile_loadd(7, rows + panel, 64);
    _tile_dpbf16ps(1, 6, 7);
  }
  if constexpr (N > 2) {
    _tile_loadd(7, rows + 2 * panel, 64);
    _tile_dpbf16ps(2, 6, 7);
  }
  if constexpr (N > 3) {
    _tile_loadd(7, rows + 3 * panel, 64);
    _tile_dpbf16ps(3, 6, 7);
  }
}

// Tiles 0 .. N-1 from or to out[16 rows][N * 16], ldo in elements.
template <int N>
TS_INLINE void tile_outputs_zero() {
  _tile_zero(0);
  if constexpr (N > 1) _tile_zero(1);
  if constexpr (N > 2) _tile_zero(2);
  if constexpr (N > 3) _tile_zero(3);
}
template <int N>
TS_INLINE void tile_outputs_load(const float* out, int64_t ldo) {
  const int64_t stride = ldo * static_cast<int64_t>(sizeof(float));
  _tile_loadd(0, out, stride);
  if constexpr (N > 1) _tile_loadd(1, out + 16, stride);
  if constexpr (N > 2) _tile_loadd(2, out + 32, stride);
  if constexpr (N > 3) _tile_loadd(3, out + 48, stride);
}
template <int N>
TS_INLINE void tile_outputs_store(float* out, int64_t ldo) {
  const int64_t stride = ldo * static_cast<int64_t>(sizeof(float));
  _tile_stored(0, out, stride);
  if constexpr (N > 1) _tile_stored(1, out + 16, stride);
  if constexpr (N > 2) _tile_stored(2, out + 32, stride);
  if constexpr (N > 3) _tile_stored(3, out + 48, stride);
}

// One product as attention_vector.h's, over 16 rows of a and out.
struct TileProduct {
  const bf16* a;
  int64_t lda;
  const bf16* b;
  int64_t panel, k;
  float* out;
  int64_t ldo;
  const std::byte* next;  // what to fetch meanwhile, as many bytes as b has; or null
};

template <int N, bool Accumulate>
TS_INLINE void tile_block(const TileProduct& p, int64_t first_panel) {
  float* out = p.out + first_panel * 16;
  if constexpr (Accumulate) {
    tile_outputs_load<N>(out, p.ldo);
  } else {
    tile_outputs_zero<N>();
  }
  const std::byte* next = p.next == nullptr ? nullptr : p.next + first_panel * p.k * 32;
  tile_products<N>(p.a, p.lda, p.b + first_panel * p.panel, p.panel, p.k, next);
  tile_outputs_store<N>(out, p.ldo);
}

template <bool Accumulate>
TS_INLINE void tile_product(const TileProduct& p, int64_t panels) {
  tiles_read_memory();
  int64_t j = 0;
  for (; j + 4 <= panels; j += 4) tile_block<4, Accumulate>(p, j);
  switch (panels - j) {
    case 3: return tile_block<3, Accumulate>(p, j);
    case 2: return tile_block<2, Accumulate>(p, j);
    case 1: return tile_block<1, Accumulate>(p, j);
    default: return;
  }
}

// What attention_impl.h asks of an instruction set.
struct TileEngine {
  using Stored = bf16;
  using Operand = bf16;
  using Session = TileSession;
  static constexpr int kExpDegree = 4;
  static constexpr int kPanelAlign = 2;  // one tile of probabilities spans 32 positions

  static int block_rows(int64_t) { return 16; }

  TS_INLINE void store_operand(bf16* p, f32x16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)));
  }

  // The last argument: where the next tile's K or V lies, to be fetched meanwhile, or null.
  TS_INLINE void scores(const bf16* q, int, int64_t head_dim, const bf16* k, int panels, float* s, int64_t ld,
                        const bf16* next_k) {
    const auto* next = reinterpret_cast<const std::byte*>(next_k);
    tile_product<false>({q, head_dim, k, head_dim * 16, head_dim, s, ld, next}, panels);
  }
  // o = o * alpha + p V over the first panels * 16 positions of the page.
  TS_INLINE void accumulate(const bf16* p, int64_t ld, int rows, const bf16* v, int64_t page_size, int panels,
                            int64_t head_dim, const float* alpha, float* o, const bf16* next_v) {
    for (int r = 0; r < rows; ++r) {
      const f32x16 keep = set1(alpha[r]);
      for (int64_t d = 0; d < head_dim; d += 16) store(o + r * head_dim + d, mul(load(o + r * head_dim + d), keep));
    }
    const auto* next = reinterpret_cast<const std::byte*>(next_v);
    tile_product<true>({p, ld, v, page_size * 16, panels * 16, o, head_dim, next}, head_dim / 16);
  }
};

}  // namespace tokenspeed::kernels::TS_ISA
