// Projections by float32 fma, the arithmetic that AVX2 and AVX-512 share bit for bit.
#pragma once

#include "linear_simd.h"

namespace tokenspeed::kernels::TS_ISA {

#if defined(__AVX512F__)
struct F32Tiles {  // of 32 registers
  static constexpr int kStreamRows = 12, kTileRows = 6, kTilePanels = 4;
};
using Bf16Tiles = F32Tiles;
#else
struct F32Tiles {  // of 8 pairs of registers
  static constexpr int kStreamRows = 6, kTileRows = 6, kTilePanels = 1;
};
struct Bf16Tiles {  // splitting pairs takes registers too
  static constexpr int kStreamRows = 5, kTileRows = 5, kTilePanels = 1;
};
#endif

struct F32Fma : F32Tiles {
  using Element = float;
  using Weights = f32x16;
  using Broadcast = f32x16;
  static constexpr int64_t kStepBytes = 4;  // of a row of x, for one row of a panel
  static constexpr int kHalves = 1;

  TS_INLINE Weights weights(const std::byte* p, int) { return load(reinterpret_cast<const float*>(p)); }
  TS_INLINE Broadcast broadcast(const std::byte* p, int) { return set1(*reinterpret_cast<const float*>(p)); }
  TS_INLINE f32x16 multiply_add(Broadcast x, Weights w, f32x16 acc) { return fma(x, w, acc); }
};

// bf16 is the upper half of float32, so products and sums are float32's; the even k of a pair comes first.
struct Bf16Fma : Bf16Tiles {
  using Element = bf16;
  using Weights = f32x16;
  using Broadcast = f32x16;
  static constexpr int64_t kStepBytes = 4;
  static constexpr int kHalves = 2;

  TS_INLINE Weights weights(const std::byte* p, int half) {
    f32x16 even, odd;
    load_pairs(reinterpret_cast<const bf16*>(p), even, odd);
    return half == 0 ? even : odd;
  }
  TS_INLINE Broadcast broadcast(const std::byte* p, int half) {
    f32x16 even, odd;
    broadcast_pair(reinterpret_cast<const bf16*>(p), even, odd);
    return half == 0 ? even : odd;
  }
  TS_INLINE f32x16 multiply_add(Broadcast x, Weights w, f32x16 acc) { return fma(x, w, acc); }
};

using F32Projector = SimdProjector<F32Fma>;
using Bf16Projector = SimdProjector<Bf16Fma>;

}  // namespace tokenspeed::kernels::TS_ISA
