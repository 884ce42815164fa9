// A live GPU: memory regions, code objects, LaunchGraphs, and steps in flight. The same to its callers as CpuDevice.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/binding.h"
#include "device/gpu/gpu_graph.h"
#include "device/gpu/gpu_weights.h"
#include "device/gpu/page_mover.h"
#include "device/gpu/step_times.h"

namespace tokenspeed::device::gpu {

struct GpuOptions {
  int io_sets = 2;              // steps that may be in flight
  int min_driver_version = 0;   // as the driver counts: 12040 is CUDA 12.4
  std::string library;          // a path; empty: the system's driver
  double close_seconds = 10;    // that close() gives to work in flight
  double spin_seconds = 50e-6;  // that wait() looks again and again before it sleeps; the default is about what a
                                // sleeping thread takes to wake
};

// What happened to the device; one of each for the time after seal(), where all but steps must stay 0.
struct GpuCounters {
  uint64_t steps = 0, nodes = 0;
  uint64_t graphs_loaded = 0, modules_loaded = 0, graph_instantiations = 0;
  uint64_t regions_allocated = 0, bytes_allocated = 0;
  uint64_t pages_moved_out = 0, pages_moved_in = 0;
  uint64_t refused = 0;  // attempts that a sealed device turned down
};

// Methods may be called from any thread. After seal() nothing is allocated, loaded or instantiated any more. Each
// throws DeviceLostError once the device is lost.
class GpuDevice {
 public:
  // Throws DeviceError: no driver, too old a driver, no such device.
  GpuDevice(Backend backend, int ordinal, const GpuOptions& options);
  ~GpuDevice();
  GpuDevice(const GpuDevice&) = delete;
  GpuDevice& operator=(const GpuDevice&) = delete;

  const DeviceInfo& info() const noexcept { return context_->info(); }
  std::pair<uint64_t, uint64_t> memory() const;  // (free, total) bytes

  // Allocates region weights and fills it from a file. Throws DeviceError.
  void load_weights(const std::string& path, uint64_t file_offset, uint64_t nbytes, const StreamOptions& options);
  // Replaces the contents of region weights by a range of a file, behind the steps in flight; no step is taken until
  // this returns. The file is read whole before anything changes, through pinned buffers that are given back. Throws
  // WeightsUnknownError when what the region holds is then unknown, any other DeviceError when it is what it was.
  void update_weights(const std::string& path, uint64_t file_offset, uint64_t nbytes, const StreamOptions& options);
  // Regions kv, arena and state. All are zero but kv, whose pages may hold anything.
  void allocate(RegionKind kind, uint64_t nbytes);
  // Region io on the device, and region host_io: a set of as many bytes for each step that may be in flight, in host
  // memory that graphs read a step's inputs from and write its outputs to. The int32[8] at `step_sizes_offset` of a
  // set, unless that is negative, are the step's sizes: submit() writes the first three, the host the others.
  void allocate_io(uint64_t nbytes, int64_t step_sizes_offset);
  // Pinned memory of the host tier, counted as a region: num_pages pages of page_bytes, the distance of pages in region
  // kv. Throws DeviceError, also before region kv is allocated.
  void allocate_host_pages(int64_t num_pages, uint64_t page_bytes);
  // The host tier's memory.
  std::shared_ptr<Region> host_pages() const;
  // Region host_io, one set after another, each beginning at a multiple of 4096 bytes.
  std::shared_ptr<Region> host_io() const;

  // Copy bytes of a region to the host, or from it, behind the steps in flight. Region host_io is that of all io sets.
  // Weights are not written. Throws DeviceError.
  void read(RegionKind kind, uint64_t offset, std::span<std::byte> to);
  void write(RegionKind kind, uint64_t offset, std::span<const std::byte> from);
  // Throws DeviceError unless the region has so many bytes at `offset`.
  void require_range(RegionKind kind, uint64_t offset, uint64_t nbytes) const;
  // Where the region begins, to the device. Throws DeviceError.
  Address address(RegionKind kind) const;

  // Throws GraphError for the bytes' faults, DeviceError for the caller's.
  void load_binary(const std::string& name, std::span<const std::byte> bytes);
  // Returns the graph's handle. Throws likewise.
  int load_graph(std::span<const std::byte> bytes, uint64_t kv_page_stride);

