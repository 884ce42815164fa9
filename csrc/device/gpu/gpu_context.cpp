#include "device/gpu/gpu_context.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace tokenspeed::device::gpu {
namespace {

// Regions begin 16 TiB apart, where nothing else of a process lies, so that addresses are the same in every run.
constexpr Address kRegionSpacing = Address{1} << 44;

const char* advice_for(RegionKind kind) {
  switch (kind) {
    case RegionKind::Weights: return "use a GPU with more memory, or build with a smaller dtype";
    case RegionKind::Kv: return "lower --kv-gib or max_num_seqs";
    default: return "lower --kv-gib, or build with lower max_prefill_tokens or max_num_seqs";
  }
}

// The system zeroes memory as it is first touched, at a few GB/s a thread.
void touch(std::byte* data, size_t nbytes) {
  constexpr size_t kBytesPerThread = 256 << 20, kMaxThreads = 16;
  const size_t most = std::min<size_t>(kMaxThreads, std::thread::hardware_concurrency());
  const size_t num_pieces = std::clamp<size_t>(nbytes / kBytesPerThread, 1, std::max<size_t>(most, 1));
  const size_t piece = (nbytes / num_pieces / Region::kHugePage + 1) * Region::kHugePage;
  std::vector<std::jthread> threads;
  for (size_t at = 0; at < nbytes; at += piece) {
    const size_t size = std::min(piece, nbytes - at);
    const auto fill = [=] { std::memset(data + at, 0, size); };
    if (num_pieces == 1) {
      fill();
      return;
    }
    try {
      threads.emplace_back(fill);
    } catch (const std::system_error&) {  // the system has no thread left to give
      fill();
    }
  }
}

std::string ordinals(size_t count) {
  if (count == 0) return "there is none";
  return count == 1 ? "there is 1, number 0" : "there are " + std::to_string(count) + ", from 0";
}

}  // namespace

void Timeline::add(std::string what, double start) {
  const double end = now();
  const std::lock_guard lock(mutex_);
  spans_.emplace_back(std::move(what), start, end - start, gettid());
}

std::vector<Timeline::Span> Timeline::spans() const {
  const std::lock_guard lock(mutex_);
  return spans_;
}

Context::Context(std::shared_ptr<const Driver> driver, int ordinal) : driver_(std::move(driver)) {
  const std::vector<DeviceInfo> devices = list_devices(*driver_);
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= devices.size()) {
    throw DeviceError(std::string("no ") + backend_name(driver_->backend()) + " device has number " +
                      std::to_string(ordinal) + ": " + ordinals(devices.size()) + ": choose another");
  }
  info_ = devices[static_cast<size_t>(ordinal)];
  int shared = 0;
  check(driver_->max_shared_bytes(&shared, ordinal), "read the device's limits");
  max_shared_bytes_ = static_cast<uint32_t>(shared);
  check(driver_->open(&handle_, ordinal), [&] { return "open the device " + info_.name; });
}

Context::~Context() { driver_->release(handle_, info_.ordinal); }

void Context::bind() const {
  require_working();
  check(driver_->make_current(handle_), "use the device from this thread");
}

void Context::fail(Status code, const std::string& what) const {
  const std::string text = "the device " + info_.name + " cannot " + what + ": " + driver_->describe(code);
  if (!is_sticky(code)) throw DeviceError(text);
  const std::lock_guard lock(lost_mutex_);
  if (lost_because_.empty()) {
    lost_because_ = "the device " + info_.name + " is lost: it could not " + what + ": " + driver_->describe(code) +
                    ": restart the process; if it happens again, look at the system's log for the device's errors";
    lost_.store(true, std::memory_order_release);
  }
  throw DeviceLostError(lost_because_);
}

void Context::require_working() const {
  if (!lost()) [[likely]] return;
  const std::lock_guard lock(lost_mutex_);
  throw DeviceLostError(lost_because_);
}

std::pair<uint64_t, uint64_t> Context::memory() const {
  bind();
  size_t free = 0, total = 0;
  check(call().memory_info(&free, &total), "tell how much memory is free");
  return {free, total};
}

DeviceMemory::DeviceMemory(std::shared_ptr<const Context> context, RegionKind kind, uint64_t nbytes)
    : context_(std::move(context)) {
  const std::string what = std::string("region ") + region_name(kind);
  if (nbytes == 0) throw DeviceError(what + " needs at least 1 byte, but 0 were asked for");
  context_->bind();
  const Address hint = kRegionSpacing * (static_cast<Address>(kind) + 1);
  const auto [free, total] = context_->memory();
  const Status code = nbytes > free ? status::kOutOfMemory
                                    : context_->driver().allocate(&allocation_, nbytes, hint, context_->info().ordinal);
  if (code == status::kOutOfMemory) {
    const std::string missing =
        nbytes > free ? std::to_string(nbytes - free) + " too few" : "not all of it in whole pages";
    throw DeviceError(what + " needs " + std::to_string(nbytes) + " bytes of GPU memory, but " + std::to_string(free) +
                      " of " + std::to_string(total) + " are free, " + missing + ": " + advice_for(kind) +
                      ", or end other processes that use the GPU");
  }
  context_->check(code, [&] { return "allocate " + what + " of " + std::to_string(nbytes) + " bytes"; });
}

DeviceMemory::~DeviceMemory() {
  context_->bind_quietly();
  context_->driver().deallocate(allocation_);
}

PinnedMemory::PinnedMemory(std::shared_ptr<const Context> context, std::string_view what, uint64_t nbytes)
    : context_(std::move(context)), region_(std::make_shared<Region>(what, nbytes)) {
  context_->bind();
  // Touched first: the driver then finds huge pages in place, which threads bring in side by side.
  touch(region_->data(), region_->size());
  const EntryPoints& call = context_->call();
  context_->check(call.host_register(region_->base(), region_->mapped(), kHostPortable | kHostMapped), [&] {
    return "pin " + std::to_string(nbytes) + " bytes of host memory for " + std::string(what) + " (see `ulimit -l`)";
  });
  const Status code = call.host_address(&address_, region_->base(), 0);
  if (code != status::kSuccess) {
    call.host_unregister(region_->base());
    context_->fail(code, "reach host memory for " + std::string(what));
  }
  address_ += static_cast<Address>(region_->data() - region_->base());
}

PinnedMemory::~PinnedMemory() {
  context_->bind_quietly();
  context_->call().host_unregister(region_->base());
}

Stream::Stream(std::shared_ptr<const Context> context) : context_(std::move(context)) {
  context_->bind();
  context_->check(context_->call().stream_create(&handle_, kStreamNonBlocking), "make a stream");
}

Stream::~Stream() {
  context_->bind_quietly();
  context_->call().stream_destroy(handle_);
}

bool Stream::drain(double seconds) const noexcept {
  context_->bind_quietly();
  const double end = Timeline::now() + seconds;
  while (!context_->lost() && context_->call().stream_query(handle_) == status::kNotReady) {
    if (Timeline::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

Event::Event(std::shared_ptr<const Context> context, unsigned flags) : context_(std::move(context)) {
  context_->bind();
  context_->check(context_->call().event_create(&handle_, flags), "make an event");
}

Event::~Event() {
  context_->bind_quietly();
  context_->call().event_destroy(handle_);
}

}  // namespace tokenspeed::device::gpu
