// A GPU driver's library, opened at run time: a table of entry points that CUDA and HIP share, and the few calls that
// differ. No vendor header is needed to build, and no driver to start: one binary runs everywhere.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "device/errors.h"

namespace tokenspeed::device::gpu {

// The device stopped working: an error that the driver repeats for every later call. Only a new process helps.
struct DeviceLostError : DeviceError {
  using DeviceError::DeviceError;
};

enum class Backend : uint8_t { Cuda, Hip };

// Throws DeviceError for a name that is neither "cuda" nor "hip".
Backend backend_by_name(std::string_view name);
const char* backend_name(Backend backend) noexcept;

using Status = int;  // the driver's own code; CUDA and HIP give the same numbers to what is tested for here
namespace status {
inline constexpr Status kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNoDevice = 100, kInvalidDevice = 101,
                        kInvalidImage = 200, kNoBinaryForGpu = 209, kInvalidSource = 300, kNotFound = 500,
                        kNotReady = 600, kIllegalAddress = 700, kLaunchFailed = 719, kNotSupported = 801;
}
// Whether the driver repeats this code for every call after it.
constexpr bool is_sticky(Status code) noexcept {
  switch (code) {
    case 4:    // the driver is shutting down
    case 46:   // the device is unavailable
    case 214:  // uncorrectable memory error
    case 220:  // uncorrectable NVLink error
    case 226:  // contained error
    case 700:  // illegal address
    case 702:  // launch timed out
    case 709:  // the context is destroyed
    case 710:  // assertion in a kernel
    case 714:  // hardware stack error
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // invalid address space
    case 718:  // invalid program counter
    case 719:  // launch failed
    case 721:  // tensor memory leak
    case 999:  // unknown, after which nothing is certain
    case 1052:  // HSA runtime memory call
    case 1053:  // HSA runtime call
      return true;
    default:
      return false;
  }
}

using Handle = void*;     // of a module, function, stream, event, graph or graph node
using Address = uint64_t;  // of device memory

struct KernelLaunch {
  Handle function;
  std::array<uint32_t, 3> grid, block, cluster;
  uint32_t shared_bytes;
  void** parameters;  // one pointer per parameter, to a value that the call copies
};

struct DeviceInfo {
  int ordinal;
  std::string name, arch;  // arch: "sm_90", "gfx950"
  uint64_t total_bytes;
  int driver_version;  // 12040 is CUDA 12.4; ROCm's number is 10000000 major + 100000 minor + patch
};

// Memory of the device in one address range.
struct Allocation {
  Address address = 0;
  uint64_t size = 0;         // as asked for
  uint64_t mapped = 0;       // whole pages, at least size
  uint64_t memory = 0;       // CUDA: the handle of the physical memory
};

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kHostPortable = 1, kHostMapped = 2;  // for every context; with an address on the device
inline constexpr unsigned kEventTiming = 0, kEventBlockingSync = 1, kEventDisableTiming = 2;

// Entry points of one shape in both drivers. Names: see cuda_api.cpp and hip_api.cpp.
struct EntryPoints {
  Status (*init)(unsigned flags);
  Status (*driver_version)(int* version);
  Status (*device_count)(int* count);
  Status (*device_name)(char* name, int length, int device);
  Status (*device_total_memory)(size_t* bytes, int device);
  Status (*memory_info)(size_t* free, size_t* total);
  Status (*host_register)(void* memory, size_t bytes, unsigned flags);
  Status (*host_unregister)(void* memory);
  Status (*host_address)(Address* address, void* memory, unsigned flags);  // of registered memory, to the device
  Status (*copy_to_device)(Address to, const void* from, size_t bytes, Handle stream);
  Status (*copy_to_host)(void* to, Address from, size_t bytes, Handle stream);
  Status (*fill)(Address to, unsigned char value, size_t bytes, Handle stream);
  Status (*module_load)(Handle* module, const void* image);
  Status (*module_unload)(Handle module);
  Status (*module_function)(Handle* function, Handle module, const char* symbol);
  Status (*stream_create)(Handle* stream, unsigned flags);
  Status (*stream_destroy)(Handle stream);
  Status (*stream_query)(Handle stream);
  Status (*stream_synchronize)(Handle stream);
  Status (*stream_wait)(Handle stream, Handle event, unsigned flags);  // for the event's latest record
  Status (*event_create)(Handle* event, unsigned flags);
  Status (*event_destroy)(Handle event);
  Status (*event_record)(Handle event, Handle stream);
  Status (*event_query)(Handle event);
  Status (*event_synchronize)(Handle event);
  Status (*event_elapsed)(float* milliseconds, Handle start, Handle end);
  Status (*graph_create)(Handle* graph, unsigned flags);
  Status (*graph_destroy)(Handle graph);
  Status (*graph_instantiate)(Handle* exec, Handle graph, unsigned long long flags);
  Status (*graph_exec_destroy)(Handle exec);
  Status (*graph_upload)(Handle exec, Handle stream);  // null in a driver that has none
  Status (*graph_launch)(Handle exec, Handle stream);
};

// One of these per opened library. The methods are what the two drivers do differently.
class Driver {
 public:
  virtual ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  EntryPoints call{};

