// The body of the row gather, compiled once for each instruction set.
#pragma once

#include "gather.h"
#include "simd.h"

namespace tokenspeed::kernels::TS_ISA {

TS_INLINE void gather_rows(const Invocation& inv) {
  constexpr int64_t kRowsPerItem = 4;
  const auto* x = inv.ptr<const float>(0);
  const auto* rows = inv.ptr<const int32_t>(1);
  auto* out = inv.ptr<float>(2);
  const int64_t num_rows = inv.i64(3), width = inv.i64(4);
  for (int64_t first; (first = inv.claim(kRowsPerItem)) < num_rows;) {
    const int64_t end = first + kRowsPerItem < num_rows ? first + kRowsPerItem : num_rows;
    for (int64_t r = first; r < end; ++r) {
      std::memcpy(out + r * width, x + rows[r] * width, static_cast<size_t>(width) * sizeof(float));
    }
  }
}

}  // namespace tokenspeed::kernels::TS_ISA
