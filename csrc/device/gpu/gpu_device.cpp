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

GpuDevice::IoSet::IoSet(const std::shared_ptr<const Context>& context)
    : done(std::make_unique<Event>(context, kEventDisableTiming | kEventBlockingSync)) {}

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

void GpuDevice::count_region(uint64_t nbytes) {
  count([&](GpuCounters& c) {
    ++c.regions_allocated;
    c.bytes_allocated += nbytes;
  });
}

DeviceMemory& GpuDevice::make_region(RegionKind kind, uint64_t nbytes) {
  const double start = Timeline::now();
  auto& region = regions_[static_cast<size_t>(kind)];
  region = std::make_unique<DeviceMemory>(context_, kind, nbytes);
  count_region(nbytes);
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
  if (kind == RegionKind::Io || kind == RegionKind::HostIo) {
    throw DeviceError("regions io and host_io are allocated together: use allocate_io");
  }
  require_new(kind);
  const DeviceMemory& region = make_region(kind, nbytes);
  if (kind != RegionKind::Kv) clear(region);
}

void GpuDevice::allocate_io(uint64_t nbytes, int64_t step_sizes_offset) {
  const std::lock_guard lock(mutex_);
  require_unsealed("allocate region io");
  require_new(RegionKind::Io);
  const auto at = static_cast<uint64_t>(std::max<int64_t>(step_sizes_offset, 0));
  if (step_sizes_offset >= 0 && (at % 4 != 0 || at > nbytes || nbytes - at < 4 * kNumStepCounts)) {
    throw DeviceError("step sizes need 32 bytes of region io at a multiple of 4, but step_sizes_offset is " +
                      std::to_string(at) + " of " + std::to_string(nbytes));
  }
  const uint64_t stride = round_up(nbytes, kPage);
  const double start = Timeline::now();
  auto host = std::make_unique<PinnedMemory>(context_, "region host_io", stride * io_sets_.size());
  timeline_.add("pin host_io", start);
  clear(make_region(RegionKind::Io, nbytes));
  host_io_ = std::move(host);
  for (size_t i = 0; i < io_sets_.size(); ++i) io_sets_[i].host = host_io_->data() + i * stride;
  io_.address = host_io_->address();
  io_.nbytes = nbytes;
  io_.stride = stride;
  step_sizes_offset_ = step_sizes_offset;
}

void GpuDevice::allocate_host_pages(int64_t num_pages, uint64_t page_bytes) {
  std::unique_lock lock(mutex_);
  require_unsealed("allocate host pages");
  if (mover_ != nullptr || pinning_pages_) {
    throw DeviceError("host pages are allocated already: they are allocated once");
  }
  const auto& kv = regions_[static_cast<size_t>(RegionKind::Kv)];
  const HostTier tier = HostTier::make(num_pages, page_bytes, kv == nullptr ? 0 : kv->size());
  pinning_pages_ = true;
  std::unique_ptr<PageMover> mover;
  std::exception_ptr error;
  {
    const Loading loading(*this);
    lock.unlock();  // it takes as long as loading everything else
    const double start = Timeline::now();
    try {
      mover = std::make_unique<PageMover>(context_, tier);
    } catch (...) {
      error = std::current_exception();
    }
    timeline_.add("pin host pages", start);
    lock.lock();
    pinning_pages_ = false;
    mover_ = std::move(mover);
    if (!error) count_region(tier.nbytes());
    lock.unlock();
  }
  if (error) std::rethrow_exception(error);
}

std::shared_ptr<Region> GpuDevice::host_pages() const {
  const std::lock_guard lock(mutex_);
  require_open();
  if (mover_ == nullptr) throw DeviceError("there are no host pages: allocate them first");
  return mover_->pages();
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
  if (mover_ != nullptr) ended = mover_->stream().drain(close_seconds_) && ended;
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
    abandon(mover_);
    abandon(io_sets_);
    abandon(times_);
    abandon(stream_);
  }
  graphs_.clear();
  modules_.clear();
  for (auto& region : regions_) region.reset();
  host_io_.reset();
  mover_.reset();
  io_sets_.clear();
  times_.reset();
  stream_.reset();
}

}  // namespace tokenspeed::device::gpu
