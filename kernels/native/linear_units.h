// How a projection is cut into units of work, and how workers claim them. A unit is a block of rows times a
// range of panels. The cut affects speed alone: no output's bits depend on it.
#pragma once

#include <algorithm>

#include "abi.h"
#include "simd.h"

namespace tokenspeed::kernels::TS_ISA {

inline constexpr int64_t kUnitPanels = 4;  // panels computed at once, at most
inline constexpr int64_t kUnitColumns = kUnitPanels * 16;
inline constexpr int64_t kPanelRowBytes = 64;  // a panel is a sequence of these: one k (f32) or pair of k (bf16)

inline int64_t panels_for(int64_t columns) { return (columns + 15) / 16; }

struct Unit {
  int64_t row, num_rows;
  int64_t panel, num_panels;
};

// Two ways to share the work:
//
// Streaming, when one block holds all rows and memory is the limit: every claim takes a worker's fair share of
// what is left, so that each worker reads one long range of memory and a few short ones. (Ranges of 4 panels
// cost a quarter of the bandwidth: each fresh start leaves the hardware prefetcher behind.)
//
// Blocked, when arithmetic is the limit: row blocks vary fastest, so a unit's panels stay in a core's L2 cache
// while all rows pass and weights are read from memory once.
class UnitSpace {
 public:
  UnitSpace(int64_t num_rows, int64_t max_block_rows, int64_t row_multiple, int64_t num_panels, int num_workers,
            bool streaming)
      : num_rows_(num_rows), num_panels_(num_panels), num_workers_(num_workers), streaming_(streaming) {
    if (num_rows <= 0) return;
    const int64_t blocks = (num_rows + max_block_rows - 1) / max_block_rows;
    block_rows_ = (num_rows + blocks - 1) / blocks;
    block_rows_ = (block_rows_ + row_multiple - 1) / row_multiple * row_multiple;
    num_row_blocks_ = (num_rows + block_rows_ - 1) / block_rows_;
    granule_ = num_row_blocks_ == 1 ? 2 : kUnitPanels;  // even: gate and up panels stay together
    total_ = num_row_blocks_ * ((num_panels + granule_ - 1) / granule_);
  }

  // False once every unit has been claimed.
  bool claim(const Invocation& inv, Unit& unit) const {
    int64_t count = 1;
    if (num_row_blocks_ == 1) {
      const int64_t left = total_ - inv.next_item->load(std::memory_order_relaxed);
      count = streaming_ ? std::max<int64_t>(left / num_workers_, 1)
                         : std::clamp<int64_t>(left / (4 * num_workers_), 1, kUnitPanels / granule_);
    }
    const int64_t first = inv.claim(count);
    if (first >= total_) return false;
    unit.row = first % num_row_blocks_ * block_rows_;
    unit.num_rows = std::min(block_rows_, num_rows_ - unit.row);
    unit.panel = first / num_row_blocks_ * granule_;
    unit.num_panels = std::min(count * granule_, num_panels_ - unit.panel);
    return true;
  }

 private:
  int64_t num_rows_, num_panels_, num_workers_;
  bool streaming_;
  int64_t num_row_blocks_ = 0, block_rows_ = 0, granule_ = 0, total_ = 0;
};

// Parts of a unit, kUnitPanels panels each.
template <class Body>
void for_each_part(const Unit& unit, const Body& body) {
  for (int64_t p = 0; p < unit.num_panels; p += kUnitPanels) {
    body(Unit{unit.row, unit.num_rows, unit.panel + p, std::min(kUnitPanels, unit.num_panels - p)});
  }
}

}  // namespace tokenspeed::kernels::TS_ISA
