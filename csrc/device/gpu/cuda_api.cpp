#include "device/gpu/cuda_api.h"

#include <algorithm>

namespace tokenspeed::device::gpu {
namespace {

using namespace cuda;

constexpr uint32_t kPlainSharedBytes = 48 << 10;  // more must be asked for, kernel by kernel
constexpr uint32_t kPortableCluster = 8;          // thread blocks; likewise

uint32_t product(const std::array<uint32_t, 3>& n) noexcept { return n[0] * n[1] * n[2]; }

class CudaDriver final : public Driver {
 public:
  CudaDriver(std::string library, void* handle) : Driver(std::move(library), handle) {
    resolve_shared();
    resolve(error_name_, "cuGetErrorName");
    resolve(error_string_, "cuGetErrorString");
    resolve(device_attribute_, "cuDeviceGetAttribute");
    resolve(context_retain_, "cuDevicePrimaryCtxRetain");
    resolve(context_release_, "cuDevicePrimaryCtxRelease_v2");
    resolve(context_current_, "cuCtxSetCurrent");
    resolve(granularity_, "cuMemGetAllocationGranularity");
    resolve(reserve_, "cuMemAddressReserve");
    resolve(free_addresses_, "cuMemAddressFree");
    resolve(create_, "cuMemCreate");
    resolve(release_memory_, "cuMemRelease");
    resolve(map_, "cuMemMap");
    resolve(unmap_, "cuMemUnmap");
    resolve(set_access_, "cuMemSetAccess");
    resolve(function_get_, "cuFuncGetAttribute");
    resolve(function_set_, "cuFuncSetAttribute");
    resolve(function_load_, "cuFuncLoad", true);                // CUDA 12.4
    resolve(parameter_info_, "cuFuncGetParamInfo", true);       // CUDA 12.4
    resolve(add_kernel_, "cuGraphAddKernelNode_v2");            // CUDA 12.0
    resolve(add_node_, "cuGraphAddNode_v2", true);              // CUDA 12.3: edges with data
    resolve(node_attribute_, "cuGraphKernelNodeSetAttribute");
    resolve(launch_, "cuLaunchKernelEx");                       // CUDA 11.8
  }

  Backend backend() const noexcept override { return Backend::Cuda; }
  uint16_t elf_machine() const noexcept override { return 190; }  // EM_CUDA
  bool has_programmatic_edges() const noexcept override { return add_node_ != nullptr; }
  bool has_clusters() const noexcept override { return true; }

  std::string describe(Status code) const override {
    const char *name = nullptr, *text = nullptr;
    error_name_(code, &name);
    error_string_(code, &text);
    return std::string(name != nullptr ? name : "CUDA error") + " (" + std::to_string(code) + ")" +
           (text != nullptr ? std::string(": ") + text : "");
  }

  Status architecture(std::string* arch, int device) const override {
    int major = 0, minor = 0;
    if (const Status s = device_attribute_(&major, kAttributeMajor, device)) return s;
    if (const Status s = device_attribute_(&minor, kAttributeMinor, device)) return s;
    *arch = "sm_" + std::to_string(major) + std::to_string(minor);
    return status::kSuccess;
  }
  Status max_shared_bytes(int* bytes, int device) const override {
    return device_attribute_(bytes, kAttributeMaxSharedOptin, device);
  }

  // Ordinals are devices: the handle that cuDeviceGet gives is the ordinal itself.
  Status open(Handle* context, int device) const override {
    if (const Status s = context_retain_(context, device)) return s;
    return context_current_(*context);
  }
  Status make_current(Handle context) const override { return context_current_(context); }
  Status release(Handle, int device) const override { return context_release_(device); }

