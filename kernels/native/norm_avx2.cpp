#include "norm_impl.h"

namespace tokenspeed::kernels {
void rms_norm_f32_avx2(const Invocation& inv) noexcept { avx2::rms_norm_rows<float>(inv); }
void rms_norm_bf16_avx2(const Invocation& inv) noexcept { avx2::rms_norm_rows<avx2::bf16>(inv); }
}  // namespace tokenspeed::kernels
