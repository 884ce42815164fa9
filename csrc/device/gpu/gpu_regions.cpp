// What a GpuDevice's regions hold: read, written, and weights replaced, between steps.
#include "device/gpu/gpu_device.h"

namespace tokenspeed::device::gpu {

GpuDevice::Range GpuDevice::range_of(RegionKind kind) const {
  require_open();
  if (kind == RegionKind::HostIo && host_io_ != nullptr) return {host_io_->address(), host_io_->region()->size()};
  const auto& memory = regions_[static_cast<size_t>(kind)];
  if (memory == nullptr) {
    throw DeviceError(std::string("region ") + region_name(kind) + " is not allocated: allocate it first");
  }
  if (kind == RegionKind::Weights && updating_weights_) {
    throw DeviceError("region weights is being updated: wait until update_weights has returned");
  }
  return {memory->address(), memory->size()};
}

Address GpuDevice::address(RegionKind kind) const {
  const std::lock_guard lock(mutex_);
  return range_of(kind).address;
}

void GpuDevice::require_range(RegionKind kind, uint64_t offset, uint64_t nbytes) const {
  const std::lock_guard lock(mutex_);
  require_within(kind, range_of(kind).size, offset, nbytes);
}

// Queues a copy behind the steps in flight and waits for it without the lock, so that close() can give up on it.
template <typename Copy>
void GpuDevice::copy(RegionKind kind, uint64_t offset, uint64_t nbytes, const Copy& queue) {
  std::unique_lock lock(mutex_);
  const Range range = range_of(kind);
  require_within(kind, range.size, offset, nbytes);
  if (nbytes == 0) return;
  const Handle stream = stream_->get();
  ++waiting_;
  lock.unlock();
  context_->bind_quietly();
  Status code = queue(range.address + offset, stream);
  if (code == status::kSuccess) code = context_->call().stream_synchronize(stream);
  lock.lock();
  --waiting_;
  idle_.notify_all();
  context_->check(code, [&] { return std::string("copy bytes of region ") + region_name(kind); });
}

void GpuDevice::read(RegionKind kind, uint64_t offset, std::span<std::byte> to) {
  copy(kind, offset, to.size(), [&](Address from, Handle stream) {
    return context_->call().copy_to_host(to.data(), from, to.size(), stream);
  });
}

void GpuDevice::write(RegionKind kind, uint64_t offset, std::span<const std::byte> from) {
  if (kind == RegionKind::Weights) throw DeviceError(kWeightsAreReadOnly);
  copy(kind, offset, from.size(), [&](Address to, Handle stream) {
    return context_->call().copy_to_device(to, from.data(), from.size(), stream);
  });
}

// Without the lock. Returns what went wrong once the old contents were touched.
std::exception_ptr GpuDevice::replace_weights(const WeightsFile& file, Address to, const StreamOptions& options) {
  context_->bind();
  file.stream(context_, 0, options);
  context_->check(context_->call().stream_synchronize(stream_->get()), "finish the steps before an update of weights");
  try {
    file.stream(context_, to, options);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void GpuDevice::update_weights(const std::string& path, uint64_t file_offset, uint64_t nbytes,
                               const StreamOptions& options) {
  std::unique_lock lock(mutex_);
  const Range weights = range_of(RegionKind::Weights);
  if (loading_weights_) throw DeviceError("the weights are still being loaded: wait for load_weights, then update them");
  require_size_of_weights(weights.size, nbytes);
  const WeightsFile file(path, file_offset, nbytes);
  updating_weights_ = true;
  std::exception_ptr error, half_way;
  {
    const Loading loading(*this);
    lock.unlock();
    try {
      half_way = replace_weights(file, weights.address, options);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    updating_weights_ = false;
    if (!error) weights_unknown_ = half_way != nullptr;
    lock.unlock();
  }
  if (error) std::rethrow_exception(error);
  if (!half_way) return;
  try {
    std::rethrow_exception(half_way);
  } catch (const DeviceLostError&) {
    throw;
  } catch (const DeviceError& e) {
    throw WeightsUnknownError(std::string(e.what()) + "; " + kWeightsUnknown);
  }
}

}  // namespace tokenspeed::device::gpu