  // Queues a step behind those in flight: graphs run one after another, each reading its io set and writing to it. The
  // set belongs to the device until wait() has returned.
  Ticket submit(int graph, const StepSizes& sizes, int io_set);
  // Copies all pages of `out` from the device to the host, then all of `in` from the host to the device, beside the
  // steps in flight, which must use none of the pages that come and write none that leave. Steps submitted from here on
  // wait for that. Each page occurs once at most in `out`, and in `in`. Throws DeviceError: then no step may count on
  // any of them.
  void move_pages(std::span<const PageMove> out, std::span<const PageMove> in);
  // Waits until the step of `ticket`, and all before it, are done and their outputs are in the host's memory: true.
  // False if they are not after `seconds`.
  bool wait(Ticket ticket, double seconds = std::numeric_limits<double>::infinity());
  // Times the graphs of steps from here on, of the latest `num_steps`; before seal(). Without it steps are not timed.
  void time_steps(size_t num_steps);
  // Of the steps that are done since the last call; see StepTimes::take.
  std::vector<StepTime> step_times();
  // Runs a step alone, node by node, and returns the seconds of each.
  std::vector<std::pair<std::string, double>> profile(int graph, const StepSizes& sizes, int io_set);

  void seal();
  GpuCounters counters(bool after_seal) const;
  std::vector<Timeline::Span> spans() const { return timeline_.spans(); }
  // Ends all steps and gives everything back; idempotent. Never hangs: work that does not end is abandoned.
  void close() noexcept;

 private:
  struct IoSet {
    explicit IoSet(const std::shared_ptr<const Context>& context);

    std::unique_ptr<Event> done;  // the end of the graph of the step that used it last
    std::byte* host = nullptr;
    Ticket ticket = 0;  // of that step
    bool busy = false;  // whether it is not known to be done
  };
  // A call that works without the lock: close() waits for it, and a sealed device has none of those that load.
  class Loading {
   public:
    explicit Loading(GpuDevice& device) : device_(device) { ++device_.loading_; }  // with the lock
    ~Loading() {
      const std::lock_guard lock(device_.mutex_);
      --device_.loading_;
      device_.idle_.notify_all();
    }
    Loading(const Loading&) = delete;
    Loading& operator=(const Loading&) = delete;

   private:
    GpuDevice& device_;
  };
  struct Range {
    Address address;
    uint64_t size;
  };
  static constexpr int kNumStepCounts = 8;  // of step_sizes in tokenspeed/step.py

  void require_open() const;
  void require_unsealed(const std::string& what);
  void require_new(RegionKind kind) const;
  void count_region(uint64_t nbytes);
  DeviceMemory& make_region(RegionKind kind, uint64_t nbytes);
  void clear(const DeviceMemory& memory);
  Range range_of(RegionKind kind) const;
  Range claim(RegionKind kind, uint64_t offset, uint64_t nbytes);
  template <typename Copy>
  void copy(RegionKind kind, uint64_t offset, uint64_t nbytes, const Copy& queue);
  std::exception_ptr replace_weights(const WeightsFile& file, Address to, const StreamOptions& options);
  GpuGraph& graph_of(int graph, const StepSizes& sizes, int io_set);
  void require_free(IoSet& set, int index);
  void write_sizes(const IoSet& set, const StepSizes& sizes);
  template <typename Run>
  void follow(const Run& run);
  template <typename Count>
  void count(const Count& add) {
    add(counters_[0]);
    if (sealed_) add(counters_[1]);
  }

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  Timeline timeline_;
  std::shared_ptr<const Context> context_;
  std::unique_ptr<Stream> stream_;  // all work but the copies of weights and pages
  DeviceRegions regions_;
  Modules modules_;
  std::vector<std::unique_ptr<GpuGraph>> graphs_;  // null while it is loaded
  std::unique_ptr<PinnedMemory> host_io_;
  std::unique_ptr<PageMover> mover_;  // null without host tier, and while that is allocated
  std::vector<IoSet> io_sets_;
  HostIo io_;
  int64_t step_sizes_offset_ = -1;
  std::unique_ptr<StepTimes> times_;
  Ticket last_ticket_ = 0, done_ticket_ = 0;
  std::array<GpuCounters, 2> counters_;  // in all, and after seal()
  int loading_ = 0, waiting_ = 0;  // calls that work without the lock
  double close_seconds_ = 0, spin_seconds_ = 0;
  bool loading_weights_ = false, pinning_pages_ = false, sealed_ = false, closed_ = false;
  bool updating_weights_ = false, weights_unknown_ = false;
};

}  // namespace tokenspeed::device::gpu
