#include "device/cpu_features.h"

#include <cpuid.h>

#include <cstdint>

namespace tokenspeed::device {
namespace {

struct CpuidLeaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  CpuidLeaf(unsigned leaf, unsigned subleaf) noexcept {
    if (!__get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx)) eax = ebx = ecx = edx = 0;
  }
};

bool has(unsigned word, int bit) noexcept { return (word >> bit) & 1u; }

// XCR0: the register states that the operating system saves (Intel SDM volume 1, chapter 13).
uint64_t saved_states() noexcept {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

constexpr uint64_t kSavesAvx = 0x6, kSavesAvx512 = 0xe6, kSavesTiles = 0x60000;

}  // namespace

CpuFeatures CpuFeatures::detect() noexcept {
  const CpuidLeaf basic(1, 0), extended(7, 0), more(7, 1), amd(0x80000001u, 0);
  CpuFeatures cpu;
  const bool osxsave = has(basic.ecx, 27);
  if (!osxsave) return cpu;
  const uint64_t saved = saved_states();
  const bool fma = has(basic.ecx, 12), f16c = has(basic.ecx, 29), movbe = has(basic.ecx, 22);
  const bool bmi = has(extended.ebx, 3) && has(extended.ebx, 8), lzcnt = has(amd.ecx, 5);
  cpu.avx2 = (saved & kSavesAvx) == kSavesAvx && has(extended.ebx, 5) && fma && f16c && movbe && bmi && lzcnt;
  const bool f = has(extended.ebx, 16), dq = has(extended.ebx, 17), cd = has(extended.ebx, 28);
  const bool bw = has(extended.ebx, 30), vl = has(extended.ebx, 31);
  cpu.avx512 = cpu.avx2 && (saved & kSavesAvx512) == kSavesAvx512 && f && dq && cd && bw && vl;
  cpu.avx512bf16 = cpu.avx512 && has(more.eax, 5);
  cpu.amx = cpu.avx512bf16 && (saved & kSavesTiles) == kSavesTiles && has(extended.edx, 22) && has(extended.edx, 24);
  return cpu;
}

std::string CpuFeatures::describe() const {
  std::string text;
  const auto name = [&](bool present, const char* what) {
    if (present) text += (text.empty() ? "" : ", ") + std::string(what);
  };
  name(avx2, "avx2");
  name(avx512, "avx512");
  name(avx512bf16, "avx512bf16");
  name(amx, "amx");
  return text.empty() ? "none of avx2, avx512, avx512bf16, amx" : text;
}

std::string_view instruction_set_of(std::string_view symbol) noexcept {
  const size_t at = symbol.rfind('_');
  return at == std::string_view::npos ? std::string_view{} : symbol.substr(at + 1);
}

bool runs(const CpuFeatures& cpu, std::string_view instruction_set) noexcept {
  if (instruction_set == "avx2") return cpu.avx2;
  if (instruction_set == "avx512") return cpu.avx512;
  if (instruction_set == "avx512bf16") return cpu.avx512bf16;
  if (instruction_set == "amx") return cpu.amx;
  return false;
}

}  // namespace tokenspeed::device
