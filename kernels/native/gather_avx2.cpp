#include "gather_impl.h"

namespace tokenspeed::kernels {
void gather_rows_f32_avx2(const Invocation& inv) noexcept { avx2::gather_rows(inv); }
}  // namespace tokenspeed::kernels
