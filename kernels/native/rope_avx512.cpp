#include "rope_impl.h"

namespace tokenspeed::kernels {

void rope_kv_write_f32_avx512(const Invocation& inv) noexcept { avx512::rope_kv_write<float>(inv); }
void rope_kv_write_bf16_avx512(const Invocation& inv) noexcept { avx512::rope_kv_write<avx512::bf16>(inv); }

}  // namespace tokenspeed::kernels