  virtual Backend backend() const noexcept = 0;
  virtual uint16_t elf_machine() const noexcept = 0;    // of its code objects
  virtual bool has_programmatic_edges() const noexcept = 0;
  virtual bool has_clusters() const noexcept = 0;
  virtual std::string describe(Status code) const = 0;  // "CUDA_ERROR_INVALID_VALUE (1): invalid argument"
  virtual Status architecture(std::string* arch, int device) const = 0;
  virtual Status max_shared_bytes(int* bytes, int device) const = 0;  // that a kernel's thread block may have

  // A device's context, which threads make current by themselves.
  virtual Status open(Handle* context, int device) const = 0;
  virtual Status make_current(Handle context) const = 0;
  virtual Status release(Handle context, int device) const = 0;

  // `hint` is the address to have if it is free.
  virtual Status allocate(Allocation* allocation, uint64_t bytes, Address hint, int device) const = 0;
  virtual Status deallocate(const Allocation& allocation) const = 0;

  // Prepares a function for launches with these sizes, and loads it onto the device where loading is lazy.
  virtual Status prepare(const KernelLaunch& launch) const = 0;
  // The bytes of each parameter; leaves `sizes` unset and succeeds where the driver does not tell.
  virtual Status parameter_sizes(Handle function, std::vector<size_t>* sizes, bool* known) const = 0;
  virtual Status add_kernel_node(Handle* node, Handle graph, std::span<const Handle> predecessors, bool programmatic,
                                 const KernelLaunch& launch) const = 0;
  virtual Status launch(const KernelLaunch& launch, Handle stream) const = 0;

  int version() const noexcept { return version_; }
  const std::string& library() const noexcept { return library_; }

 protected:
  Driver(std::string library, void* handle) : library_(std::move(library)), handle_(handle) {}
  // Fills `entry`; throws DeviceError when the library lacks the name and it is not optional.
  template <typename Function>
  void resolve(Function& entry, const char* name, bool optional = false) {
    entry = reinterpret_cast<Function>(find(name, optional));
  }

 private:
  friend std::shared_ptr<const Driver> open_driver(Backend backend, const std::string& library);
  void* find(const char* name, bool optional) const;

  std::string library_;
  void* handle_;
  int version_ = 0;
};

// Opens and initializes the driver: `library` is a path, or empty for the system's own. Throws DeviceError, saying what
// to install, when there is none or it does not start.
std::shared_ptr<const Driver> open_driver(Backend backend, const std::string& library);

// All devices of the driver. Throws DeviceError.
std::vector<DeviceInfo> list_devices(const Driver& driver);

}  // namespace tokenspeed::device::gpu
