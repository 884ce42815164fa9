// The body of ceiling_read_*, compiled once for each instruction set.
#pragma once

#include "ceiling.h"
#include "simd.h"

namespace tokenspeed::kernels::TS_ISA {

TS_INLINE void read_all(const Invocation& inv) {
  constexpr int64_t kPiece = (256 << 10) / sizeof(float);
  const auto* data = inv.ptr<const float>(0);
  const int64_t count = inv.i64(1) / static_cast<int64_t>(sizeof(float));
  f32x16 sum[4] = {zero(), zero(), zero(), zero()};
  for (int64_t at; (at = inv.claim() * kPiece) < count;) {
    const int64_t end = at + kPiece < count ? at + kPiece : count;
    for (; at + 64 <= end; at += 64) {
      for (int j = 0; j < 4; ++j) sum[j] = add(sum[j], load(data + at + 16 * j));
    }
  }
  const volatile float used = reduce_add(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
  (void)used;
}

}  // namespace tokenspeed::kernels::TS_ISA
