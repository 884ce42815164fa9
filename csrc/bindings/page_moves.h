// The host tier of either kind of device, as Python sees it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "device/host_tier.h"

inline constexpr const char* kAllocateHostPagesDoc =
    "Allocate the host tier: num_pages pages of host memory for pages of region kv, page_bytes each. Region kv is\n"
    "allocated before. Raises DeviceError, saying what to change when memory is short.";
inline constexpr const char* kMovePagesDoc =
    "Copy pages before the step that is submitted next: first each (device page, host page) of moves_out from the\n"
    "device to the host, then each of moves_in from the host to the device. A list names a page once. Pages that a\n"
    "step in flight uses are not to be among them. Raises DeviceError; what the pages hold is then unknown.";

using MovePairs = std::vector<std::pair<int32_t, int32_t>>;

// The interpreter's lock is released meanwhile.
template <typename Device>
void move_pages(Device& device, const MovePairs& out, const MovePairs& in) {
  const auto moves_of = [](const MovePairs& pairs) {
    std::vector<tokenspeed::device::PageMove> moves;
    moves.reserve(pairs.size());
    for (const auto& [device_page, host_page] : pairs) moves.push_back({device_page, host_page});
    return moves;
  };
  const auto moves_out = moves_of(out), moves_in = moves_of(in);
  const nanobind::gil_scoped_release release;
  device.move_pages(moves_out, moves_in);
}
