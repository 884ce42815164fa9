// RMS normalization (Zhang and Sennrich 2019): out[m][h] = x[m][h] / sqrt(mean_h(x^2) + eps) * weight[h].
//
// rms_norm_<dt>: p x f32[M][H], p weight f32[H], p out dt[M][H], i M, i H, f eps
//
// All arithmetic is float32 and the product is rounded once, to dt. The squares are summed in sixteen lanes,
// each in ascending order, and the lanes in simd.h's tree: a row's bits depend on that row alone.
#pragma once

#include "abi.h"

namespace tokenspeed::kernels {

void rms_norm_f32_avx2(const Invocation& inv) noexcept;
void rms_norm_f32_avx512(const Invocation& inv) noexcept;
void rms_norm_bf16_avx2(const Invocation& inv) noexcept;
void rms_norm_bf16_avx512(const Invocation& inv) noexcept;

}  // namespace tokenspeed::kernels
