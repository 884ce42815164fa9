#include "attention_impl.h"
#include "attention_vector.h"

namespace tokenspeed::kernels {

void paged_attention_f32_avx2(const Invocation& inv) noexcept {
  avx2::paged_attention<avx2::VectorEngine<avx2::DotF32>>(inv);
}
void paged_attention_bf16_avx2(const Invocation& inv) noexcept {
  avx2::paged_attention<avx2::VectorEngine<avx2::DotBf16Widened>>(inv);
}

}  // namespace tokenspeed::kernels
