#include "device/gpu/gpu_device.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace tokenspeed::device::gpu {
namespace {

constexpr uint64_t kPage = 4096;
constexpr int kMaxIoSets = 64;

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

bool GpuDevice::Streams::drain(double seconds) const noexcept {
  const double end = Timeline::now() + seconds;
  bool ended = true;
  for (const Stream* stream : {&inputs, &main, &outputs}) ended = stream->drain(end - Timeline::now()) && ended;
  return ended;
}

GpuDevice::IoSet::IoSet(const std::shared_ptr<const Context>& context)
    : staged(std::make_unique<Event>(context, kEventDisableTiming)),
      ran(std::make_unique<Event>(context, kEventDisableTiming)),
      done(std::make_unique<Event>(context, kEventDisableTiming | kEventBlockingSync)) {}

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
  streams_ = std::make_unique<Streams>(context_);
  for (int i = 0; i < options.io_sets; ++i) io_sets_.emplace_back(context_);
  io_.num_sets = options.io_sets;
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

void GpuDevice::clear(const DeviceMemory& memory, const Stream& stream) {
  context_->check(context_->call().fill(memory.address(), 0, memory.size(), stream.get()), "clear memory");
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
  if (kind != RegionKind::Kv) clear(region, streams_->main);
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
  const DeviceMemory& device = make_region(RegionKind::Io, stride * io_sets_.size());
  clear(device, streams_->inputs);  // before the first step's inputs are copied
  host_io_ = std::move(host);
  for (size_t i = 0; i < io_sets_.size(); ++i) {
    io_sets_[i].host = host_io_->data() + i * stride;
    io_sets_[i].device = device.address() + i * stride;
  }
  input_bytes_ = input_bytes;
  io_.nbytes = nbytes;
  io_.stride = stride;
  step_sizes_offset_ = step_sizes_offset;
  for (auto* ranges : {&copies_.inputs, &copies_.outputs}) ranges->reserve(1);
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
  copies_.inputs.reserve(std::max(inputs_.size(), size_t{1}));  // submit() allocates nothing
  copies_.outputs.reserve(std::max(outputs_.size(), size_t{1}));
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
  const GraphContext graph_context{context_, regions_, modules_, kv_page_stride, io_};
  auto graph = std::make_unique<GpuGraph>(launch_graph, graph_context);
  timeline_.add("bind graph", start);
  const size_t handle = graphs_.size();
  graphs_.emplace_back();
  const int num_sets = io_.num_sets;
  count([&](GpuCounters& c) { c.graph_instantiations += static_cast<uint64_t>(num_sets); });
  std::exception_ptr error;
  {
    const Loading loading(*this);
    lock.unlock();  // several threads may make graphs, once each is bound
    try {
      for (int io_set = 0; io_set < num_sets; ++io_set) {
        start = Timeline::now();
        graph->build(io_set);
        timeline_.add("build graph", start);
        start = Timeline::now();
        graph->instantiate();
        timeline_.add("instantiate graph", start);
      }
      start = Timeline::now();
      graph->upload(streams_->main.get());
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

void GpuDevice::seal() {
  const std::lock_guard lock(mutex_);
  require_open();
  if (loading_ > 0) throw DeviceError("something is still being loaded: seal the device when all loads have returned");
  context_->bind();
  for (const Stream* stream : {&streams_->inputs, &streams_->main}) {
    context_->check(context_->call().stream_synchronize(stream->get()), "finish loading");
  }
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
  bool ended = streams_->drain(close_seconds_);
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
    abandon(streams_);
  }
  graphs_.clear();
  modules_.clear();
  for (auto& region : regions_) region.reset();
  host_io_.reset();
  io_sets_.clear();
  times_.reset();
  streams_.reset();
}

}  // namespace tokenspeed::device::gpu
