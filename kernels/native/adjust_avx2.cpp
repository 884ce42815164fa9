#include "adjust_impl.h"

namespace tokenspeed::kernels {
void adjust_logits_avx2(const Invocation& inv) noexcept { avx2::adjust_logits(inv); }
}  // namespace tokenspeed::kernels
