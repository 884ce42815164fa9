#include "embedding_impl.h"

namespace tokenspeed::kernels {
void embedding_f32_avx2(const Invocation& inv) noexcept { avx2::embedding_rows<float>(inv); }
void embedding_bf16_avx2(const Invocation& inv) noexcept { avx2::embedding_rows<avx2::bf16>(inv); }
}  // namespace tokenspeed::kernels
