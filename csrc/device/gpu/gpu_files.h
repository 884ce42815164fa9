// Loads many files at once, by several threads: a start waits for none of the interpreter's business in between.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "device/gpu/gpu_device.h"

namespace tokenspeed::device::gpu {

struct FileRange {
  std::string label;  // what errors call it
  std::string path;
  uint64_t offset, nbytes;
};
struct BinaryFile {
  std::string name;  // by which graphs launch from it
  FileRange file;
};

// Each throws the error of the first file that has one: a GraphError begins with the file's label.
void load_binaries(GpuDevice& device, std::span<const BinaryFile> files, int num_threads);
// Returns the handles, parallel to `files`.
std::vector<int> load_graphs(GpuDevice& device, std::span<const FileRange> files, uint64_t kv_page_stride,
                             int num_threads);

}  // namespace tokenspeed::device::gpu
