// The host tier: memory of the host for pages of region kv that the device has no room for. Here is what its sizes and
// the moves between the two must keep to, on every kind of device.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tokenspeed::device {

// A page of region kv, and the page of the host tier to which, or from which, it is copied.
struct PageMove {
  int32_t device_page, host_page;
};

// Moves of pages that follow each other on both sides: one copy.
struct PageRun {
  int64_t device_page, host_page, num_pages;
};

struct HostTier {
  int64_t num_device_pages = 0, num_host_pages = 0;
  uint64_t page_bytes = 0;

  uint64_t nbytes() const noexcept { return static_cast<uint64_t>(num_host_pages) * page_bytes; }

  // The tier of `num_pages` pages beside a region kv of `kv_bytes` (0: not allocated). Throws DeviceError for sizes
  // that make no tier, and when the host has less memory available.
  static HostTier make(int64_t num_pages, uint64_t page_bytes, uint64_t kv_bytes);

  // Throws DeviceError when there is no tier, a page is not there, or there are more moves than pages: each page is in
  // one move at most. `direction` is "out" or "in".
  void check(std::span<const PageMove> moves, const char* direction) const;
};

// Fills `runs` with the moves in ascending order of device pages. Allocates nothing if it has capacity for all of them.
void merge_moves(std::span<const PageMove> moves, std::vector<PageRun>& runs);

}  // namespace tokenspeed::device
