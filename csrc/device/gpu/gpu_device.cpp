#include "device/gpu/gpu_device.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace tokenspeed::device::gpu {
namespace {

constexpr uint64_t kPage = 4096;
constexpr int kMaxIoSets = 64;
constexpr size_t kMaxTimedSteps = 65536;
constexpr int kNumStepCounts = 8;             // of step_sizes in tokenspeed/step.py
constexpr uint64_t kMergeBytes = 64 << 10;   // that are copied sooner than a second copy starts
constexpr uint64_t kRowBytes = 64;           // of a row of pages at least

uint64_t round_up(uint64_t nbytes, uint64_t to) { return (nbytes + to - 1) / to * to; }

std::string version_text(Backend backend, int version) {
  const bool cuda = backend == Backend::Cuda;
  const int major = version / (cuda ? 1000 : 10000000), minor = cuda ? version % 1000 / 10 : version / 100000 % 100;
  return (cuda ? "CUDA " : "HIP ") + std::to_string(major) + "." + std::to_string(minor);
}

}  // namespace

// A call that works without the lock: close() waits for it, and a sealed device has none.
class GpuDevice::Loading {
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

GpuDevice::GpuDevice(Backend backend, int ordinal, const GpuOptions& options)
    : close_seconds_(options.close_seconds), spin_seconds_(options.spin_seconds) {
  if (options.io_sets < 1 || options.io_sets > kMaxIoSets) {
    throw DeviceError("a device needs 1 to " + std::to_string(kMaxIoSets) + " io sets, but " +
                      std::to_string(options.io_sets) + " were asked for");
  }
  double start = Timeline::now();
  const auto driver = open_driver(backend, options.library);
  timeline_.add("driver", start);
  if (driver->version() < options.min_driver_version) {
    throw DeviceError("the driver is too old: need " + version_text(backend, options.min_driver_version) +
                      " or newer, but it offers " + version_text(backend, driver->version()) +
                      ": install a newer driver, or build the artifact for this one");
  }
  start = Timeline::now();
  context_ = std::make_shared<Context>(driver, ordinal);
  stream_ = std::make_unique<Stream>(context_);
  io_sets_.resize(static_cast<size_t>(options.io_sets));
  for (IoSet& set : io_sets_) set.done = std::make_unique<Event>(context_, kEventDisableTiming | kEventBlockingSync);
  timeline_.add("context", start);
}

GpuDevice::~GpuDevice() { close(); }

void GpuDevice::require_open() const {
  if (closed_) throw DeviceError("the device is closed: make a new one");
  context_->require_working();
}

void GpuDevice::require_unsealed(const std::string& what) {
  require_open();
  if (!sealed_) return;
  count([](GpuCounters& c) { ++c.refused; });
  throw DeviceError("the device is sealed, so it cannot " + what + ": do so before seal()");
}

void GpuDevice::require_new(RegionKind kind) const {
  const auto& existing = regions_[static_cast<size_t>(kind)];
  if (existing == nullptr && !(kind == RegionKind::Weights && loading_weights_)) return;
  throw DeviceError(std::string("region ") + region_name(kind) + " is allocated already" +
                    (existing ? " with " + std::to_string(existing->size()) + " bytes" : "") +
                    ": a region is allocated once");
}

std::pair<uint64_t, uint64_t> GpuDevice::memory() const {
  const std::lock_guard lock(mutex_);
  require_open();
  return context_->memory();
}

DeviceMemory& GpuDevice::make_region(RegionKind kind, uint64_t nbytes) {
  const double start = Timeline::now();
  auto& region = regions_[static_cast<size_t>(kind)];
  region = std::make_unique<DeviceMemory>(context_, kind, nbytes);
  count([&](GpuCounters& c) {
    ++c.regions_allocated;
    c.bytes_allocated += nbytes;
  });
  timeline_.add(std::string("allocate ") + region_name(kind), start);
  return *region;
}

void GpuDevice::clear(const DeviceMemory& memory) {
  context_->check(context_->call().fill(memory.address(), 0, memory.size(), stream_->get()), "clear memory");
}

void GpuDevice::load_weights(const std::string& path, uint64_t file_offset, uint64_t nbytes,
                             const StreamOptions& options) {
  const WeightsFile file(path, file_offset, nbytes);
  std::unique_lock lock(mutex_);
  require_unsealed("load weights");
  require_new(RegionKind::Weights);
  // The file is read without the lock, so that other regions, code objects and graphs can be made meanwhile.
  const Address to = make_region(RegionKind::Weights, nbytes).address();
  loading_weights_ = true;
  std::exception_ptr error;
  {
    const Loading loading(*this);
    lock.unlock();
    const double start = Timeline::now();
    try {
      file.stream(context_, to, options);
    } catch (...) {
      error = std::current_exception();
    }
    timeline_.add("weights", start);
  }
  lock.lock();
  loading_weights_ = false;
  if (!error) return;
  regions_[static_cast<size_t>(RegionKind::Weights)].reset();  // so that another attempt may follow
  std::rethrow_exception(error);
}

void GpuDevice::allocate(RegionKind kind, uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  require_unsealed(std::string("allocate region ") + region_name(kind));
  if (kind == RegionKind::Weights) throw DeviceError("region weights is filled from a file: use load_weights");
  if (kind == RegionKind::Io) throw DeviceError("region io has parts on the host too: use allocate_io");
  require_new(kind);
  const DeviceMemory& region = make_region(kind, nbytes);
  if (kind != RegionKind::Kv) clear(region);
}

void GpuDevice::allocate_io(uint64_t input_bytes, uint64_t nbytes, int64_t step_sizes_offset) {
  const std::lock_guard lock(mutex_);
  require_unsealed("allocate region io");
  require_new(RegionKind::Io);
  if (input_bytes > nbytes) {
    throw DeviceError("region io of " + std::to_string(nbytes) + " bytes cannot begin with " +
                      std::to_string(input_bytes) + " bytes of inputs");
  }
  const auto at = static_cast<uint64_t>(std::max<int64_t>(step_sizes_offset, 0));
  if (step_sizes_offset >= 0 && (at % 4 != 0 || at > input_bytes || input_bytes - at < 4 * kNumStepCounts)) {
    throw DeviceError("step sizes need 32 bytes of the inputs at a multiple of 4, but step_sizes_offset is " +
                      std::to_string(at) + " of " + std::to_string(input_bytes));
  }
  const uint64_t stride = round_up(nbytes, kPage);
  const double start = Timeline::now();
  auto host = std::make_unique<PinnedMemory>(context_, "region io", stride * io_sets_.size());
  timeline_.add("pin io", start);
  clear(make_region(RegionKind::Io, nbytes));
  host_io_ = std::move(host);
  for (size_t i = 0; i < io_sets_.size(); ++i) io_sets_[i].host = host_io_->data() + i * stride;
  input_bytes_ = input_bytes;
  io_bytes_ = nbytes;
  step_sizes_offset_ = step_sizes_offset;
  ranges_ = {{0, input_bytes}};
}

void GpuDevice::bind_io(std::vector<IoExtent> inputs, std::vector<IoExtent> outputs) {
  const std::lock_guard lock(mutex_);
  require_unsealed("bind tensors of region io");
  const int num_scalars = step_sizes_offset_ >= 0 ? kNumStepCounts : static_cast<int>(kernels::kNumStepScalars);
  for (const auto* extents : {&inputs, &outputs}) {
    for (size_t i = 0; i < extents->size(); ++i) {
      const bool ordered = i == 0 || (*extents)[i - 1].offset <= (*extents)[i].offset;
      if ((*extents)[i].scalar < num_scalars && ordered) continue;
      throw DeviceError("tensors of region io need ascending offsets and a step scalar below " +
                        std::to_string(num_scalars) + ", but tensor " + std::to_string(i) +
                        " is at offset " + std::to_string((*extents)[i].offset) + " with scalar " +
                        std::to_string((*extents)[i].scalar));
    }
  }
  inputs_ = std::move(inputs);
  outputs_ = std::move(outputs);
  ranges_.reserve(std::max({inputs_.size(), outputs_.size(), size_t{1}}));  // submit() allocates nothing
}

void GpuDevice::bind_page_table(const PageTable& table) {
  const std::lock_guard lock(mutex_);
  require_unsealed("bind the page table");
  const auto fits = [&](uint64_t offset) { return offset % sizeof(int32_t) == 0 && offset < input_bytes_; };
  if (!fits(table.offset) || !fits(table.context_lens) || table.row_bytes < sizeof(int32_t) || table.page_size < 1) {
    throw DeviceError("a page table needs offsets within the " + std::to_string(input_bytes_) +
                      " bytes of inputs, rows of 4 bytes or more and a page size of 1 or more, but has offset " +
                      std::to_string(table.offset) + ", context lengths at " + std::to_string(table.context_lens) +
                      ", rows of " + std::to_string(table.row_bytes) + " bytes and a page size of " +
                      std::to_string(table.page_size));
  }
  page_table_ = table;
}

std::shared_ptr<Region> GpuDevice::host_io() const {
  const std::lock_guard lock(mutex_);
  require_open();
  if (host_io_ == nullptr) throw DeviceError("region io is not allocated: allocate it first");
  return host_io_->region();
}

void GpuDevice::load_binary(const std::string& name, std::span<const std::byte> bytes) {
  std::unique_lock lock(mutex_);
  require_unsealed("load a code object");
  const auto [entry, is_new] = modules_.try_emplace(name);
  if (!is_new) throw DeviceError("the code object '" + name + "' is loaded already: load each one once");
  std::unique_ptr<Module> module;
  std::exception_ptr error;
  {
    const Loading loading(*this);
    lock.unlock();  // several threads may load code objects
    const double start = Timeline::now();
    try {
      module = std::make_unique<Module>(context_, name, bytes);
    } catch (...) {
      error = std::current_exception();
    }
    timeline_.add("load " + name, start);
    lock.lock();
    if (module != nullptr) {
      entry->second = std::move(module);
      count([](GpuCounters& c) { ++c.modules_loaded; });
    } else {
      modules_.erase(entry);
    }
    lock.unlock();
  }
  if (error) std::rethrow_exception(error);
}

int GpuDevice::load_graph(std::span<const std::byte> bytes, uint64_t kv_page_stride) {
  std::unique_lock lock(mutex_);
  require_unsealed("load a launch graph");
  double start = Timeline::now();
  const LaunchGraph launch_graph = read_graph(bytes);
  auto graph = std::make_unique<GpuGraph>(launch_graph, GraphContext{context_, regions_, modules_, kv_page_stride});
  timeline_.add("bind graph", start);
  const size_t handle = graphs_.size();
  graphs_.emplace_back();
  count([](GpuCounters& c) { ++c.graph_instantiations; });
  std::exception_ptr error;
  {
    const Loading loading(*this);
    lock.unlock();  // several threads may make graphs, once each is bound
    try {
      start = Timeline::now();
      graph->build();
      timeline_.add("build graph", start);
      start = Timeline::now();
      graph->instantiate();
      timeline_.add("instantiate graph", start);
      start = Timeline::now();
      graph->upload(stream_->get());
      timeline_.add("upload graph", start);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (!error) {
      graphs_[handle] = std::move(graph);
      count([](GpuCounters& c) { ++c.graphs_loaded; });
    }
    lock.unlock();
  }
  if (error) std::rethrow_exception(error);
  return static_cast<int>(handle);
}

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
// takes longer than a few bytes, and what does not fit, of which ranges_of tells.
uint64_t GpuDevice::page_row_bytes(const IoSet& set, const StepSizes& sizes) const {
  const PageTable& table = page_table_;
  const auto rows = static_cast<uint64_t>(sizes.num_seqs);
  if (table.row_bytes == 0 || rows == 0 || rows * table.row_bytes <= kMergeBytes) return 0;
  if (rows > (input_bytes_ - table.offset) / table.row_bytes) return 0;
  if (rows > (input_bytes_ - table.context_lens) / sizeof(int32_t)) return 0;
  const auto* lengths = reinterpret_cast<const int32_t*>(set.host + table.context_lens);
  const int32_t longest = std::max(1, *std::max_element(lengths, lengths + rows));
  const auto pages = static_cast<uint64_t>((longest - 1) / table.page_size) + 1;
  const uint64_t used = round_up(pages * sizeof(int32_t), kRowBytes);
  return used < table.row_bytes ? used : 0;
}

// Fills ranges_ with the parts of [begin, end) that a step uses, by its step_sizes in `set`, but for the tensor at
// `without`.
void GpuDevice::ranges_of(const IoSet& set, const std::vector<IoExtent>& extents, const StepSizes& sizes,
                          uint64_t begin, uint64_t end, uint64_t without) {
  ranges_.clear();
  if (extents.empty() && begin < end) ranges_.push_back({begin, end});
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
    if (!ranges_.empty() && range.begin <= ranges_.back().end + kMergeBytes) {
      ranges_.back().end = std::max(ranges_.back().end, range.end);
    } else {
      ranges_.push_back(range);
    }
  }
}

void GpuDevice::stage(const IoSet& set, const StepSizes& sizes) {
  if (step_sizes_offset_ >= 0) {
    const std::array<int32_t, 3> values = {static_cast<int32_t>(sizes.num_tokens), static_cast<int32_t>(sizes.num_seqs),
                                           static_cast<int32_t>(sizes.num_logit_rows)};
    std::memcpy(set.host + step_sizes_offset_, values.data(), sizeof(values));
  }
  const Address io = regions_[static_cast<size_t>(RegionKind::Io)]->address();
  const uint64_t row_bytes = page_row_bytes(set, sizes);
  if (row_bytes > 0) {
    const PageTable& table = page_table_;
    context_->check(context_->driver().copy_rows_to_device(io + table.offset, set.host + table.offset, table.row_bytes,
                                                           row_bytes, static_cast<size_t>(sizes.num_seqs),
                                                           stream_->get()),
                    "copy a step's page table");
  }
  ranges_of(set, inputs_, sizes, 0, input_bytes_, row_bytes > 0 ? page_table_.offset : UINT64_MAX);
  for (const CopyRange& r : ranges_) {
    context_->check(context_->call().copy_to_device(io + r.begin, set.host + r.begin, r.end - r.begin, stream_->get()),
                    "copy a step's inputs");
  }
}

void GpuDevice::collect(const IoSet& set, const StepSizes& sizes) {
  const Address io = regions_[static_cast<size_t>(RegionKind::Io)]->address();
  ranges_of(set, outputs_, sizes, input_bytes_, io_bytes_);
  for (const CopyRange& r : ranges_) {
    context_->check(context_->call().copy_to_host(set.host + r.begin, io + r.begin, r.end - r.begin, stream_->get()),
                    "copy a step's outputs");
  }
  context_->check(context_->call().event_record(set.done->get(), stream_->get()), "mark the end of a step");
}

Ticket GpuDevice::submit(int graph, const StepSizes& sizes, int io_set) {
  const std::lock_guard lock(mutex_);
  GpuGraph& g = graph_of(graph, sizes, io_set);
  IoSet& set = io_sets_[static_cast<size_t>(io_set)];
  stage(set, sizes);
  if (times_ != nullptr) times_->begin(last_ticket_ + 1, sizes.num_tokens, sizes.num_seqs, stream_->get());
  context_->check(context_->call().graph_launch(g.exec(), stream_->get()), "start a step");
  if (times_ != nullptr) times_->end(stream_->get());
  ++g.runs;
  count([&](GpuCounters& c) {
    ++c.steps;
    c.nodes += g.num_nodes();
  });
  collect(set, sizes);
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
  const double end = Timeline::now() + std::min(spin_seconds_, seconds);
  Status code = context_->call().event_query(event);
  while (code == status::kNotReady && Timeline::now() < end) code = context_->call().event_query(event);
  const bool give_up = code == status::kNotReady && std::isfinite(seconds);
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
  context_->check(context_->call().stream_synchronize(stream_->get()), "finish the steps before a profile");
  stage(set, sizes);
  auto nodes = g.profile(stream_->get());
  collect(set, sizes);
  context_->check(context_->call().event_synchronize(set.done->get()), "finish a profile");
  return nodes;
}

void GpuDevice::seal() {
  const std::lock_guard lock(mutex_);
  require_open();
  if (loading_ > 0) throw DeviceError("something is still being loaded: seal the device when all loads have returned");
  context_->bind();
  context_->check(context_->call().stream_synchronize(stream_->get()), "finish loading");
  sealed_ = true;
}

GpuCounters GpuDevice::counters(bool after_seal) const {
  const std::lock_guard lock(mutex_);
  return counters_[after_seal ? 1 : 0];
}

void GpuDevice::close() noexcept {
  std::unique_lock lock(mutex_);
  if (closed_) return;
  closed_ = true;
  lock.unlock();
  bool ended = stream_->drain(close_seconds_);
  lock.lock();
  const auto idle = [&] { return loading_ == 0 && waiting_ == 0; };
  ended = idle_.wait_for(lock, std::chrono::duration<double>(close_seconds_), idle) && ended;
  if (!ended) {
    // The device still works on these: giving them back would wait for it, maybe for ever. They stay until the
    // process ends.
    static auto* const abandoned = new std::vector<std::shared_ptr<void>>;
    static std::mutex abandoned_mutex;
    const std::lock_guard abandoned_lock(abandoned_mutex);
    const auto abandon = [](auto& resource) {
      using Resource = std::remove_reference_t<decltype(resource)>;
      abandoned->push_back(std::make_shared<Resource>(std::move(resource)));
    };
    abandon(graphs_);
    abandon(modules_);
    abandon(regions_);
    abandon(host_io_);
    abandon(io_sets_);
    abandon(times_);
    abandon(stream_);
  }
  graphs_.clear();
  modules_.clear();
  for (auto& region : regions_) region.reset();
  host_io_.reset();
  io_sets_.clear();
  times_.reset();
  stream_.reset();
}

}  // namespace tokenspeed::device::gpu