  Status allocate(Allocation* allocation, uint64_t bytes, Address hint, int device) const override {
    const MemLocation location{kLocationDevice, device};
    const MemAllocationProp properties{kAllocationPinned, 0, location, nullptr, {}};
    const MemAccessDesc access{location, kAccessReadWrite};
    size_t granularity = 0;
    if (const Status s = granularity_(&granularity, &properties, kGranularityRecommended)) return s;
    Allocation a{0, bytes, (bytes + granularity - 1) / granularity * granularity, 0};
    if (const Status s = create_(&a.memory, a.mapped, &properties, 0)) return s;
    Status s = reserve_(&a.address, a.mapped, 0, hint, 0);
    if (s != status::kSuccess) {
      release_memory_(a.memory);
      return s;
    }
    s = map_(a.address, a.mapped, 0, a.memory, 0);
    if (s == status::kSuccess) {
      s = set_access_(a.address, a.mapped, &access, 1);
      if (s != status::kSuccess) unmap_(a.address, a.mapped);
    }
    if (s == status::kSuccess) {
      *allocation = a;
    } else {
      free_addresses_(a.address, a.mapped);
      release_memory_(a.memory);
    }
    return s;
  }

  Status deallocate(const Allocation& a) const override {
    const Status unmapped = unmap_(a.address, a.mapped), freed = free_addresses_(a.address, a.mapped),
                 released = release_memory_(a.memory);
    return unmapped ? unmapped : freed ? freed : released;
  }

  Status prepare(const KernelLaunch& launch) const override {
    if (function_load_ != nullptr) {
      if (const Status s = function_load_(launch.function)) return s;
    }
    if (product(launch.cluster) > kPortableCluster) {
      if (const Status s = function_set_(launch.function, kFunctionNonPortableCluster, 1)) return s;
    }
    if (launch.shared_bytes <= kPlainSharedBytes) return status::kSuccess;
    // Several graphs share a function: its allowance only grows.
    int allowed = 0;
    if (const Status s = function_get_(&allowed, kFunctionMaxDynamicShared, launch.function)) return s;
    const auto wanted = static_cast<int>(launch.shared_bytes);
    return wanted > allowed ? function_set_(launch.function, kFunctionMaxDynamicShared, wanted) : status::kSuccess;
  }

  Status parameter_sizes(Handle function, std::vector<size_t>* sizes, bool* known) const override {
    *known = parameter_info_ != nullptr;
    size_t offset = 0, size = 0;
    sizes->clear();
    while (*known) {  // it ends with an error at the first index that there is not
      const Status s = parameter_info_(function, sizes->size(), &offset, &size);
      if (s == status::kInvalidValue) break;
      if (s == status::kNotSupported) {
        *known = false;
        break;
      }
      if (s != status::kSuccess) return s;
      sizes->push_back(size);
    }
    return status::kSuccess;
  }

  Status add_kernel_node(Handle* node, Handle graph, std::span<const Handle> predecessors, bool programmatic,
                         const KernelLaunch& launch) const override {
    GraphNodeParams params{};
    params.type = kNodeTypeKernel;
    KernelNodeParams& k = params.kernel;
    k.func = launch.function;
    std::copy(launch.grid.begin(), launch.grid.end(), k.grid);
    std::copy(launch.block.begin(), launch.block.end(), k.block);
    k.shared_bytes = launch.shared_bytes;
    k.kernel_params = launch.parameters;
    const Status s = programmatic && predecessors.size() == 1
                         ? add_node_(node, graph, predecessors.data(), &kProgrammaticEdge, 1, &params)
                         : add_kernel_(node, graph, predecessors.data(), predecessors.size(), &k);
    if (s != status::kSuccess || product(launch.cluster) == 1) return s;
    LaunchAttributeValue value{};
    std::copy(launch.cluster.begin(), launch.cluster.end(), value.cluster);
    return node_attribute_(*node, kLaunchAttributeCluster, &value);
  }

  Status launch(const KernelLaunch& launch, Handle stream) const override {
    LaunchAttribute cluster{};
    cluster.id = kLaunchAttributeCluster;
    std::copy(launch.cluster.begin(), launch.cluster.end(), cluster.value.cluster);
    LaunchConfig config{};
    std::copy(launch.grid.begin(), launch.grid.end(), config.grid);
    std::copy(launch.block.begin(), launch.block.end(), config.block);
    config.shared_bytes = launch.shared_bytes;
    config.stream = stream;
    config.attributes = &cluster;
    config.num_attributes = product(launch.cluster) > 1 ? 1 : 0;
    return launch_(&config, launch.function, launch.parameters, nullptr);
  }

