#include "attention_impl.h"
#include "attention_vector.h"

namespace tokenspeed::kernels {

void paged_attention_f32_avx512(const Invocation& inv) noexcept {
  avx512::paged_attention<avx512::VectorEngine<avx512::DotF32>>(inv);
}
void paged_attention_bf16_avx512(const Invocation& inv) noexcept {
  avx512::paged_attention<avx512::VectorEngine<avx512::DotBf16Widened>>(inv);
}

}  // namespace tokenspeed::kernels
