#include "device/gpu/hip_api.h"

#include <string_view>
#include <vector>

namespace tokenspeed::device::gpu {
namespace hip {

std::string architecture_of(std::string_view properties) {
  const size_t at = properties.find("gfx", kPropertiesNameBytes);
  if (at == std::string_view::npos) return "";
  const std::string_view name = properties.substr(at);
  return std::string(name.substr(0, name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-")));
}

}  // namespace hip

namespace {

using namespace hip;

// HIP has no contexts to speak of: a thread chooses a device by its ordinal, which is the handle here.
Handle handle_of(int device) { return reinterpret_cast<Handle>(static_cast<intptr_t>(device) + 1); }
int device_of(Handle handle) { return static_cast<int>(reinterpret_cast<intptr_t>(handle) - 1); }

class HipDriver final : public Driver {
 public:
  HipDriver(std::string library, void* handle) : Driver(std::move(library), handle) {
    resolve_shared();
    resolve(error_name_, "hipGetErrorName");
    resolve(error_string_, "hipGetErrorString");
    resolve(properties_, "hipGetDevicePropertiesR0600", true);  // ROCm 6
    if (properties_ == nullptr) resolve(properties_, "hipGetDeviceProperties");
    resolve(set_device_, "hipSetDevice");
    resolve(malloc_, "hipMalloc");
    resolve(free_, "hipFree");
    resolve(add_kernel_, "hipGraphAddKernelNode");
    resolve(launch_, "hipModuleLaunchKernel");
  }

  Backend backend() const noexcept override { return Backend::Hip; }
  uint16_t elf_machine() const noexcept override { return 224; }  // EM_AMDGPU
  bool has_programmatic_edges() const noexcept override { return false; }
  bool has_clusters() const noexcept override { return false; }

  std::string describe(Status code) const override {
    const char *name = error_name_(code), *text = error_string_(code);
    const bool says_more = text != nullptr && (name == nullptr || std::string_view(text) != name);
    return std::string(name != nullptr ? name : "HIP error") + " (" + std::to_string(code) + ")" +
           (says_more ? std::string(": ") + text : "");
  }

  Status architecture(std::string* arch, int device) const override {
    std::vector<char> properties(kPropertiesBytes);
    if (const Status s = properties_(properties.data(), device)) return s;
    *arch = architecture_of({properties.data(), properties.size()});
    return status::kSuccess;
  }
  Status max_shared_bytes(int* bytes, int) const override {
    *bytes = kMaxSharedBytes;
    return status::kSuccess;
  }

  Status open(Handle* context, int device) const override {
    *context = handle_of(device);
    return set_device_(device);
  }
  Status make_current(Handle context) const override { return set_device_(device_of(context)); }
  Status release(Handle, int) const override { return status::kSuccess; }

  // Graph arguments are region + offset, so an address that the driver chooses is as good as a fixed one; and the
  // structures of hipMemCreate changed between ROCm 5 and 6.
  Status allocate(Allocation* allocation, uint64_t bytes, Address, int) const override {
    Address address = 0;
    if (const Status s = malloc_(&address, bytes)) return s;
    *allocation = {address, bytes, bytes, 0};
    return status::kSuccess;
  }
  Status deallocate(const Allocation& allocation) const override { return free_(allocation.address); }

  Status prepare(const KernelLaunch&) const override { return status::kSuccess; }
  // HIP has no call that tells; the artifact's verifier reads them from the code object instead.
  Status parameter_sizes(Handle, std::vector<size_t>*, bool* known) const override {
    *known = false;
    return status::kSuccess;
  }

  Status add_kernel_node(Handle* node, Handle graph, std::span<const Handle> predecessors, bool,
                         const KernelLaunch& launch) const override {
    const auto& [gx, gy, gz] = launch.grid;
    const auto& [bx, by, bz] = launch.block;
    const KernelNodeParams params{{bx, by, bz},      nullptr,           launch.function,
                                  {gx, gy, gz}, launch.parameters, launch.shared_bytes};
    return add_kernel_(node, graph, predecessors.data(), predecessors.size(), &params);
  }

  Status launch(const KernelLaunch& launch, Handle stream) const override {
    return launch_(launch.function, launch.grid[0], launch.grid[1], launch.grid[2], launch.block[0], launch.block[1],
                   launch.block[2], launch.shared_bytes, stream, launch.parameters, nullptr);
  }

 private:
  void resolve_shared() {
    resolve(call.init, "hipInit");
    resolve(call.driver_version, "hipDriverGetVersion");
    resolve(call.device_count, "hipGetDeviceCount");
    resolve(call.device_name, "hipDeviceGetName");
    resolve(call.device_total_memory, "hipDeviceTotalMem");
    resolve(call.memory_info, "hipMemGetInfo");
    resolve(call.host_register, "hipHostRegister");
    resolve(call.host_unregister, "hipHostUnregister");
    resolve(call.host_address, "hipHostGetDevicePointer");
    resolve(call.copy_to_device, "hipMemcpyHtoDAsync");
    resolve(call.copy_to_host, "hipMemcpyDtoHAsync");
    resolve(call.fill, "hipMemsetD8Async");
    resolve(call.module_load, "hipModuleLoadData");
    resolve(call.module_unload, "hipModuleUnload");
    resolve(call.module_function, "hipModuleGetFunction");
    resolve(call.stream_create, "hipStreamCreateWithFlags");
    resolve(call.stream_destroy, "hipStreamDestroy");
    resolve(call.stream_query, "hipStreamQuery");
    resolve(call.stream_synchronize, "hipStreamSynchronize");
    resolve(call.stream_wait, "hipStreamWaitEvent");
    resolve(call.event_create, "hipEventCreateWithFlags");
    resolve(call.event_destroy, "hipEventDestroy");
    resolve(call.event_record, "hipEventRecord");
    resolve(call.event_query, "hipEventQuery");
    resolve(call.event_synchronize, "hipEventSynchronize");
    resolve(call.event_elapsed, "hipEventElapsedTime");
    resolve(call.graph_create, "hipGraphCreate");
    resolve(call.graph_destroy, "hipGraphDestroy");
    resolve(call.graph_instantiate, "hipGraphInstantiateWithFlags");
    resolve(call.graph_exec_destroy, "hipGraphExecDestroy");
    resolve(call.graph_upload, "hipGraphUpload", true);  // ROCm 5.3
    resolve(call.graph_launch, "hipGraphLaunch");
  }

  const char* (*error_name_)(Status);
  const char* (*error_string_)(Status);
  Status (*properties_)(void* properties, int device);
  Status (*set_device_)(int);
  Status (*malloc_)(Address*, size_t);
  Status (*free_)(Address);
  Status (*add_kernel_)(Handle* node, Handle graph, const Handle* predecessors, size_t count, const KernelNodeParams*);
  Status (*launch_)(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                    unsigned shared_bytes, Handle stream, void** params, void** extra);
};

}  // namespace

std::shared_ptr<Driver> make_hip_driver(std::string library, void* handle) {
  return std::make_shared<HipDriver>(std::move(library), handle);
}

}  // namespace tokenspeed::device::gpu