 private:
  void resolve_shared() {
    resolve(call.init, "cuInit");
    resolve(call.driver_version, "cuDriverGetVersion");
    resolve(call.device_count, "cuDeviceGetCount");
    resolve(call.device_name, "cuDeviceGetName");
    resolve(call.device_total_memory, "cuDeviceTotalMem_v2");
    resolve(call.memory_info, "cuMemGetInfo_v2");
    resolve(call.host_register, "cuMemHostRegister_v2");
    resolve(call.host_unregister, "cuMemHostUnregister");
    resolve(call.host_address, "cuMemHostGetDevicePointer_v2");
    resolve(call.copy_to_device, "cuMemcpyHtoDAsync_v2");
    resolve(call.copy_to_host, "cuMemcpyDtoHAsync_v2");
    resolve(call.fill, "cuMemsetD8Async");
    resolve(call.module_load, "cuModuleLoadData");
    resolve(call.module_unload, "cuModuleUnload");
    resolve(call.module_function, "cuModuleGetFunction");
    resolve(call.stream_create, "cuStreamCreate");
    resolve(call.stream_destroy, "cuStreamDestroy_v2");
    resolve(call.stream_query, "cuStreamQuery");
    resolve(call.stream_synchronize, "cuStreamSynchronize");
    resolve(call.stream_wait, "cuStreamWaitEvent");
    resolve(call.event_create, "cuEventCreate");
    resolve(call.event_destroy, "cuEventDestroy_v2");
    resolve(call.event_record, "cuEventRecord");
    resolve(call.event_query, "cuEventQuery");
    resolve(call.event_synchronize, "cuEventSynchronize");
    resolve(call.event_elapsed, "cuEventElapsedTime");
    resolve(call.graph_create, "cuGraphCreate");
    resolve(call.graph_destroy, "cuGraphDestroy");
    resolve(call.graph_instantiate, "cuGraphInstantiateWithFlags");
    resolve(call.graph_exec_destroy, "cuGraphExecDestroy");
    resolve(call.graph_upload, "cuGraphUpload");
    resolve(call.graph_launch, "cuGraphLaunch");
  }

  Status (*error_name_)(Status, const char**);
  Status (*error_string_)(Status, const char**);
  Status (*device_attribute_)(int*, int attribute, int device);
  Status (*context_retain_)(Handle*, int device);
  Status (*context_release_)(int device);
  Status (*context_current_)(Handle);
  Status (*granularity_)(size_t*, const MemAllocationProp*, int option);
  Status (*reserve_)(Address*, size_t bytes, size_t alignment, Address hint, unsigned long long flags);
  Status (*free_addresses_)(Address, size_t);
  Status (*create_)(uint64_t* memory, size_t bytes, const MemAllocationProp*, unsigned long long flags);
  Status (*release_memory_)(uint64_t memory);
  Status (*map_)(Address, size_t bytes, size_t offset, uint64_t memory, unsigned long long flags);
  Status (*unmap_)(Address, size_t);
  Status (*set_access_)(Address, size_t, const MemAccessDesc*, size_t count);
  Status (*function_get_)(int* value, int attribute, Handle function);
  Status (*function_set_)(Handle function, int attribute, int value);
  Status (*function_load_)(Handle function);
  Status (*parameter_info_)(Handle function, size_t index, size_t* offset, size_t* size);
  Status (*add_kernel_)(Handle* node, Handle graph, const Handle* predecessors, size_t count, const KernelNodeParams*);
  Status (*add_node_)(Handle* node, Handle graph, const Handle* predecessors, const GraphEdgeData*, size_t count,
                      GraphNodeParams*);
  Status (*node_attribute_)(Handle node, int attribute, const LaunchAttributeValue*);
  Status (*launch_)(const LaunchConfig*, Handle function, void** params, void** extra);
};

}  // namespace

std::shared_ptr<Driver> make_cuda_driver(std::string library, void* handle) {
  return std::make_shared<CudaDriver>(std::move(library), handle);
}

}  // namespace tokenspeed::device::gpu
