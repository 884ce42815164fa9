// Row gather: out[r] = x[logit_rows[r]], the rows of the residual stream whose logits are needed.
//
// gather_rows_f32: p x f32[T][H], p logit_rows i32[R], p out f32[R][H], i R, i H
#pragma once

#include "abi.h"

namespace tokenspeed::kernels {

void gather_rows_f32_avx2(const Invocation& inv) noexcept;
void gather_rows_f32_avx512(const Invocation& inv) noexcept;

}  // namespace tokenspeed::kernels
