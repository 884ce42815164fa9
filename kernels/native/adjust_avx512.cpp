#include "adjust_impl.h"

namespace tokenspeed::kernels {
void adjust_logits_avx512(const Invocation& inv) noexcept { avx512::adjust_logits(inv); }
}  // namespace tokenspeed::kernels
