#include "ceiling.h"
#include "simd.h"

namespace tokenspeed::kernels {

// Four accumulators from two tiles of rows and two of columns: the blocking of a matrix product that keeps
// everything in tile registers.
void ceiling_bf16_amx(const Invocation& inv) noexcept {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  // The intrinsic declares too small a read, so the stores above could be dropped without this.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  const int64_t items = inv.i64(0), iterations = inv.i64(1);
  while (inv.claim() < items) {
    for (int64_t i = 0; i < iterations; ++i) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_release();
}

}  // namespace tokenspeed::kernels
