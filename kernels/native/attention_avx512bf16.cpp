#include "attention_impl.h"
#include "attention_vector.h"

namespace tokenspeed::kernels {

void paged_attention_bf16_avx512bf16(const Invocation& inv) noexcept {
  avx512bf16::paged_attention<avx512bf16::VectorEngine<avx512bf16::DotBf16Pairs>>(inv);
}

}  // namespace tokenspeed::kernels
