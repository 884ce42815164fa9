// A live GPU: memory regions, code objects, LaunchGraphs, and steps in flight. The same to its callers as CpuDevice.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
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
  uint64_t refused = 0;  // attempts that a sealed device turned down
};

// A tensor of region io: `item_bytes` for each of step_sizes[scalar] + extra items, from `offset` on; extra items alone
// for a negative scalar. Says how much of the tensor a step uses, so that no more is copied.
struct IoExtent {
  uint64_t offset, item_bytes;
  int scalar;
  uint64_t extra;
};

// The page table among the inputs: a row of `row_bytes` for each sequence, of which a step uses an int32 for every
// `page_size` positions of its sequence, as the int32 per sequence at `context_lens` says.
struct PageTable {
  uint64_t offset = 0, row_bytes = 0, context_lens = 0;
  int32_t page_size = 1;
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
  // Regions kv, arena and state. All are zero but kv, whose pages may hold anything.
  void allocate(RegionKind kind, uint64_t nbytes);
  // Region io: [0, input_bytes) is copied to the device before a step, the rest back after it. Host and device have a
  // copy of it for each set. The int32[8] at `step_sizes_offset`, unless that is negative, are the step's sizes:
  // submit() writes the first three, the host the others.
  void allocate_io(uint64_t input_bytes, uint64_t nbytes, int64_t step_sizes_offset);
  // Limits what a step copies to what its sizes say. Ranges that are near each other are copied in one.
  void bind_io(std::vector<IoExtent> inputs, std::vector<IoExtent> outputs);
  // Limits what a step copies of a page table's rows to what its longest sequence uses.
  void bind_page_table(const PageTable& table);
  // The host's copies of region io, one per set, each beginning at a multiple of 4096 bytes.
  std::shared_ptr<Region> host_io() const;

  // Throws GraphError for the bytes' faults, DeviceError for the caller's.
  void load_binary(const std::string& name, std::span<const std::byte> bytes);
  // Returns the graph's handle. Throws likewise.
  int load_graph(std::span<const std::byte> bytes, uint64_t kv_page_stride);

  // Queues a step behind those in flight: graphs run one after another, and beside them copies of the inputs of steps
  // to come and of the outputs of steps that ended. Its io set belongs to the device until wait() has returned.
  Ticket submit(int graph, const StepSizes& sizes, int io_set);
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
  // Of work that runs side by side; events order it where that is needed.
  struct Streams {
    explicit Streams(const std::shared_ptr<const Context>& c) : inputs(c), main(c), outputs(c) {}
    bool drain(double seconds) const noexcept;  // see Stream::drain

    Stream inputs, main, outputs;  // copies to the device, graphs, copies back
  };
  struct IoSet {
    explicit IoSet(const std::shared_ptr<const Context>& context);

    std::unique_ptr<Event> staged, ran, done;  // the end of the inputs' copies, of the graph, of the outputs' copies
    std::byte* host = nullptr;
    Address device = 0;
    Ticket ticket = 0;  // of the step that used it last
    bool busy = false;  // whether that step is not known to be done
  };
  struct CopyRange {
    uint64_t begin, end;
  };
  // Of the step that is being submitted.
  struct Copies {
    uint64_t page_row_bytes = 0;  // of each row of the page table; 0 where the rows are among the inputs
    std::vector<CopyRange> inputs, outputs;
  };
  class Loading;
  static constexpr int kNumStepCounts = 8;  // of step_sizes in tokenspeed/step.py

  void require_open() const;
  void require_unsealed(const std::string& what);
  void require_new(RegionKind kind) const;
  void count_region(uint64_t nbytes);
  DeviceMemory& make_region(RegionKind kind, uint64_t nbytes);
  void clear(const DeviceMemory& memory, const Stream& stream);
  GpuGraph& graph_of(int graph, const StepSizes& sizes, int io_set);
  void require_free(IoSet& set, int index);
  uint64_t page_row_bytes(const IoSet& set, const StepSizes& sizes) const;
  void find_ranges(std::vector<CopyRange>& ranges, const IoSet& set, const std::vector<IoExtent>& extents,
                   const StepSizes& sizes, uint64_t begin, uint64_t end, uint64_t without = UINT64_MAX) const;
  void plan(const IoSet& set, const StepSizes& sizes);
  void stage(const IoSet& set, const StepSizes& sizes);
  void collect(const IoSet& set);
  void order(const Event& end_of, const Stream& before, const Stream& after);
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
  std::unique_ptr<Streams> streams_;
  DeviceRegions regions_;
  Modules modules_;
  std::vector<std::unique_ptr<GpuGraph>> graphs_;  // null while it is loaded
  std::unique_ptr<PinnedMemory> host_io_;
  std::vector<IoSet> io_sets_;
  uint64_t input_bytes_ = 0;
  IoLayout io_;
  int64_t step_sizes_offset_ = -1;
  std::vector<IoExtent> inputs_, outputs_;
  PageTable page_table_;  // row_bytes is 0 where nobody named one
  Copies copies_;
  std::unique_ptr<StepTimes> times_;
  Ticket last_ticket_ = 0, done_ticket_ = 0;
  std::array<GpuCounters, 2> counters_;  // in all, and after seal()
  int loading_ = 0, waiting_ = 0;  // calls that work without the lock
  double close_seconds_ = 0, spin_seconds_ = 0;
  bool loading_weights_ = false, sealed_ = false, closed_ = false;
};

}  // namespace tokenspeed::device::gpu
