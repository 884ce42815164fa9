// Projections on AVX2: float32 and bf16 by float32 fma.
#include "linear_fma.h"

namespace tokenspeed::kernels {

void linear_f32_avx2(const Invocation& inv) noexcept { avx2::linear<avx2::F32Projector>(inv); }
void linear_add_f32_avx2(const Invocation& inv) noexcept { avx2::linear_add<avx2::F32Projector>(inv); }
void linear_silu_mul_f32_avx2(const Invocation& inv) noexcept { avx2::linear_silu_mul<avx2::F32Projector>(inv); }

void linear_bf16_avx2(const Invocation& inv) noexcept { avx2::linear<avx2::Bf16Projector>(inv); }
void linear_add_bf16_avx2(const Invocation& inv) noexcept { avx2::linear_add<avx2::Bf16Projector>(inv); }
void linear_silu_mul_bf16_avx2(const Invocation& inv) noexcept { avx2::linear_silu_mul<avx2::Bf16Projector>(inv); }

}  // namespace tokenspeed::kernels
