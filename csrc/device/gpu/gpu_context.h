// One device opened through its driver: what all of its memory, graphs and streams share.
#pragma once

#include <atomic>
#include <chrono>
#include <concepts>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "device/gpu/driver.h"
#include "device/region.h"

namespace tokenspeed::device::gpu {

// Where the time of a start goes: (what, start, seconds, the system's id of the thread), with starts on the clock of
// Python's time.monotonic().
class Timeline {
 public:
  using Span = std::tuple<std::string, double, double, int>;
  static double now() noexcept {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void add(std::string what, double start);
  std::vector<Span> spans() const;

 private:
  mutable std::mutex mutex_;
  std::vector<Span> spans_;
};

class Context {
 public:
  // Throws DeviceError when there is no such device or it cannot be opened.
  Context(std::shared_ptr<const Driver> driver, int ordinal);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Driver& driver() const noexcept { return *driver_; }
  const EntryPoints& call() const noexcept { return driver_->call; }
  const DeviceInfo& info() const noexcept { return info_; }
  uint32_t max_shared_bytes() const noexcept { return max_shared_bytes_; }

  // Makes the device that of the calling thread. Throws DeviceLostError.
  void bind() const;
  void bind_quietly() const noexcept { driver_->make_current(handle_); }

  // Throws DeviceError, or DeviceLostError for a code that the driver will repeat from now on. `what` is a text, or a
  // function that makes one, after "cannot".
  void check(Status code, const char* what) const {
    if (code != status::kSuccess) [[unlikely]] fail(code, what);
  }
  template <std::invocable What>
  void check(Status code, const What& what) const {
    if (code != status::kSuccess) [[unlikely]] fail(code, what());
  }
  [[noreturn]] void fail(Status code, const std::string& what) const;
  bool lost() const noexcept { return lost_.load(std::memory_order_acquire); }
  void require_working() const;  // throws DeviceLostError when the device is lost

  // (free, total) bytes. Throws DeviceError.
  std::pair<uint64_t, uint64_t> memory() const;

 private:
  std::shared_ptr<const Driver> driver_;
  DeviceInfo info_;
  Handle handle_ = nullptr;
  uint32_t max_shared_bytes_ = 0;
  mutable std::atomic<bool> lost_{false};
  mutable std::mutex lost_mutex_;
  mutable std::string lost_because_;
};

// A region of device memory.
class DeviceMemory {
 public:
  // Throws DeviceError; when there is not enough memory it says by how much, and what to change.
  DeviceMemory(std::shared_ptr<const Context> context, RegionKind kind, uint64_t nbytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  Address address() const noexcept { return allocation_.address; }
  uint64_t size() const noexcept { return allocation_.size; }

 private:
  std::shared_ptr<const Context> context_;
  Allocation allocation_;
};

// Host memory that the device reads and writes where it lies, at address(), and copies from without the driver's help.
// Whoever holds region() may go on using it when this object is gone, as plain memory.
class PinnedMemory {
 public:
  // Throws DeviceError.
  PinnedMemory(std::shared_ptr<const Context> context, std::string_view what, uint64_t nbytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  const std::shared_ptr<Region>& region() const noexcept { return region_; }
  std::byte* data() const noexcept { return region_->data(); }
  Address address() const noexcept { return address_; }  // of data(), to the device

 private:
  std::shared_ptr<const Context> context_;
  std::shared_ptr<Region> region_;
  Address address_ = 0;
};

// A stream of the device, or an event: made and destroyed with the object. Throws DeviceError.
class Stream {
 public:
  explicit Stream(std::shared_ptr<const Context> context);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  Handle get() const noexcept { return handle_; }
  // Waits for the end of all work, but no longer than `seconds`; whether it ended. Also ends when the device is lost.
  bool drain(double seconds) const noexcept;

 private:
  std::shared_ptr<const Context> context_;
  Handle handle_ = nullptr;
};

class Event {
 public:
  Event(std::shared_ptr<const Context> context, unsigned flags);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  Handle get() const noexcept { return handle_; }

 private:
  std::shared_ptr<const Context> context_;
  Handle handle_ = nullptr;
};

}  // namespace tokenspeed::device::gpu
