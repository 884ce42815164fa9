// Which kernels this processor can run. A kernel names its instruction set in the suffix of its symbol.
#pragma once

#include <string>
#include <string_view>

namespace tokenspeed::device {

// Each flag is true only when the processor has the instructions and the system saves their registers.
struct CpuFeatures {
  bool avx2 = false;        // AVX2, FMA, F16C, BMI1/2: x86-64-v3
  bool avx512 = false;      // AVX-512 F, BW, CD, DQ, VL: x86-64-v4
  bool avx512bf16 = false;  // AVX512_BF16 on top of avx512
  bool amx = false;         // AMX-TILE and AMX-BF16 on top of avx512; tiles also need permission

  static CpuFeatures detect() noexcept;
  std::string describe() const;  // e.g. "avx2, avx512"
};

// The instruction set that a kernel symbol names ("linear_bf16_amx" -> "amx"): what follows its last '_'.
std::string_view instruction_set_of(std::string_view symbol) noexcept;

// Whether `cpu` runs kernels of the instruction set; false for an unknown one.
bool runs(const CpuFeatures& cpu, std::string_view instruction_set) noexcept;

}  // namespace tokenspeed::device
