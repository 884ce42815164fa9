// Region weights: a range of a file, mapped at once, moved to memory of its own later.
//
// Mapping a file that lies in the page cache takes as long as its page tables do; copying it takes several times
// longer, and seconds in a virtual machine whose host must first find the memory. But a copy lies on huge pages,
// which are read a quarter faster, and nothing that happens to the file reaches it any more. So weights begin as
// the one and become the other, at the same addresses, while the kernels read them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "device/region.h"
#include "device/thread_pool.h"

namespace tokenspeed::device {

class Weights {
 public:
  // Maps the range and makes its pages present with all workers; copies it right away if it does not begin at a
  // multiple of 64 bytes, as kernels need, or the file cannot be mapped. Throws DeviceError when the file cannot
  // be opened, is too short or cannot be read, or when there is no memory for a copy.
  Weights(ThreadPool& pool, const std::string& path, uint64_t file_offset, uint64_t nbytes);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  const std::shared_ptr<Region>& region() const noexcept { return region_; }
  bool settled() const noexcept { return settled_; }

  // Moves what is still mapped to memory of its own, until done or told to stop; returns whether it is done.
  // Where the system refuses, the rest stays mapped: slower to read, not wrong. One thread may call it.
  bool settle(const std::atomic<bool>& stop) noexcept;

 private:
  std::shared_ptr<Region> map(uint64_t nbytes) const;

  int file_;
  uint64_t file_offset_;
  std::shared_ptr<Region> region_;
  bool settled_ = false;
};

// Another range of a file, on its way into region weights, which keeps its addresses. The file that the region's old
// contents came from is never written to, mapped or not.
class WeightsUpdate {
 public:
  // Opens `path`, checks that it holds the range, as many bytes as the region, and reads it into memory of its own if
  // `available` bytes are enough for both. Throws DeviceError: the region then holds what it held.
  WeightsUpdate(ThreadPool& pool, Region& region, const std::string& path, uint64_t file_offset,
                uint64_t available = available_memory());
  ~WeightsUpdate();
  WeightsUpdate(const WeightsUpdate&) = delete;
  WeightsUpdate& operator=(const WeightsUpdate&) = delete;

  bool staged() const noexcept { return staged_ != nullptr; }  // whether the range is in memory

  // Puts the range in the place of the region's contents, which nobody may be reading: what is staged by changing
  // pages, else by reading the file, with the workers. Throws DeviceError; what the region holds is then unknown.
  void apply();

 private:
  std::byte* reserve() const noexcept;  // as large as the region's mapping, with the same place within 2 MiB
  void read(std::byte* mapping);

  ThreadPool& pool_;
  Region& region_;
  std::string path_;
  uint64_t file_offset_;
  int file_;
  std::byte* staged_ = nullptr;  // as large as the region's mapping
};

}  // namespace tokenspeed::device
