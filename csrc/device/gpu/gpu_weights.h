// Streams a range of a file into device memory: threads read pieces into pinned buffers, the device copies them from
// there meanwhile. Reading with several threads is what a page cache's bandwidth takes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "device/gpu/gpu_context.h"

namespace tokenspeed::device::gpu {

struct StreamOptions {
  int num_threads = 0;       // 0: one per core that this process may use, 16 at most
  uint64_t piece_bytes = 0;  // 0: 4 MiB; each thread has two buffers of this size
};

// Opens `path` and checks that it holds the range, before anything is allocated. Throws DeviceError.
class WeightsFile {
 public:
  WeightsFile(const std::string& path, uint64_t file_offset, uint64_t nbytes);
  ~WeightsFile();
  WeightsFile(const WeightsFile&) = delete;
  WeightsFile& operator=(const WeightsFile&) = delete;

  // Returns when the range lies in device memory from `to` on. Throws DeviceError when the file cannot be read. With
  // `to` 0 it is only read, which says whether it can be, and brings it into the page cache.
  void stream(const std::shared_ptr<const Context>& context, Address to, const StreamOptions& options) const;

  // Reads one piece, at most `size` bytes, of the range. 0, an errno, or -1 for a file that ended early.
  int read(std::byte* to, uint64_t offset, uint64_t size) const noexcept;
  uint64_t size() const noexcept { return nbytes_; }

 private:
  std::string path_;
  int file_;
  uint64_t file_offset_, nbytes_;
};

}  // namespace tokenspeed::device::gpu
