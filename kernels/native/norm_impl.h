// The body of the RMS norm kernels, compiled once for each instruction set.
#pragma once

#include "norm.h"
#include "simd.h"

namespace tokenspeed::kernels::TS_ISA {

TS_INLINE float sum_of_squares(const float* x, int64_t width) {
  f32x16 lanes = zero();
  int64_t h = 0;
  for (; h + 16 <= width; h += 16) {
    const f32x16 v = load(x + h);
    lanes = fma(v, v, lanes);
  }
  if (h < width) {
    const f32x16 v = load_masked(x + h, first_lanes(static_cast<int>(width - h)));
    lanes = fma(v, v, lanes);
  }
  return reduce_add(lanes);
}

template <typename Element>
TS_INLINE void rms_norm_row(const float* x, const float* weight, Element* out, int64_t width, float eps) {
  const float mean = sum_of_squares(x, width) / static_cast<float>(width);
  const f32x16 scale = set1(1.0f / std::sqrt(mean + eps));
  int64_t h = 0;
  for (; h + 16 <= width; h += 16) store_from_f32(out + h, mul(mul(load(x + h), scale), load(weight + h)));
  if (h < width) {
    const mask16 rest = first_lanes(static_cast<int>(width - h));
    Element last[16];
    store_from_f32(last, mul(mul(load_masked(x + h, rest), scale), load_masked(weight + h, rest)));
    std::memcpy(out + h, last, static_cast<size_t>(width - h) * sizeof(Element));
  }
}

template <typename Element>
TS_INLINE void rms_norm_rows(const Invocation& inv) {
  constexpr int64_t kRowsPerItem = 4;  // a row takes well under a microsecond
  const auto* x = inv.ptr<const float>(0);
  const auto* weight = inv.ptr<const float>(1);
  auto* out = inv.ptr<Element>(2);
  const int64_t num_rows = inv.i64(3), width = inv.i64(4);
  const float eps = inv.f32(5);
  for (int64_t first; (first = inv.claim(kRowsPerItem)) < num_rows;) {
    const int64_t end = first + kRowsPerItem < num_rows ? first + kRowsPerItem : num_rows;
    for (int64_t m = first; m < end; ++m) rms_norm_row(x + m * width, weight, out + m * width, width, eps);
  }
}

}  // namespace tokenspeed::kernels::TS_ISA
