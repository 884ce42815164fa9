#include "rope_impl.h"

namespace tokenspeed::kernels {

void rope_kv_write_f32_avx2(const Invocation& inv) noexcept { avx2::rope_kv_write<float>(inv); }
void rope_kv_write_bf16_avx2(const Invocation& inv) noexcept { avx2::rope_kv_write<avx2::bf16>(inv); }

}  // namespace tokenspeed::kernels
