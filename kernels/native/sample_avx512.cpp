#include "sample_impl.h"

namespace tokenspeed::kernels {
void sample_avx512(const Invocation& inv) noexcept { avx512::sample_rows(inv); }
}  // namespace tokenspeed::kernels
