// CUDA's entry points of the driver for tests.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "device/gpu/cuda_api.h"
#include "gpu_double.h"

using namespace gpu_double;
using namespace tokenspeed::device::gpu::cuda;
namespace status = tokenspeed::device::gpu::status;

namespace {

constexpr size_t kGranularity = size_t{2} << 20;
constexpr uint16_t kMachine = 190;

// Attributes of functions, by function and attribute.
std::mutex attributes_mutex;
std::map<std::pair<Handle, int>, int> attributes;

KernelLaunch launch_of(Handle function, const unsigned grid[3], const unsigned block[3], unsigned shared,
                       void** params) {
  return {function, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, {1, 1, 1}, shared, params};
}

}  // namespace

extern "C" {

Status cuInit(unsigned flags) { return Call("init", "flags=%u", flags).code(); }
Status cuDriverGetVersion(int* version) {
  *version = settings().driver_version;
  return status::kSuccess;
}
Status cuGetErrorName(Status code, const char** name) {
  *name = code == status::kLaunchFailed ? "CUDA_ERROR_LAUNCH_FAILED" : nullptr;
  return *name != nullptr ? status::kSuccess : status::kInvalidValue;
}
Status cuGetErrorString(Status, const char** text) {
  *text = "as the test wished";
  return status::kSuccess;
}
Status cuDeviceGetCount(int* count) {
  *count = settings().arch[0] != '\0' ? 1 : 0;
  return Call("device_count", "%s", "").code();
}
Status cuDeviceGetName(char* name, int length, int) {
  std::snprintf(name, static_cast<size_t>(length), "%s", "Double C1");
  return status::kSuccess;
}
Status cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = settings().memory_bytes;
  return status::kSuccess;
}
Status cuDeviceGetAttribute(int* value, int attribute, int) {
  int major = 0, minor = 0;
  std::sscanf(settings().arch, "%d.%d", &major, &minor);
  *value = attribute == kAttributeMajor ? major : attribute == kAttributeMinor ? minor : 227 << 10;
  return status::kSuccess;
}
Status cuDevicePrimaryCtxRetain(Handle* context, int device) {
  *context = &attributes;  // any address
  return Call("context_retain", "device=%d", device).code();
}
Status cuDevicePrimaryCtxRelease_v2(int device) { return Call("context_release", "device=%d", device).code(); }
Status cuCtxSetCurrent(Handle) { return Call("context_current", "%s", "").code(); }

Status cuMemGetInfo_v2(size_t* free, size_t* total) { return memory_info(free, total); }
Status cuMemGetAllocationGranularity(size_t* bytes, const MemAllocationProp*, int) {
  *bytes = kGranularity;
  return status::kSuccess;
}
Status cuMemAddressReserve(Address* address, size_t bytes, size_t, Address hint, unsigned long long) {
  if (const Call call("reserve", "bytes=%zu hint=%llx", bytes, static_cast<unsigned long long>(hint)); call.fails()) {
    return call.code();
  }
  void* at = mmap(reinterpret_cast<void*>(hint), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *address = reinterpret_cast<Address>(at);
  return at == MAP_FAILED ? status::kOutOfMemory : status::kSuccess;
}
Status cuMemAddressFree(Address address, size_t bytes) {
  const Call call("free_addresses", "bytes=%zu", bytes);
  munmap(reinterpret_cast<void*>(address), bytes);
  return call.code();
}
Status cuMemCreate(uint64_t* memory, size_t bytes, const MemAllocationProp* p, unsigned long long) {
  if (const Call call("create", "bytes=%zu type=%d location=%d:%d", bytes, p->type, p->location.type, p->location.id);
      call.fails()) {
    return call.code();
  }
  *memory = bytes;
  return bytes % kGranularity != 0 ? status::kInvalidValue : take(bytes);
}
Status cuMemRelease(uint64_t memory) {
  const Call call("release", "bytes=%llu", static_cast<unsigned long long>(memory));
  give(memory);
  return call.code();
}
Status cuMemMap(Address, size_t bytes, size_t, uint64_t memory, unsigned long long) {
  if (const Call call("map", "bytes=%zu", bytes); call.fails()) return call.code();
  return memory == bytes ? status::kSuccess : status::kInvalidValue;
}
Status cuMemUnmap(Address address, size_t bytes) {
  const Call call("unmap", "bytes=%zu", bytes);
  mprotect(reinterpret_cast<void*>(address), bytes, PROT_NONE);
  return call.code();
}
Status cuMemSetAccess(Address address, size_t bytes, const MemAccessDesc* access, size_t) {
  if (const Call call("set_access", "bytes=%zu flags=%d", bytes, access->flags); call.fails()) return call.code();
  mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE);
  std::memset(reinterpret_cast<void*>(address), 0xa5, std::min<size_t>(bytes, 1 << 16));  // memory comes as it is
  return status::kSuccess;
}
Status cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) { return host_register(memory, bytes, flags); }
Status cuMemHostUnregister(void* memory) { return host_unregister(memory); }
Status cuMemHostGetDevicePointer_v2(Address* address, void* memory, unsigned flags) {
  return host_address(address, memory, flags);
}
Status cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, Handle stream) {
  return copy("copy_to_device", reinterpret_cast<void*>(to), from, bytes, stream);
}
Status cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Handle stream) {
  return copy("copy_to_host", to, reinterpret_cast<void*>(from), bytes, stream);
}
Status cuMemsetD8Async(Address to, unsigned char value, size_t bytes, Handle stream) {
  return fill(reinterpret_cast<void*>(to), value, bytes, stream);
}

