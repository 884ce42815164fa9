#include "device/cpu_device.h"

#include <algorithm>
#include <cstring>

#include "device/errors.h"

namespace tokenspeed::device {
namespace {

size_t largest_scratch() noexcept {
  size_t largest = 0;
  for (const kernels::KernelEntry& entry : kernels::kernel_table()) largest = std::max(largest, entry.scratch_bytes);
  return largest;
}

void prepare_step(const Job& job) noexcept {
  auto* graph = static_cast<BoundGraph*>(job.context);
  graph->set_step({job.sizes[0], job.sizes[1], job.sizes[2]}, static_cast<uint64_t>(job.sizes[3]));
}

// Copies of pages in one direction, shared among workers in pieces: a single page keeps all of them busy.
struct PageCopies {
  static constexpr uint64_t kPieceBytes = 256 << 10;

  std::span<const PageMove> moves;
  std::byte* device;
  std::byte* host;
  uint64_t page_bytes;
  bool is_out;
};

void copy_pages(const kernels::Invocation& inv) noexcept {
  const PageCopies& copies = *inv.ptr<const PageCopies>(0);
  const uint64_t pieces = (copies.page_bytes + PageCopies::kPieceBytes - 1) / PageCopies::kPieceBytes;
  const uint64_t num_items = copies.moves.size() * pieces;
  for (uint64_t item; (item = static_cast<uint64_t>(inv.claim())) < num_items;) {
    const PageMove& move = copies.moves[item / pieces];
    const uint64_t at = item % pieces * PageCopies::kPieceBytes;
    std::byte* device = copies.device + static_cast<uint64_t>(move.device_page) * copies.page_bytes + at;
    std::byte* host = copies.host + static_cast<uint64_t>(move.host_page) * copies.page_bytes + at;
    const uint64_t nbytes = std::min(PageCopies::kPieceBytes, copies.page_bytes - at);
    std::memcpy(copies.is_out ? host : device, copies.is_out ? device : host, nbytes);
  }
}

}  // namespace

CpuDevice::CpuDevice(int num_workers, bool pin)
    : cpu_(CpuFeatures::detect()), pool_(PoolOptions{num_workers, pin, largest_scratch()}) {}

void CpuDevice::require_open() const {
  if (closed_) throw DeviceError("the device is closed: make a new one");
}

void CpuDevice::require_unsealed(const std::string& what) {
  if (!sealed_) return;
  ++refused_after_seal_;
  throw DeviceError("the device is sealed, so it cannot " + what + ": do so before seal()");
}

void CpuDevice::require_new(RegionKind kind) const {
  const auto& existing = regions_[static_cast<size_t>(kind)];
  if (existing == nullptr && !(kind == RegionKind::Weights && loading_)) return;
  throw DeviceError(std::string("region ") + region_name(kind) + " is allocated already" +
                    (existing ? " with " + std::to_string(existing->size()) + " bytes" : "") +
                    ": a region is allocated once");
}

void CpuDevice::count_region(uint64_t nbytes) {
  ++regions_allocated_;
  bytes_allocated_ += nbytes;
  if (sealed_) ++allocations_after_seal_;
}

void CpuDevice::keep_region(RegionKind kind, std::shared_ptr<Region> region) {
  count_region(region->size());
  regions_[static_cast<size_t>(kind)] = std::move(region);
}

void CpuDevice::load_weights(const std::string& path, uint64_t file_offset, uint64_t nbytes) {
  {
    const std::lock_guard lock(mutex_);
    require_open();
    require_unsealed("load weights");
    require_new(RegionKind::Weights);
    loading_ = true;  // the file is read without the lock, so that other regions can be made meanwhile
  }
  std::unique_ptr<Weights> weights;
  try {
    weights = std::make_unique<Weights>(pool_, path, file_offset, nbytes);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    loading_ = false;
    throw;
  }
  const std::lock_guard lock(mutex_);
  loading_ = false;
  keep_region(RegionKind::Weights, weights->region());
  if (weights->settled()) {
    bytes_settled_ = nbytes;
  } else {
    unsettled_ = std::move(weights);
  }
}

void CpuDevice::settle() {
  const std::unique_lock settling(settling_, std::try_to_lock);
  if (!settling) return;
  std::unique_ptr<Weights> weights;
  {
    const std::lock_guard lock(mutex_);
    weights = std::move(unsettled_);
  }
  if (weights == nullptr || !weights->settle(stop_settling_)) return;
  const std::lock_guard lock(mutex_);
  bytes_settled_ = weights->region()->size();
}

void CpuDevice::update_weights(const std::string& path, uint64_t file_offset, uint64_t nbytes) {
  const auto region = ranged(RegionKind::Weights, 0, 0);
  require_size_of_weights(region->size(), nbytes);
  WeightsUpdate update(pool_, *region, path, file_offset);
  stop_settling_ = true;  // what would settle goes
  const std::lock_guard settling(settling_);
  const std::lock_guard lock(mutex_);  // who submits now waits
  require_open();
  pool_.wait(pool_.last_submitted());
  weights_unknown_ = true;
  try {
    update.apply();
  } catch (const DeviceError& e) {
    throw WeightsUnknownError(std::string(e.what()) + "; " + kWeightsUnknown);
  }
  weights_unknown_ = false;
  unsettled_.reset();
  bytes_settled_ = nbytes;
}

void CpuDevice::allocate(RegionKind kind, uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  require_open();
  require_unsealed(std::string("allocate region ") + region_name(kind));
  if (kind == RegionKind::Weights) throw DeviceError("region weights is filled from a file: use load_weights");
  if (kind == RegionKind::HostIo) throw DeviceError("region host_io is a GPU's: use io, which a CPU has beside it");
  require_new(kind);
  keep_region(kind, std::make_shared<Region>(std::string("region ") + region_name(kind), nbytes));
}

void CpuDevice::allocate_host_pages(int64_t num_pages, uint64_t page_bytes) {
  const std::lock_guard lock(mutex_);
  require_open();
  require_unsealed("allocate host pages");
  if (host_pages_ != nullptr) throw DeviceError("host pages are allocated already: they are allocated once");
  const Region* kv = regions_[static_cast<size_t>(RegionKind::Kv)].get();
  const HostTier tier = HostTier::make(num_pages, page_bytes, kv == nullptr ? 0 : kv->size());
  host_pages_ = std::make_unique<Region>("the host tier", tier.nbytes());
  host_tier_ = tier;
  count_region(tier.nbytes());
}

std::shared_ptr<Region> CpuDevice::region(RegionKind kind) const {
  const std::lock_guard lock(mutex_);
  require_open();
  const auto& region = regions_[static_cast<size_t>(kind)];
  if (region == nullptr) {
    throw DeviceError(std::string("region ") + region_name(kind) + " is not allocated: allocate it first");
  }
  return region;
}

std::shared_ptr<Region> CpuDevice::ranged(RegionKind kind, uint64_t offset, uint64_t nbytes) const {
  auto found = region(kind);
  require_within(kind, found->size(), offset, nbytes);
  return found;
}

void CpuDevice::require_range(RegionKind kind, uint64_t offset, uint64_t nbytes) const { ranged(kind, offset, nbytes); }

void CpuDevice::read(RegionKind kind, uint64_t offset, std::span<std::byte> to) {
  const auto region = ranged(kind, offset, to.size());
  pool_.wait(pool_.last_submitted());
  std::copy_n(region->data() + offset, to.size(), to.data());
}

void CpuDevice::write(RegionKind kind, uint64_t offset, std::span<const std::byte> from) {
  if (kind == RegionKind::Weights) throw DeviceError(kWeightsAreReadOnly);
  const auto region = ranged(kind, offset, from.size());
  pool_.wait(pool_.last_submitted());
  std::copy_n(from.data(), from.size(), region->data() + offset);
}

int CpuDevice::load_graph(std::span<const std::byte> bytes, uint64_t kv_page_stride) {
  const std::lock_guard lock(mutex_);
  require_open();
  require_unsealed("load a launch graph");
  const LaunchGraph graph = read_graph(bytes);
  graphs_.push_back(
      std::make_unique<BoundGraph>(graph, BindingContext{regions_, kernels::kernel_table(), cpu_, kv_page_stride}));
  ++graphs_loaded_;
  if (sealed_) ++graphs_loaded_after_seal_;
  return static_cast<int>(graphs_.size()) - 1;
}

Job CpuDevice::job_of(int graph, const StepSizes& sizes, uint64_t io_offset) const {
  require_open();
  if (weights_unknown_) throw WeightsUnknownError(kWeightsUnknown);
  if (graph < 0 || static_cast<size_t>(graph) >= graphs_.size()) {
    throw DeviceError("graph " + std::to_string(graph) + " is not loaded: this device has " +
                      std::to_string(graphs_.size()) + " graphs, from 0");
  }
  if (sizes.num_tokens < 0 || sizes.num_seqs < 0 || sizes.num_logit_rows < 0) {
    throw DeviceError("a step needs sizes of 0 or more, but has " + std::to_string(sizes.num_tokens) + " tokens, " +
                      std::to_string(sizes.num_seqs) + " sequences and " + std::to_string(sizes.num_logit_rows) +
                      " logit rows");
  }
  BoundGraph& bound = *graphs_[static_cast<size_t>(graph)];
  const Region* io = regions_[static_cast<size_t>(RegionKind::Io)].get();
  const uint64_t io_size = io == nullptr ? 0 : io->size();
  if (io_offset % 64 != 0 || io_offset > io_size || bound.io_bytes() > io_size - io_offset) {
    throw DeviceError("a step's inputs need " + std::to_string(bound.io_bytes()) + " bytes of region io at a multiple" +
                      " of 64, but io_offset is " + std::to_string(io_offset) + " of " + std::to_string(io_size));
  }
  Job job;
  job.tasks = bound.tasks();
  job.prepare = prepare_step;
  job.context = &bound;
  job.sizes = {sizes.num_tokens, sizes.num_seqs, sizes.num_logit_rows, static_cast<int64_t>(io_offset)};
  return job;
}

Ticket CpuDevice::submit(int graph, const StepSizes& sizes, uint64_t io_offset) {
  const std::lock_guard lock(mutex_);
  return pool_.submit(job_of(graph, sizes, io_offset));
}

void CpuDevice::wait(Ticket ticket) {
  if (ticket > pool_.last_submitted()) {
    throw DeviceError("ticket " + std::to_string(ticket) + " was never given out: the last one is " +
                      std::to_string(pool_.last_submitted()));
  }
  pool_.wait(ticket);
}

// One job of two tasks: workers leave the first before any enters the second, so that a page of the device, or of the
// host, may leave and another come in its place.
void CpuDevice::move_pages(std::span<const PageMove> out, std::span<const PageMove> in) {
  PageCopies copies[2];
  kernels::ArgValue args[2];
  Task tasks[2];
  size_t num_tasks = 0;
  Ticket ticket;
  {
    const std::lock_guard lock(mutex_);
    require_open();
    host_tier_.check(out, "out");
    host_tier_.check(in, "in");
    std::byte* device = regions_[static_cast<size_t>(RegionKind::Kv)]->data();
    const auto add = [&](std::span<const PageMove> moves, bool is_out) {
      if (moves.empty()) return;
      copies[num_tasks] = {moves, device, host_pages_->data(), host_tier_.page_bytes, is_out};
      args[num_tasks].pointer = &copies[num_tasks];
      tasks[num_tasks] = {copy_pages, &args[num_tasks], 1};
      ++num_tasks;
    };
    add(out, true);
    add(in, false);
    if (num_tasks == 0) return;
    Job job;
    job.tasks = std::span(tasks, num_tasks);
    ticket = pool_.submit(job);
    pages_moved_out_ += out.size();
    pages_moved_in_ += in.size();
  }
  pool_.wait(ticket);  // the moves are the caller's
}

std::vector<std::pair<std::string, double>> CpuDevice::profile(int graph, const StepSizes& sizes, uint64_t io_offset) {
  std::vector<double> seconds;
  Ticket ticket;
  const BoundGraph* bound;
  {
    const std::lock_guard lock(mutex_);
    Job job = job_of(graph, sizes, io_offset);
    bound = graphs_[static_cast<size_t>(graph)].get();
    seconds.resize(job.tasks.size());
    job.task_seconds = seconds.data();
    ticket = pool_.submit(job);
  }
  pool_.wait(ticket);
  std::vector<std::pair<std::string, double>> nodes;
  nodes.reserve(seconds.size());
  for (size_t i = 0; i < seconds.size(); ++i) nodes.emplace_back(bound->names()[i], seconds[i]);
  return nodes;
}

void CpuDevice::seal() {
  const std::lock_guard lock(mutex_);
  require_open();
  if (loading_) throw DeviceError("the weights are still being loaded: seal the device when load_weights has returned");
  sealed_ = true;
}

DeviceCounters CpuDevice::counters() const {
  const std::lock_guard lock(mutex_);
  DeviceCounters c{};
  for (const auto& graph : graphs_) {
    c.steps += graph->runs();
    c.nodes += graph->runs() * graph->tasks().size();
  }
  c.graphs_loaded = graphs_loaded_;
  c.regions_allocated = regions_allocated_;
  c.bytes_allocated = bytes_allocated_;
  c.bytes_settled = bytes_settled_;
  c.graphs_loaded_after_seal = graphs_loaded_after_seal_;
  c.allocations_after_seal = allocations_after_seal_;
  c.refused_after_seal = refused_after_seal_;
  c.pages_moved_out = pages_moved_out_;
  c.pages_moved_in = pages_moved_in_;
  c.worker_sleeps = pool_.sleeps();
  c.busy_seconds = pool_.busy_seconds();
  return c;
}

void CpuDevice::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    stop_settling_ = true;
    unsettled_.reset();
  }
  pool_.stop();
  const std::lock_guard lock(mutex_);
  regions_ = {};
  host_pages_.reset();
}

}  // namespace tokenspeed::device
