// Every native kernel, sorted by symbol at compile time. A family adds its lines in <family>_entries.inc.
#include <algorithm>
#include <array>
#include <string_view>

#include "abi.h"
#include "adjust.h"
#include "attention.h"
#include "embedding.h"
#include "gather.h"
#include "linear.h"
#include "norm.h"
#include "rope.h"
#include "rope_table.h"
#include "sample.h"

namespace tokenspeed::kernels {
namespace {

constexpr KernelEntry kUnsorted[] = {
#include "adjust_entries.inc"
#include "attention_entries.inc"
#include "embedding_entries.inc"
#include "gather_entries.inc"
#include "linear_entries.inc"
#include "norm_entries.inc"
#include "rope_entries.inc"
#include "sample_entries.inc"
};

constexpr bool symbol_less(const KernelEntry& a, const KernelEntry& b) {
  return std::string_view(a.symbol) < std::string_view(b.symbol);
}

constexpr auto kTable = [] {
  std::array<KernelEntry, std::size(kUnsorted)> table{};
  std::copy(std::begin(kUnsorted), std::end(kUnsorted), table.begin());
  std::sort(table.begin(), table.end(), symbol_less);
  return table;
}();

constexpr bool same_symbol(const KernelEntry& a, const KernelEntry& b) {
  return std::string_view(a.symbol) == std::string_view(b.symbol);
}
static_assert(std::adjacent_find(kTable.begin(), kTable.end(), same_symbol) == kTable.end(),
              "two kernels have the same symbol");

}  // namespace

std::span<const KernelEntry> kernel_table() noexcept { return kTable; }

}  // namespace tokenspeed::kernels