Status cuModuleLoadData(Handle* module, const void* image) { return module_load(module, image, kMachine); }
Status cuModuleUnload(Handle module) { return module_unload(module); }
Status cuModuleGetFunction(Handle* function, Handle module, const char* symbol) {
  return module_function(function, module, symbol);
}
Status cuFuncLoad(Handle) { return Call("function_load", "%s", "").code(); }
Status cuFuncGetParamInfo(Handle function, size_t index, size_t* offset, size_t* size) {
  return parameter_info(function, index, offset, size);
}
Status cuFuncGetAttribute(int* value, int attribute, Handle function) {
  const std::lock_guard lock(attributes_mutex);
  *value = attributes[{function, attribute}];
  return status::kSuccess;
}
Status cuFuncSetAttribute(Handle function, int attribute, int value) {
  if (const Call call("function_set", "attribute=%d value=%d", attribute, value); call.fails()) return call.code();
  const std::lock_guard lock(attributes_mutex);
  attributes[{function, attribute}] = value;
  return status::kSuccess;
}

Status cuStreamCreate(Handle* stream, unsigned) { return stream_create(stream); }
Status cuStreamDestroy_v2(Handle stream) { return stream_destroy(stream); }
Status cuStreamQuery(Handle stream) { return stream_query(stream); }
Status cuStreamSynchronize(Handle stream) { return stream_synchronize(stream); }
Status cuStreamWaitEvent(Handle stream, Handle event, unsigned) { return stream_wait(stream, event); }
Status cuEventCreate(Handle* event, unsigned flags) { return event_create(event, flags); }
Status cuEventDestroy_v2(Handle event) { return event_destroy(event); }
Status cuEventRecord(Handle event, Handle stream) { return event_record(event, stream); }
Status cuEventQuery(Handle event) { return event_query(event); }
Status cuEventSynchronize(Handle event) { return event_synchronize(event); }
Status cuEventElapsedTime(float* milliseconds, Handle start, Handle end) {
  return event_elapsed(milliseconds, start, end);
}

Status cuGraphCreate(Handle* graph, unsigned) { return graph_create(graph); }
Status cuGraphDestroy(Handle graph) { return graph_destroy(graph); }
Status cuGraphAddKernelNode_v2(Handle* node, Handle graph, const Handle* predecessors, size_t count,
                               const KernelNodeParams* k) {
  return add_kernel(node, graph, predecessors, count, false,
                    launch_of(k->func, k->grid, k->block, k->shared_bytes, k->kernel_params));
}
Status cuGraphAddNode_v2(Handle* node, Handle graph, const Handle* predecessors, const GraphEdgeData* edges,
                         size_t count, GraphNodeParams* params) {
  const KernelNodeParams& k = params->kernel;
  bool programmatic = params->type == kNodeTypeKernel && params->reserved2 == 0;
  for (size_t i = 0; i < count; ++i) programmatic = programmatic && edges[i].from_port == 1 && edges[i].type == 1;
  if (!programmatic) return status::kInvalidValue;  // the device has no other use for it
  return add_kernel(node, graph, predecessors, count, true,
                    launch_of(k.func, k.grid, k.block, k.shared_bytes, k.kernel_params));
}
Status cuGraphKernelNodeSetAttribute(Handle node, int attribute, const LaunchAttributeValue* value) {
  return attribute == kLaunchAttributeCluster ? set_cluster(node, value->cluster) : status::kInvalidValue;
}
Status cuGraphInstantiateWithFlags(Handle* exec, Handle graph, unsigned long long) {
  return graph_instantiate(exec, graph);
}
Status cuGraphExecDestroy(Handle exec) { return graph_exec_destroy(exec); }
Status cuGraphUpload(Handle exec, Handle stream) { return graph_upload(exec, stream); }
Status cuGraphLaunch(Handle exec, Handle stream) { return graph_launch(exec, stream); }
Status cuLaunchKernelEx(const LaunchConfig* config, Handle function, void** params, void**) {
  return launch(launch_of(function, config->grid, config->block, config->shared_bytes, params), config->stream);
}

}  // extern "C"
