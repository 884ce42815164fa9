// Steps of a GpuDevice: what each copies, and how copies and graphs of steps in flight run side by side.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "device/gpu/gpu_device.h"

namespace tokenspeed::device::gpu {
namespace {

constexpr size_t kMaxTimedSteps = 65536;
constexpr uint64_t kMergeBytes = 64 << 10;  // that are copied sooner than a second copy starts
constexpr uint64_t kRowBytes = 64;          // of a row of pages at least

}  // namespace

GpuGraph& GpuDevice::graph_of(int graph, const StepSizes& sizes, int io_set) {
  require_open();
  if (graph < 0 || static_cast<size_t>(graph) >= graphs_.size() || graphs_[static_cast<size_t>(graph)] == nullptr) {
    throw DeviceError("graph " + std::to_string(graph) + " is not loaded: this device has " +
                      std::to_string(graphs_.size()) + " graphs, from 0");
  }
  for (const int64_t size : {sizes.num_tokens, sizes.num_seqs, sizes.num_logit_rows}) {
    if (size >= 0 && size <= INT32_MAX) continue;
    throw DeviceError("a step needs sizes of 0 or more, but has " + std::to_string(sizes.num_tokens) + " tokens, " +
                      std::to_string(sizes.num_seqs) + " sequences and " + std::to_string(sizes.num_logit_rows) +
                      " logit rows");
  }
  if (host_io_ == nullptr) throw DeviceError("region io is not allocated: allocate it first");
  if (io_set < 0 || static_cast<size_t>(io_set) >= io_sets_.size()) {
    throw DeviceError("io set " + std::to_string(io_set) + " does not exist: this device has " +
                      std::to_string(io_sets_.size()) + " sets, from 0");
  }
  context_->bind();
  require_free(io_sets_[static_cast<size_t>(io_set)], io_set);
  return *graphs_[static_cast<size_t>(graph)];
}

void GpuDevice::require_free(IoSet& set, int index) {
  if (!set.busy) return;
  const Status code = context_->call().event_query(set.done->get());
  if (code == status::kNotReady) {
    throw DeviceError("io set " + std::to_string(index) + " is in use by step " + std::to_string(set.ticket) +
                      ": wait for that step, or use another set");
  }
  context_->check(code, "run a step");
  set.busy = false;
}

// How much a step uses of each row of its page table; 0 where rows are copied whole: short ones, since one copy more
// takes longer than a few bytes, and what does not fit, of which find_ranges tells.
uint64_t GpuDevice::page_row_bytes(const IoSet& set, const StepSizes& sizes) const {
  const PageTable& table = page_table_;
  const auto rows = static_cast<uint64_t>(sizes.num_seqs);
  if (table.row_bytes == 0 || rows == 0 || rows * table.row_bytes <= kMergeBytes) return 0;
  if (rows > (input_bytes_ - table.offset) / table.row_bytes) return 0;
  if (rows > (input_bytes_ - table.context_lens) / sizeof(int32_t)) return 0;
  const auto* lengths = reinterpret_cast<const int32_t*>(set.host + table.context_lens);
  const int32_t longest = std::max(1, *std::max_element(lengths, lengths + rows));
  const auto pages = static_cast<uint64_t>((longest - 1) / table.page_size) + 1;
  const uint64_t used = (pages * sizeof(int32_t) + kRowBytes - 1) / kRowBytes * kRowBytes;
  return used < table.row_bytes ? used : 0;
}

// Fills `ranges` with the parts of [begin, end) that a step uses, by its step_sizes in `set`, but for the tensor at
// `without`.
void GpuDevice::find_ranges(std::vector<CopyRange>& ranges, const IoSet& set, const std::vector<IoExtent>& extents,
                            const StepSizes& sizes, uint64_t begin, uint64_t end, uint64_t without) const {
  ranges.clear();
  if (extents.empty() && begin < end) ranges.push_back({begin, end});
  std::array<int32_t, kNumStepCounts> counts = {};
  if (step_sizes_offset_ >= 0) std::memcpy(counts.data(), set.host + step_sizes_offset_, sizeof(counts));
  std::array<int64_t, kNumStepCounts> scalars = {};
  std::copy(counts.begin(), counts.end(), scalars.begin());
  scalars[0] = sizes.num_tokens;
  scalars[1] = sizes.num_seqs;
  scalars[2] = sizes.num_logit_rows;
  for (const IoExtent& e : extents) {
    const uint64_t items = e.extra + (e.scalar < 0 ? 0 : static_cast<uint64_t>(scalars[static_cast<size_t>(e.scalar)]));
    if (items == 0 || e.offset == without) continue;
    const uint64_t limit = end - std::min(e.offset, end);
    if (e.offset < begin || e.item_bytes > limit / items) {
      throw DeviceError("a step uses " + std::to_string(items) + " x " + std::to_string(e.item_bytes) +
                        " bytes at offset " + std::to_string(e.offset) + " of region io, which is not within [" +
                        std::to_string(begin) + ", " + std::to_string(end) + ")");
    }
    const CopyRange range{e.offset, e.offset + items * e.item_bytes};
    if (!ranges.empty() && range.begin <= ranges.back().end + kMergeBytes) {
      ranges.back().end = std::max(ranges.back().end, range.end);
    } else {
      ranges.push_back(range);
    }
  }
}

// Before anything is queued: sizes that do not fit are refused as a whole.
void GpuDevice::plan(const IoSet& set, const StepSizes& sizes) {
  copies_.page_row_bytes = page_row_bytes(set, sizes);
  find_ranges(copies_.inputs, set, inputs_, sizes, 0, input_bytes_,
              copies_.page_row_bytes > 0 ? page_table_.offset : UINT64_MAX);
  find_ranges(copies_.outputs, set, outputs_, sizes, input_bytes_, io_.nbytes);
}

// What is queued to `after` from here on waits for all that was queued to `before`, whose end the event marks.
void GpuDevice::order(const Event& end_of, const Stream& before, const Stream& after) {
  constexpr const char* kOrdering = "order the parts of a step";
  context_->check(context_->call().event_record(end_of.get(), before.get()), kOrdering);
  context_->check(context_->call().stream_wait(after.get(), end_of.get(), 0), kOrdering);
}

// The set's last step is done, so its inputs on the device may be replaced at once, whatever else runs.
void GpuDevice::stage(const IoSet& set, const StepSizes& sizes) {
  if (step_sizes_offset_ >= 0) {
    const std::array<int32_t, 3> values = {static_cast<int32_t>(sizes.num_tokens), static_cast<int32_t>(sizes.num_seqs),
                                           static_cast<int32_t>(sizes.num_logit_rows)};
    std::memcpy(set.host + step_sizes_offset_, values.data(), sizeof(values));
  }
  const Handle stream = streams_->inputs.get();
  if (copies_.page_row_bytes > 0) {
    const PageTable& table = page_table_;
    context_->check(context_->driver().copy_rows_to_device(set.device + table.offset, set.host + table.offset,
                                                           table.row_bytes, copies_.page_row_bytes,
                                                           static_cast<size_t>(sizes.num_seqs), stream),
                    "copy a step's page table");
  }
  for (const CopyRange& r : copies_.inputs) {
    context_->check(context_->call().copy_to_device(set.device + r.begin, set.host + r.begin, r.end - r.begin, stream),
                    "copy a step's inputs");
  }
  order(*set.staged, streams_->inputs, streams_->main);
}

// Outputs of all steps pass through one stream: when those of a step have arrived, so have those of all before it.
void GpuDevice::collect(const IoSet& set) {
  order(*set.ran, streams_->main, streams_->outputs);
  const Handle stream = streams_->outputs.get();
  for (const CopyRange& r : copies_.outputs) {
    context_->check(context_->call().copy_to_host(set.host + r.begin, set.device + r.begin, r.end - r.begin, stream),
                    "copy a step's outputs");
  }
  context_->check(context_->call().event_record(set.done->get(), stream), "mark the end of a step");
}

// Runs what must follow once a step's kernels may have started. Where that fails, nobody can wait for the step, but it
// still uses its set: it ends before anybody hears of it.
template <typename Run>
void GpuDevice::follow(const Run& run) {
  try {
    run();
  } catch (...) {
    streams_->drain(close_seconds_);
    throw;
  }
}

Ticket GpuDevice::submit(int graph, const StepSizes& sizes, int io_set) {
  const std::lock_guard lock(mutex_);
  GpuGraph& g = graph_of(graph, sizes, io_set);
  IoSet& set = io_sets_[static_cast<size_t>(io_set)];
  const Handle stream = streams_->main.get();
  plan(set, sizes);
  stage(set, sizes);
  if (times_ != nullptr) times_->begin(last_ticket_ + 1, sizes.num_tokens, sizes.num_seqs, stream);
  context_->check(context_->call().graph_launch(g.exec(io_set), stream), "start a step");
  follow([&] {
    if (times_ != nullptr) times_->end(stream);
    collect(set);
  });
  ++g.runs;
  count([&](GpuCounters& c) {
    ++c.steps;
    c.nodes += g.num_nodes();
  });
  set.ticket = ++last_ticket_;
  set.busy = true;
  return set.ticket;
}

bool GpuDevice::wait(Ticket ticket, double seconds) {
  Handle event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    context_->require_working();
    if (ticket > last_ticket_) {
      throw DeviceError("ticket " + std::to_string(ticket) + " was never given out: the last one is " +
                        std::to_string(last_ticket_));
    }
    if (ticket <= done_ticket_ || closed_) return true;
    for (const IoSet& set : io_sets_) {
      if (set.ticket == ticket) event = set.done->get();
    }
    if (event == nullptr) return true;  // its set was free for a later step, so it is done
    ++waiting_;
  }
  context_->bind_quietly();
  const bool may_sleep = !std::isfinite(seconds);
  const double end = Timeline::now() + (may_sleep ? spin_seconds_ : seconds);
  Status code = context_->call().event_query(event);
  while (code == status::kNotReady && Timeline::now() < end) code = context_->call().event_query(event);
  const bool give_up = code == status::kNotReady && !may_sleep;
  if (code == status::kNotReady && !give_up) code = context_->call().event_synchronize(event);
  const std::lock_guard lock(mutex_);
  --waiting_;
  idle_.notify_all();
  if (give_up) return false;
  context_->check(code, "finish a step");
  done_ticket_ = std::max(done_ticket_, ticket);
  for (IoSet& set : io_sets_) set.busy = set.busy && set.ticket > done_ticket_;
  return true;
}

