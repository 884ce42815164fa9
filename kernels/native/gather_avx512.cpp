#include "gather_impl.h"

namespace tokenspeed::kernels {
void gather_rows_f32_avx512(const Invocation& inv) noexcept { avx512::gather_rows(inv); }
}  // namespace tokenspeed::kernels
