// What happens to accumulators once they are complete: epilogues of the projections, for all instruction sets.
#pragma once

#include "linear_units.h"

namespace tokenspeed::kernels::TS_ISA {

template <typename T>
TS_INLINE void store_first(T* p, int64_t count, f32x16 a) {  // the first `count` lanes and nothing more
  if (count >= 16) {
    store_from_f32(p, a);
  } else {
    T lanes[16];
    store_from_f32(lanes, a);
    std::memcpy(p, lanes, static_cast<size_t>(count) * sizeof(T));
  }
}

// Each epilogue takes the accumulators float32[unit.num_rows][kUnitColumns] of a unit of at most kUnitPanels
// panels and writes the unit's part of `out`. `prefetch` is called for some rows before they are computed.

struct StoreEpilogue {
  float* out;
  int64_t N;

  void prefetch(const Unit&, int64_t, int64_t) const {}

  void operator()(const Unit& unit, const float* acc) const {
    for (int64_t r = 0; r < unit.num_rows; ++r, acc += kUnitColumns) {
      float* row = out + (unit.row + r) * N;
      for (int64_t j = 0; j < unit.num_panels; ++j) {
        const int64_t n = (unit.panel + j) * 16;
        store_first(row + n, N - n, load(acc + j * 16));
      }
    }
  }
};

// Rounded: the sum is what a framework has that stores the product and then the sum as bfloat16 tensors.
template <bool Rounded>
struct AddEpilogue {
  const float* residual;  // may be out: an element is read before it is written, by the same worker
  float* out;
  int64_t N;

  // The residual was last written by whichever worker: fetch its lines, to be written, while the rows compute.
  void prefetch(const Unit& unit, int64_t row, int64_t num_rows) const {
    for (int64_t r = row; r < row + num_rows; ++r) {
      const float* p = residual + (unit.row + r) * N + unit.panel * 16;
      for (int64_t j = 0; j < unit.num_panels; ++j) asm volatile("prefetchw %0" : : "m"(p[j * 16]));
    }
  }

  void operator()(const Unit& unit, const float* acc) const {
    for (int64_t r = 0; r < unit.num_rows; ++r, acc += kUnitColumns) {
      const int64_t start = (unit.row + r) * N;
      for (int64_t j = 0; j < unit.num_panels; ++j) {
        const int64_t n = (unit.panel + j) * 16;
        const f32x16 before = N - n >= 16 ? load(residual + start + n)
                                          : load_masked(residual + start + n, first_lanes(static_cast<int>(N - n)));
        const f32x16 product = load(acc + j * 16);
        if constexpr (Rounded) {
          store_first(out + start + n, N - n, round_to_bf16(add(before, round_to_bf16(product))));
        } else {
          store_first(out + start + n, N - n, add(before, product));
        }
      }
    }
  }
};

template <typename T>
struct SiluMulEpilogue {
  T* out;
  int64_t F;

  void prefetch(const Unit&, int64_t, int64_t) const {}

  void operator()(const Unit& unit, const float* acc) const {
    for (int64_t r = 0; r < unit.num_rows; ++r, acc += kUnitColumns) {
      T* row = out + (unit.row + r) * F;
      for (int64_t j = 0; j < unit.num_panels; j += 2) {
        const int64_t f = (unit.panel + j) * 8;
        const f32x16 gate = load(acc + j * 16), up = load(acc + j * 16 + 16);
        const f32x16 silu = div(gate, add(set1(1.0f), exp(sub(zero(), gate))));
        store_first(row + f, F - f, mul(silu, up));
      }
    }
  }
};

}  // namespace tokenspeed::kernels::TS_ISA
