// Projections on AVX-512 BF16: one vdpbf16ps a pair of k. The instruction takes subnormal inputs and results as
// zero and rounds to nearest even whatever the thread's MXCSR says, so the bits need no set-up.
#include "linear_simd.h"

namespace tokenspeed::kernels {
namespace avx512bf16 {

struct Bf16Dot {
  using Element = bf16;
  using Weights = __m512bh;
  using Broadcast = __m512bh;
  static constexpr int64_t kStepBytes = 4;
  static constexpr int kHalves = 1;
  static constexpr int kStreamRows = 12, kTileRows = 6, kTilePanels = 4;  // of 32 registers

  TS_INLINE Weights weights(const std::byte* p, int) { return (__m512bh)_mm512_loadu_si512(p); }
  TS_INLINE Broadcast broadcast(const std::byte* p, int) {
    int pair;
    std::memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  TS_INLINE f32x16 multiply_add(Broadcast x, Weights w, f32x16 acc) { return {_mm512_dpbf16_ps(acc.v, x, w)}; }
};

using Bf16Projector = SimdProjector<Bf16Dot>;

}  // namespace avx512bf16

void linear_bf16_avx512bf16(const Invocation& inv) noexcept {
  avx512bf16::linear<avx512bf16::Bf16Projector>(inv);
}
void linear_add_bf16_avx512bf16(const Invocation& inv) noexcept {
  avx512bf16::linear_add<avx512bf16::Bf16Projector>(inv);
}
void linear_silu_mul_bf16_avx512bf16(const Invocation& inv) noexcept {
  avx512bf16::linear_silu_mul<avx512bf16::Bf16Projector>(inv);
}

}  // namespace tokenspeed::kernels