void GpuDevice::time_steps(size_t num_steps) {
  const std::lock_guard lock(mutex_);
  require_unsealed("time steps");
  if (num_steps < 1 || num_steps > kMaxTimedSteps) {
    throw DeviceError("the times of 1 to " + std::to_string(kMaxTimedSteps) + " steps can be kept, but " +
                      std::to_string(num_steps) + " were asked for");
  }
  times_ = std::make_unique<StepTimes>(context_, num_steps);
}

std::vector<StepTime> GpuDevice::step_times() {
  const std::lock_guard lock(mutex_);
  require_open();
  if (times_ == nullptr) throw DeviceError("steps are not timed: call time_steps before seal()");
  return times_->take(done_ticket_);
}

std::vector<std::pair<std::string, double>> GpuDevice::profile(int graph, const StepSizes& sizes, int io_set) {
  const std::lock_guard lock(mutex_);
  GpuGraph& g = graph_of(graph, sizes, io_set);
  const IoSet& set = io_sets_[static_cast<size_t>(io_set)];
  plan(set, sizes);
  context_->check(context_->call().stream_synchronize(streams_->main.get()), "finish the steps before a profile");
  stage(set, sizes);
  std::vector<std::pair<std::string, double>> nodes;
  follow([&] {
    nodes = g.profile(io_set, streams_->main.get());
    collect(set);
  });
  context_->check(context_->call().event_synchronize(set.done->get()), "finish a profile");
  return nodes;
}

}  // namespace tokenspeed::device::gpu
