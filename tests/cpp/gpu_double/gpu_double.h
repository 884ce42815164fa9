// A GPU driver for tests: device memory is host memory, kernels are host functions, and every call is logged. It is
// built once with CUDA's entry points and once with HIP's.
//
// Work is done late: a stream's work waits until somebody asks for it. A query does one piece, a synchronize all up to
// its event, each with what that waits for in other streams. So a step really is in flight until it was waited for, and
// order is what the caller made it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/gpu/driver.h"

// What a test tells the driver. Resolve these with dlsym from the library that the device was given.
extern "C" {
// Forgets the log, failures, kernels and settings. No device may be open.
void double_reset();
// The calls so far, one a line: "name key=value ...", with small numbers for handles. Valid until the next call.
const char* double_log();
// Lets call number `nth` from here on (1: the next) of an entry fail with `code`. A code that real drivers repeat is
// given for every call after it too.
void double_fail(const char* entry, int nth, int code);
// Lets kernels of this name call `run` with the addresses of their parameters, whose bytes `sizes` says. A kernel that
// is not registered does nothing, and its parameters are not known.
void double_kernel(const char* symbol, void (*run)(void** parameters), const size_t* sizes, size_t count);
// The one device there is; `arch` as the driver has it, such as "9.0" or "gfx950:sramecc+:xnack-".
void double_device(const char* arch, int driver_version, uint64_t memory_bytes);
// While true no work is done: what was submitted hangs.
void double_hang(bool hangs);
// Does the next piece of work of the stream with this number (as in the log) and of no other. False if there is none,
// or if it waits for another stream. Having waited is a piece of its own.
bool double_work(int stream);
}

namespace gpu_double {

using tokenspeed::device::gpu::Address;
using tokenspeed::device::gpu::Handle;
using tokenspeed::device::gpu::KernelLaunch;
using tokenspeed::device::gpu::Status;

// One call of an entry point: logs it, and says how it must fail. `format` is printf's.
class Call {
 public:
  [[gnu::format(printf, 3, 4)]] Call(const char* entry, const char* format, ...);
  bool fails() const { return code_ != 0; }
  Status code() const { return code_; }

 private:
  Status code_ = 0;
};

struct Settings {
  char arch[64];
  int driver_version;
  uint64_t memory_bytes;
};
Settings settings();

Status memory_info(size_t* free, size_t* total);
Status take(uint64_t bytes);  // of the device's memory; out of memory when there is too little
void give(uint64_t bytes);
Status module_load(Handle* module, const void* image, uint16_t machine);
Status module_unload(Handle module);
Status module_function(Handle* function, Handle module, const char* symbol);
Status parameter_info(Handle function, size_t index, size_t* offset, size_t* size);
Status stream_create(Handle* stream);
Status stream_destroy(Handle stream);
Status stream_query(Handle stream);
Status stream_synchronize(Handle stream);
Status stream_wait(Handle stream, Handle event);
Status event_create(Handle* event, unsigned flags);
Status event_destroy(Handle event);
Status event_record(Handle event, Handle stream);
Status event_query(Handle event);
Status event_synchronize(Handle event);
Status event_elapsed(float* milliseconds, Handle start, Handle end);
Status copy(const char* entry, void* to, const void* from, size_t bytes, Handle stream);
Status fill(void* to, unsigned char value, size_t bytes, Handle stream);
Status graph_create(Handle* graph);
Status graph_destroy(Handle graph);
Status add_kernel(Handle* node, Handle graph, const Handle* predecessors, size_t count, bool programmatic,
                  const KernelLaunch& launch);
Status set_cluster(Handle node, const unsigned cluster[3]);
Status graph_instantiate(Handle* exec, Handle graph);
Status graph_exec_destroy(Handle exec);
Status graph_upload(Handle exec, Handle stream);
Status graph_launch(Handle exec, Handle stream);
Status launch(const KernelLaunch& launch, Handle stream);
Status host_register(void* memory, size_t bytes, unsigned flags);
Status host_unregister(void* memory);
Status host_address(Address* address, void* memory, unsigned flags);

}  // namespace gpu_double
