// Reads a range of a file into memory with all workers of a pool.
#pragma once

#include <cstdint>
#include <string>

#include "device/region.h"
#include "device/thread_pool.h"

namespace tokenspeed::device {

// Fills the front of `region`. Throws DeviceError when the file cannot be opened, is too short or cannot be read.
void read_file(ThreadPool& pool, const std::string& path, uint64_t file_offset, uint64_t nbytes, const Region& region);

}  // namespace tokenspeed::device
