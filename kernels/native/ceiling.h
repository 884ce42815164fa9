// Loops that do nothing but read, or nothing but multiply and add: the machine's ceilings (not in the table:
// no LaunchGraph names them).
//
// ceiling_read_*: p data, i bytes: reads all bytes once. An item is a piece of 256 KiB.
// The others:     i items, i iterations: an item is that many iterations of independent multiply-adds.
#pragma once

#include "abi.h"

namespace tokenspeed::kernels {

void ceiling_read_avx2(const Invocation& inv) noexcept;
void ceiling_read_avx512(const Invocation& inv) noexcept;
void ceiling_f32_avx2(const Invocation& inv) noexcept;
void ceiling_f32_avx512(const Invocation& inv) noexcept;
void ceiling_bf16_avx512bf16(const Invocation& inv) noexcept;
void ceiling_bf16_amx(const Invocation& inv) noexcept;  // needs request_amx_permission()

struct MatmulCeiling {
  KernelFn fn;
  double flops_per_iteration;
};

// Instructions an iteration times multiply-adds an instruction times two.
inline constexpr MatmulCeiling kCeilingF32Avx2{ceiling_f32_avx2, 12 * 8 * 2};
inline constexpr MatmulCeiling kCeilingF32Avx512{ceiling_f32_avx512, 16 * 16 * 2};
inline constexpr MatmulCeiling kCeilingBf16Avx512{ceiling_bf16_avx512bf16, 16 * 32 * 2};
inline constexpr MatmulCeiling kCeilingBf16Amx{ceiling_bf16_amx, 4 * 16 * 16 * 32 * 2};

}  // namespace tokenspeed::kernels
