// HIP's entry points of the driver for tests.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "device/gpu/hip_api.h"
#include "gpu_double.h"

using namespace gpu_double;
using namespace tokenspeed::device::gpu::hip;
namespace status = tokenspeed::device::gpu::status;

namespace {

constexpr uint16_t kMachine = 224;
constexpr size_t kArchitectureAt = 1160;  // anywhere behind the name

std::mutex sizes_mutex;
std::map<Address, size_t> sizes;  // of what hipMalloc gave

}  // namespace

extern "C" {

Status hipInit(unsigned flags) { return Call("init", "flags=%u", flags).code(); }
Status hipDriverGetVersion(int* version) {
  *version = settings().driver_version;
  return status::kSuccess;
}
const char* hipGetErrorName(Status code) {
  return code == status::kLaunchFailed ? "hipErrorLaunchFailure" : "hipErrorUnknown";
}
const char* hipGetErrorString(Status) { return "as the test wished"; }
Status hipGetDeviceCount(int* count) {
  *count = settings().arch[0] != '\0' ? 1 : 0;
  return Call("device_count", "%s", "").code();
}
Status hipDeviceGetName(char* name, int length, int) {
  std::snprintf(name, static_cast<size_t>(length), "%s", "Double H1");
  return status::kSuccess;
}
Status hipDeviceTotalMem(size_t* bytes, int) {
  *bytes = settings().memory_bytes;
  return status::kSuccess;
}
Status hipGetDevicePropertiesR0600(void* properties, int) {
  std::snprintf(static_cast<char*>(properties), kPropertiesNameBytes, "%s", "a gfx card");
  std::memcpy(static_cast<char*>(properties) + kArchitectureAt, settings().arch, sizeof(Settings::arch));
  return status::kSuccess;
}
Status hipSetDevice(int) { return Call("context_current", "%s", "").code(); }

Status hipMemGetInfo(size_t* free, size_t* total) { return memory_info(free, total); }
Status hipMalloc(Address* address, size_t bytes) {
  if (const Call call("create", "bytes=%zu", bytes); call.fails()) return call.code();
  if (const Status s = take(bytes)) return s;
  void* memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (memory == nullptr) return status::kOutOfMemory;
  std::memset(memory, 0xa5, bytes);  // memory comes as it is
  *address = reinterpret_cast<Address>(memory);
  const std::lock_guard lock(sizes_mutex);
  sizes[*address] = bytes;
  return status::kSuccess;
}
Status hipFree(Address address) {
  const Call call("release", "%s", "");
  const std::lock_guard lock(sizes_mutex);
  give(sizes[address]);
  sizes.erase(address);
  std::free(reinterpret_cast<void*>(address));
  return call.code();
}
Status hipHostRegister(void* memory, size_t bytes, unsigned flags) { return host_register(memory, bytes, flags); }
Status hipHostUnregister(void* memory) { return host_unregister(memory); }
Status hipHostGetDevicePointer(Address* address, void* memory, unsigned flags) {
  return host_address(address, memory, flags);
}
Status hipMemcpyHtoDAsync(Address to, const void* from, size_t bytes, Handle stream) {
  return copy("copy_to_device", reinterpret_cast<void*>(to), from, bytes, stream);
}
Status hipMemcpyDtoHAsync(void* to, Address from, size_t bytes, Handle stream) {
  return copy("copy_to_host", to, reinterpret_cast<void*>(from), bytes, stream);
}
Status hipMemsetD8Async(Address to, unsigned char value, size_t bytes, Handle stream) {
  return fill(reinterpret_cast<void*>(to), value, bytes, stream);
}

Status hipModuleLoadData(Handle* module, const void* image) { return module_load(module, image, kMachine); }
Status hipModuleUnload(Handle module) { return module_unload(module); }
Status hipModuleGetFunction(Handle* function, Handle module, const char* symbol) {
  return module_function(function, module, symbol);
}

Status hipStreamCreateWithFlags(Handle* stream, unsigned) { return stream_create(stream); }
Status hipStreamDestroy(Handle stream) { return stream_destroy(stream); }
Status hipStreamQuery(Handle stream) { return stream_query(stream); }
Status hipStreamSynchronize(Handle stream) { return stream_synchronize(stream); }
Status hipStreamWaitEvent(Handle stream, Handle event, unsigned) { return stream_wait(stream, event); }
Status hipEventCreateWithFlags(Handle* event, unsigned flags) { return event_create(event, flags); }
Status hipEventDestroy(Handle event) { return event_destroy(event); }
Status hipEventRecord(Handle event, Handle stream) { return event_record(event, stream); }
Status hipEventQuery(Handle event) { return event_query(event); }
Status hipEventSynchronize(Handle event) { return event_synchronize(event); }
Status hipEventElapsedTime(float* milliseconds, Handle start, Handle end) {
  return event_elapsed(milliseconds, start, end);
}

Status hipGraphCreate(Handle* graph, unsigned) { return graph_create(graph); }
Status hipGraphDestroy(Handle graph) { return graph_destroy(graph); }
Status hipGraphAddKernelNode(Handle* node, Handle graph, const Handle* predecessors, size_t count,
                             const KernelNodeParams* k) {
  return add_kernel(node, graph, predecessors, count, false,
                    {k->func, {k->grid.x, k->grid.y, k->grid.z}, {k->block.x, k->block.y, k->block.z}, {1, 1, 1},
                     k->shared_bytes, k->kernel_params});
}
Status hipGraphInstantiateWithFlags(Handle* exec, Handle graph, unsigned long long) {
  return graph_instantiate(exec, graph);
}
Status hipGraphExecDestroy(Handle exec) { return graph_exec_destroy(exec); }
Status hipGraphLaunch(Handle exec, Handle stream) { return graph_launch(exec, stream); }
Status hipModuleLaunchKernel(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                             unsigned bz, unsigned shared, Handle stream, void** params, void**) {
  return launch({function, {gx, gy, gz}, {bx, by, bz}, {1, 1, 1}, shared, params}, stream);
}

}  // extern "C"
