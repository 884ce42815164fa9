// What every launcher here has in common: one C signature, and parameters without chance bytes.
//
// A launcher is called at build, under stream capture, with addresses that stand for places (compile/capture.py).
// It may pass them on and add to them; it must not read memory through them, nor let what it launches depend on them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <new>
#include <string>

// Returns null, or what went wrong. `pointers`, `integers` and `floats` are the arguments of each kind in the order
// in which the launcher's KernelSpec names them.
#define TOKENSPEED_LAUNCHER(name)                                                                            \
  extern "C" __attribute__((visibility("default"))) const char* name(                                        \
      cudaStream_t stream, void* const* pointers, const int64_t* integers, const double* floats)

namespace tokenspeed {

// Runs `launch`, which returns a cudaError_t or throws, and turns a failure into text that lives until the next one.
template <typename Launch>
const char* report(Launch launch) {
  static std::string text;
  try {
    const cudaError_t code = launch();
    if (code == cudaSuccess) return nullptr;
    text = cudaGetErrorString(code);
  } catch (const std::exception& error) {
    text = error.what();
  }
  return text.c_str();
}

}  // namespace tokenspeed

// Called before any capture: the runtime starts, and with CUDA_MODULE_LOADING=EAGER loads all kernels of this file,
// which it may not be able to do while a stream is captured.
extern "C" __attribute__((visibility("default"))) const char* tokenspeed_launcher_prepare() {
  return tokenspeed::report([] { return cudaFree(nullptr); });
}

namespace tokenspeed {

// A struct whose padding is zero: two captures must agree in every byte that is no address.
// Compiled with -fno-lifetime-dse: otherwise the compiler may drop the zeros as stores before the object's life.
template <typename Struct>
class Zeroed {
 public:
  Zeroed() : value_(new (bytes_) Struct()) {}
  Zeroed(const Zeroed&) = delete;
  Zeroed& operator=(const Zeroed&) = delete;
  Struct* operator->() { return value_; }
  Struct& operator*() { return *value_; }

 private:
  alignas(Struct) unsigned char bytes_[sizeof(Struct)] = {};
  Struct* value_;
};

}  // namespace tokenspeed
