// Projections on AVX-512 without BF16 instructions: float32 and bf16 by float32 fma.
#include "linear_fma.h"

namespace tokenspeed::kernels {

void linear_f32_avx512(const Invocation& inv) noexcept { avx512::linear<avx512::F32Projector>(inv); }
void linear_add_f32_avx512(const Invocation& inv) noexcept { avx512::linear_add<avx512::F32Projector>(inv); }
void linear_silu_mul_f32_avx512(const Invocation& inv) noexcept { avx512::linear_silu_mul<avx512::F32Projector>(inv); }

void linear_bf16_avx512(const Invocation& inv) noexcept { avx512::linear<avx512::Bf16Projector>(inv); }
void linear_add_bf16_avx512(const Invocation& inv) noexcept { avx512::linear_add<avx512::Bf16Projector>(inv); }
void linear_silu_mul_bf16_avx512(const Invocation& inv) noexcept { avx512::linear_silu_mul<avx512::Bf16Projector>(inv); }

}  // namespace tokenspeed::kernels
