// How a region of host memory reaches Python: as a memoryview that keeps it alive.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "device/region.h"

// Exports a region through Python's buffer protocol. bind_device registers the type.
struct RegionBuffer {
  std::shared_ptr<tokenspeed::device::Region> region;

  static nanobind::object view(std::shared_ptr<tokenspeed::device::Region> region) {
    const nanobind::object buffer = nanobind::cast(RegionBuffer{std::move(region)});
    return nanobind::steal(PyMemoryView_FromObject(buffer.ptr()));
  }
};
