// A LaunchGraph bound to a device: kernels found, arguments turned into addresses, all checked beforehand.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "abi.h"
#include "device/cpu_features.h"
#include "device/graph.h"
#include "device/region.h"
#include "device/thread_pool.h"

namespace tokenspeed::device {

using Regions = std::array<std::shared_ptr<Region>, kNumRegions>;

// What a graph may use: the device's memory, its kernels and its processor.
struct BindingContext {
  const Regions& regions;
  std::span<const kernels::KernelEntry> kernels;  // sorted by symbol
  CpuFeatures cpu;
  uint64_t kv_page_stride;  // bytes from a KV page to the next
};

struct StepSizes {
  int64_t num_tokens, num_seqs, num_logit_rows;
};

class BoundGraph {
 public:
  // Throws GraphError, naming node and argument, when a kernel is unknown or not for this processor, when its
  // arguments do not match its signature, or when a pointer leaves its region (for kv: one page).
  BoundGraph(const LaunchGraph& graph, const BindingContext& context);

  // Fills in what differs from step to step, and counts a run. No task of this graph may be running.
  void set_step(const StepSizes& sizes, uint64_t io_offset) noexcept;

  std::span<const Task> tasks() const noexcept { return tasks_; }
  const std::vector<std::string>& names() const noexcept { return names_; }
  uint64_t io_bytes() const noexcept { return io_bytes_; }  // how far its io pointers reach
  uint64_t runs() const noexcept { return runs_.load(std::memory_order_relaxed); }

 private:
  struct StepArg {
    size_t index;
    uint64_t value;  // of a size: the StepScalar; of an io pointer: the offset
  };

  std::vector<kernels::ArgValue> args_;
  std::vector<Task> tasks_;
  std::vector<std::string> names_;
  std::vector<StepArg> sizes_, io_pointers_;
  std::byte* io_ = nullptr;
  uint64_t io_bytes_ = 0;
  std::atomic<uint64_t> runs_{0};
};

}  // namespace tokenspeed::device
