// The CPU device: memory regions, bound LaunchGraphs, and the workers that run them step by step.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/binding.h"
#include "device/host_tier.h"
#include "device/thread_pool.h"
#include "device/weights.h"

namespace tokenspeed::device {

struct DeviceCounters {
  uint64_t steps, nodes;              // that have been started
  uint64_t graphs_loaded, regions_allocated, bytes_allocated;
  uint64_t bytes_settled;             // of weights that lie in memory of their own
  uint64_t graphs_loaded_after_seal, allocations_after_seal;  // 0 as long as the device keeps its promise
  uint64_t refused_after_seal;        // attempts that it turned down
  uint64_t pages_moved_out, pages_moved_in;
  uint64_t worker_sleeps;
  double busy_seconds;                // from a step's start to its end, summed
};

// Methods may be called from any thread. After seal() no memory is allocated, no graph loaded and no thread started any more.
class CpuDevice {
 public:
  // Throws DeviceError.
  CpuDevice(int num_workers, bool pin);

  // Makes a range of a file region weights. Throws DeviceError.
  void load_weights(const std::string& path, uint64_t file_offset, uint64_t nbytes);
  // Moves the weights from the file's pages to memory of their own; see weights.h. Steps may run meanwhile, and
  // close() ends it early. Returns at once when there is nothing to move or another thread moves it.
  void settle();
  // Replaces the contents of region weights, at the same addresses, by a range of a file: behind the steps in flight,
  // and before those submitted from here on. Throws WeightsUnknownError when what they hold is then
  // unknown, any other DeviceError when it is what it was.
  void update_weights(const std::string& path, uint64_t file_offset, uint64_t nbytes);
  void allocate(RegionKind kind, uint64_t nbytes);
  // Memory of the host tier, counted as a region: num_pages pages of page_bytes, the distance of pages in region kv.
  // Throws DeviceError, also before region kv is allocated.
  void allocate_host_pages(int64_t num_pages, uint64_t page_bytes);
  // The region's memory, which lives as long as the device or the pointer does, whichever is longer.
  std::shared_ptr<Region> region(RegionKind kind) const;

  // Copy bytes of a region out, or in, behind the steps in flight. Weights are not written. Throws DeviceError.
  void read(RegionKind kind, uint64_t offset, std::span<std::byte> to);
  void write(RegionKind kind, uint64_t offset, std::span<const std::byte> from);
  // Throws DeviceError unless the region has so many bytes at `offset`.
  void require_range(RegionKind kind, uint64_t offset, uint64_t nbytes) const;
  uint64_t address(RegionKind kind) const { return reinterpret_cast<uintptr_t>(region(kind)->data()); }

  // Returns the graph's handle. Throws GraphError for the graph's faults, DeviceError for the caller's.
  int load_graph(std::span<const std::byte> bytes, uint64_t kv_page_stride);

  // Queues a step behind those in flight; at most ThreadPool::kMaxQueued may be unfinished. `io_offset` is
  // added to every pointer into region io: each step in flight has its own set of inputs and outputs there.
  // The sizes must be within the graph's bucket, for which the build proved every access.
  Ticket submit(int graph, const StepSizes& sizes, uint64_t io_offset);
  void wait(Ticket ticket);

  // Copies all pages of `out` from the device to the host, then all of `in` from the host to the device, behind the
  // steps in flight; returns when that is done. Each page occurs once at most in `out`, and in `in`. Throws
  // DeviceError, having moved nothing.
  void move_pages(std::span<const PageMove> out, std::span<const PageMove> in);

  // Runs a step alone and returns the seconds of each node.
  std::vector<std::pair<std::string, double>> profile(int graph, const StepSizes& sizes, uint64_t io_offset);

  void seal();
  DeviceCounters counters() const;
  void close() noexcept;  // ends all steps, then the workers; memory goes once nobody views it
  int num_workers() const noexcept { return pool_.num_workers(); }

 private:
  void require_open() const;
  void require_unsealed(const std::string& what);
  void require_new(RegionKind kind) const;
  void count_region(uint64_t nbytes);
  std::shared_ptr<Region> ranged(RegionKind kind, uint64_t offset, uint64_t nbytes) const;
  void keep_region(RegionKind kind, std::shared_ptr<Region> region);
  Job job_of(int graph, const StepSizes& sizes, uint64_t io_offset) const;

  mutable std::mutex mutex_;  // taken after settling_
  CpuFeatures cpu_;
  Regions regions_;
  std::vector<std::unique_ptr<BoundGraph>> graphs_;
  HostTier host_tier_;
  std::unique_ptr<Region> host_pages_;
  bool sealed_ = false, closed_ = false, loading_ = false;
  std::unique_ptr<Weights> unsettled_;
  std::mutex settling_;                     // held while weights settle or are replaced
  std::atomic<bool> stop_settling_{false};  // weights go away, or others come
  bool weights_unknown_ = false;            // an update ended half-way
  uint64_t regions_allocated_ = 0, bytes_allocated_ = 0, bytes_settled_ = 0, graphs_loaded_ = 0;
  uint64_t pages_moved_out_ = 0, pages_moved_in_ = 0;
  uint64_t graphs_loaded_after_seal_ = 0, allocations_after_seal_ = 0, refused_after_seal_ = 0;
  ThreadPool pool_;  // last: it stops before anything it uses goes
};

}  // namespace tokenspeed::device
