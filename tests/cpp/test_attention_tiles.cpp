// The AMX kernel's own source over tile instructions emulated in C++, so that its logic is tested on machines
// without AMX too. The emulation checks every tile shape and is strict about uninitialized configuration.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // as in simd.h
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "attention_checks.h"

namespace {

struct Tiles {
  int rows[8] = {}, row_bytes[8] = {};
  alignas(64) uint8_t data[8][16][64] = {};
  bool configured = false;
};
thread_local Tiles tiles;
std::atomic<int64_t> misuses{0};

void require(bool condition) { misuses += !condition; }

void emulated_loadconfig(const void* config) {
  const uint8_t* bytes = static_cast<const uint8_t*>(config);
  require(bytes[0] == 1 && bytes[1] == 0);
  for (int i = 2; i < 16; ++i) require(bytes[i] == 0);
  for (int i = 0; i < 8; ++i) {
    tiles.row_bytes[i] = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
    tiles.rows[i] = bytes[48 + i];
    require(tiles.rows[i] <= 16 && tiles.row_bytes[i] <= 64 && bytes[32 + 2 * i] == 0 && bytes[56 + i] == 0);
  }
  tiles.configured = true;
}
void emulated_release() { tiles = Tiles(); }
void emulated_zero(int t) { std::memset(tiles.data[t], 0, sizeof(tiles.data[t])); }
void emulated_loadd(int t, const void* base, int64_t stride) {
  require(tiles.configured && tiles.rows[t] > 0);
  for (int r = 0; r < tiles.rows[t]; ++r) {
    std::memcpy(tiles.data[t][r], static_cast<const uint8_t*>(base) + r * stride, tiles.row_bytes[t]);
  }
}
void emulated_stored(int t, void* base, int64_t stride) {
  require(tiles.configured && tiles.rows[t] > 0);
  for (int r = 0; r < tiles.rows[t]; ++r) {
    std::memcpy(static_cast<uint8_t*>(base) + r * stride, tiles.data[t][r], tiles.row_bytes[t]);
  }
}
// Sums the even and the odd elements of a row apart, then adds both to the output, as the instruction does.
void emulated_dpbf16ps(int dst, int a, int b) {
  require(tiles.configured && tiles.rows[a] == tiles.rows[dst] && tiles.row_bytes[a] == 4 * tiles.rows[b] &&
          tiles.row_bytes[b] == tiles.row_bytes[dst]);
  for (int m = 0; m < tiles.rows[dst]; ++m) {
    for (int n = 0; n < tiles.row_bytes[dst] / 4; ++n) {
      float sums[2] = {}, out;
      for (int k = 0; k < tiles.rows[b]; ++k) {
        uint16_t x[2], y[2];
        std::memcpy(x, &tiles.data[a][m][4 * k], 4);
        std::memcpy(y, &tiles.data[b][k][4 * n], 4);
        for (int i = 0; i < 2; ++i) sums[i] += tokenspeed::testing::widen(x[i]) * tokenspeed::testing::widen(y[i]);
      }
      std::memcpy(&out, &tiles.data[dst][m][4 * n], 4);
      out += sums[0] + sums[1];
      std::memcpy(&tiles.data[dst][m][4 * n], &out, 4);
    }
  }
}

}  // namespace

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_zero emulated_zero
#define _tile_dpbf16ps emulated_dpbf16ps
// A namespace and a symbol of their own: the real kernel is linked into this program too.
#define amx amx_emulated
#define paged_attention_bf16_amx paged_attention_bf16_amx_emulated
#define TS_ISA_AMX
// g++ reads the whole file before it acts on the pragma below, which would have defined this for simd.h.
#ifndef __AVX512F__
#define __AVX512F__ 1
#endif

#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi,bmi2,f16c,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16")
#include "attention_amx.cpp"
#pragma GCC pop_options

namespace tokenspeed::kernels {
void paged_attention_bf16_amx_emulated(const Invocation& inv) noexcept;
}

using namespace tokenspeed::testing;
namespace k = tokenspeed::kernels;

TEST(emulated_amx_attention) {
  const AttentionVariant variant{"emulated amx", k::rope_kv_write_bf16_avx512, k::paged_attention_bf16_amx_emulated,
                                 __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512dq")};
  if (!variant.available) {
    std::printf("skipped: the emulation itself needs AVX512_BF16\n");
    return;
  }
  check_reference<uint16_t>(variant, 1.0f, kFewAttentionShapes);
  check_invariance<uint16_t>(variant, 30.0f, kFewAttentionShapes);
  check_many_decodes<uint16_t>(variant);
  CHECK(misuses == 0);
}

TEST_MAIN
