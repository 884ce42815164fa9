#include "device/host_tier.h"

#include <algorithm>
#include <limits>

#include "device/errors.h"
#include "device/region.h"

namespace tokenspeed::device {
namespace {

constexpr int64_t kMaxPages = std::numeric_limits<int32_t>::max();

}  // namespace

HostTier HostTier::make(int64_t num_pages, uint64_t page_bytes, uint64_t kv_bytes) {
  if (kv_bytes == 0) throw DeviceError("host pages hold pages of region kv, which is not allocated: allocate it first");
  if (num_pages < 1 || num_pages > kMaxPages || page_bytes < 1 || page_bytes > kv_bytes) {
    throw DeviceError("a host tier needs 1 to " + std::to_string(kMaxPages) + " pages of 1 to " +
                      std::to_string(kv_bytes) + " bytes, the size of region kv, but " + std::to_string(num_pages) +
                      " pages of " + std::to_string(page_bytes) + " bytes were asked for");
  }
  const uint64_t available = available_memory(), most = available / page_bytes;
  if (static_cast<uint64_t>(num_pages) > most) {
    throw DeviceError("the host tier needs " + std::to_string(num_pages) + " pages of " + std::to_string(page_bytes) +
                      " bytes, but " + std::to_string(available) + " bytes of host memory are available, which is " +
                      std::to_string(most) + " pages: lower --host-kv-gib, or free memory");
  }
  return {static_cast<int64_t>(kv_bytes / page_bytes), num_pages, page_bytes};
}

void HostTier::check(std::span<const PageMove> moves, const char* direction) const {
  if (num_host_pages == 0) throw DeviceError("there are no host pages: call allocate_host_pages before seal()");
  const auto pages = static_cast<size_t>(std::min(num_device_pages, num_host_pages));
  if (moves.size() > pages) {
    throw DeviceError("at most " + std::to_string(pages) + " pages can move " + direction + " at once, each of them" +
                      " once, but " + std::to_string(moves.size()) + " were asked for");
  }
  for (const PageMove& move : moves) {
    const bool is_there = move.device_page >= 0 && move.device_page < num_device_pages && move.host_page >= 0 &&
                          move.host_page < num_host_pages;
    if (is_there) continue;
    throw DeviceError(std::string("a page cannot move ") + direction + ": device page " +
                      std::to_string(move.device_page) + " of " + std::to_string(num_device_pages) + ", host page " +
                      std::to_string(move.host_page) + " of " + std::to_string(num_host_pages) + ", from 0");
  }
}

void merge_moves(std::span<const PageMove> moves, std::vector<PageRun>& runs) {
  runs.clear();
  for (const PageMove& move : moves) runs.push_back({move.device_page, move.host_page, 1});
  std::sort(runs.begin(), runs.end(), [](const PageRun& a, const PageRun& b) { return a.device_page < b.device_page; });
  size_t last = 0;
  for (size_t i = 1; i < runs.size(); ++i) {
    PageRun& run = runs[last];
    const bool follows = runs[i].device_page == run.device_page + run.num_pages &&
                         runs[i].host_page == run.host_page + run.num_pages;
    if (follows) {
      ++run.num_pages;
    } else {
      runs[++last] = runs[i];
    }
  }
  if (!runs.empty()) runs.resize(last + 1);
}

}  // namespace tokenspeed::device
