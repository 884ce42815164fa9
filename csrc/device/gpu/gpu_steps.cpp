// Steps of a GpuDevice: a graph each, one after another in one stream.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "device/gpu/gpu_device.h"

namespace tokenspeed::device::gpu {
namespace {

constexpr size_t kMaxTimedSteps = 65536;

}  // namespace

GpuGraph& GpuDevice::graph_of(int graph, const StepSizes& sizes, int io_set) {
  require_open();
  if (updating_weights_) throw DeviceError("weights are being updated: submit steps when update_weights has returned");
  if (weights_unknown_) throw WeightsUnknownError(kWeightsUnknown);
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

// The graph reads them from the set; that they are those of the call is what its kernels rely on.
void GpuDevice::write_sizes(const IoSet& set, const StepSizes& sizes) {
  if (step_sizes_offset_ < 0) return;
  const std::array<int32_t, 3> values = {static_cast<int32_t>(sizes.num_tokens), static_cast<int32_t>(sizes.num_seqs),
                                         static_cast<int32_t>(sizes.num_logit_rows)};
  std::memcpy(set.host + step_sizes_offset_, values.data(), sizeof(values));
}

// Runs what must follow once a step's kernels may have started. Where that fails, nobody can wait for the step, but it
// still uses its set: it ends before anybody hears of it.
template <typename Run>
void GpuDevice::follow(const Run& run) {
  try {
    run();
  } catch (...) {
    stream_->drain(close_seconds_);
    throw;
  }
}

Ticket GpuDevice::submit(int graph, const StepSizes& sizes, int io_set) {
  const std::lock_guard lock(mutex_);
  GpuGraph& g = graph_of(graph, sizes, io_set);
  IoSet& set = io_sets_[static_cast<size_t>(io_set)];
  const Handle stream = stream_->get();
  write_sizes(set, sizes);
  if (times_ != nullptr) times_->begin(last_ticket_ + 1, sizes.num_tokens, sizes.num_seqs, stream);
  context_->check(context_->call().graph_launch(g.exec(io_set), stream), "start a step");
  follow([&] {
    if (times_ != nullptr) times_->end(stream);
    context_->check(context_->call().event_record(set.done->get(), stream), "mark the end of a step");
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

void GpuDevice::move_pages(std::span<const PageMove> out, std::span<const PageMove> in) {
  const std::lock_guard lock(mutex_);
  require_open();
  if (mover_ == nullptr) throw DeviceError("there are no host pages: call allocate_host_pages before seal()");
  mover_->move(regions_[static_cast<size_t>(RegionKind::Kv)]->address(), out, in, *stream_, close_seconds_);
  count([&](GpuCounters& c) {
    c.pages_moved_out += out.size();
    c.pages_moved_in += in.size();
  });
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
  context_->check(context_->call().stream_synchronize(stream_->get()), "finish the steps before a profile");
  write_sizes(io_sets_[static_cast<size_t>(io_set)], sizes);
  std::vector<std::pair<std::string, double>> nodes;
  follow([&] { nodes = g.profile(io_set, stream_->get()); });
  return nodes;
}

}  // namespace tokenspeed::device::gpu
