#include "norm_impl.h"

namespace tokenspeed::kernels {
void rms_norm_f32_avx512(const Invocation& inv) noexcept { avx512::rms_norm_rows<float>(inv); }
void rms_norm_bf16_avx512(const Invocation& inv) noexcept { avx512::rms_norm_rows<avx512::bf16>(inv); }
}  // namespace tokenspeed::kernels
