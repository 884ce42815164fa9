#include "sample_impl.h"

namespace tokenspeed::kernels {
void sample_avx2(const Invocation& inv) noexcept { avx2::sample_rows(inv); }
}  // namespace tokenspeed::kernels
