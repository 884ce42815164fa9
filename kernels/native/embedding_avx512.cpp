#include "embedding_impl.h"

namespace tokenspeed::kernels {
void embedding_f32_avx512(const Invocation& inv) noexcept { avx512::embedding_rows<float>(inv); }
void embedding_bf16_avx512(const Invocation& inv) noexcept { avx512::embedding_rows<avx512::bf16>(inv); }
}  // namespace tokenspeed::kernels
