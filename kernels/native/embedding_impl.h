// The body of the embedding kernels, compiled once for each instruction set.
#pragma once

#include "embedding.h"
#include "simd.h"

namespace tokenspeed::kernels::TS_ISA {

// One row of a panel is a column of it: every element lies in a cache line of its own, which bounds the speed.
TS_INLINE void copy_row(const float* table, int64_t token, int64_t width, float* out) {
  const float* column = table + (token / 16) * width * 16 + token % 16;
  for (int64_t h = 0; h < width; ++h) out[h] = column[h * 16];
}

TS_INLINE void copy_row(const bf16* table, int64_t token, int64_t width, float* out) {
  const bf16* column = table + (token / 16) * width * 16 + (token % 16) * 2;
  for (int64_t h = 0; h < width; h += 2) {
    out[h] = bf16_to_f32(column[h * 16]);
    out[h + 1] = bf16_to_f32(column[h * 16 + 1]);
  }
}

template <typename Element>
TS_INLINE void embedding_rows(const Invocation& inv) {
  const auto* token_ids = inv.ptr<const int32_t>(0);
  const auto* last_tokens = inv.ptr<const int32_t>(1);
  const auto* table = inv.ptr<const Element>(2);
  auto* out = inv.ptr<float>(3);
  const int64_t num_tokens = inv.i64(4), width = inv.i64(5);
  for (int64_t t; (t = inv.claim()) < num_tokens;) {
    const int32_t id = token_ids[t];
    copy_row(table, id >= 0 ? id : last_tokens[-1 - static_cast<int64_t>(id)], width, out + t * width);
  }
}

}  // namespace tokenspeed::kernels::TS_ISA
