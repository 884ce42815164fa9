// Projections out = x W^T with the epilogues that decode and prefill need, for every CPU target.
//
//   linear_<dt>           out[m][n] = acc[m][n]
//   linear_add_<dt>       out[m][n] = residual[m][n] + acc[m][n]             (out may be residual)
//                         or, rounded: round(residual[m][n] + round(acc[m][n]))
//   linear_silu_mul_<dt>  out[m][f] = round(silu(gate[m][f]) * up[m][f])     silu(g) = g / (1 + exp(-g))
//
// Arguments: p x, p w, p residual (linear_add), p out, i M, i N (silu_mul: F), i K, i rounded (linear_add: 0 or 1).
// x is row-major dt[M][K]; acc, residual and out are float32, except that silu_mul's out is dt[M][F]. round is to the
// nearest dt, ties to even: of float32 it changes nothing. For bf16, K must be even. The weights are panels of 16
// output columns, padded with zeros up to whole panels: float32 [N/16][K][16], bf16 [N/16][K/2][16][2]. For silu_mul,
// panel 2j holds the gate and panel 2j+1 the up rows 16j .. 16j+15. Exactly M rows of x are read and exactly M x N
// (M x F) outputs written.
//
// Bits: each output is one accumulator that takes k (or the pair k, k+1) strictly in order, so they depend on
// the row and the weights alone: not on M, on the other rows or on the number of workers. Per instruction set:
//   f32   avx2 = avx512: one fma a k.
//   bf16  avx2 = avx512: one float32 fma for the even k, then one for the odd k, of each pair.
//   bf16  avx512bf16: one vdpbf16ps a pair.
//   bf16  amx: one tdpbf16ps a block of 32 k (the last block padded with zeros).
#pragma once

#include "abi.h"

namespace tokenspeed::kernels {

inline constexpr size_t kLinearScratchBytes = 32768;  // a unit's accumulators and, on AMX, the last block of k

void linear_f32_avx2(const Invocation& inv) noexcept;
void linear_add_f32_avx2(const Invocation& inv) noexcept;
void linear_silu_mul_f32_avx2(const Invocation& inv) noexcept;
void linear_bf16_avx2(const Invocation& inv) noexcept;
void linear_add_bf16_avx2(const Invocation& inv) noexcept;
void linear_silu_mul_bf16_avx2(const Invocation& inv) noexcept;

void linear_f32_avx512(const Invocation& inv) noexcept;
void linear_add_f32_avx512(const Invocation& inv) noexcept;
void linear_silu_mul_f32_avx512(const Invocation& inv) noexcept;
void linear_bf16_avx512(const Invocation& inv) noexcept;
void linear_add_bf16_avx512(const Invocation& inv) noexcept;
void linear_silu_mul_bf16_avx512(const Invocation& inv) noexcept;

void linear_bf16_avx512bf16(const Invocation& inv) noexcept;
void linear_add_bf16_avx512bf16(const Invocation& inv) noexcept;
void linear_silu_mul_bf16_avx512bf16(const Invocation& inv) noexcept;

// The AMX kernels fault unless request_amx_permission() has returned true in this process.
void linear_bf16_amx(const Invocation& inv) noexcept;
void linear_add_bf16_amx(const Invocation& inv) noexcept;
void linear_silu_mul_bf16_amx(const Invocation& inv) noexcept;

// Asks Linux once, for all threads of the process, to let it use AMX tile data. False when the processor or
// the system has none or the system refuses. Safe to call from any thread, any number of times; a thread that
// lives when the first call returns is covered too.
bool request_amx_permission() noexcept;

}  // namespace tokenspeed::kernels
