// The part of AMD's HIP interface that the device uses, declared here so that no vendor header is needed.
// tests/cpp/test_gpu_abi.cpp compares it with AMD's headers where they are installed.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "device/gpu/driver.h"

namespace tokenspeed::device::gpu {

namespace hip {

struct Dim3 {  // dim3
  uint32_t x, y, z;
};
struct KernelNodeParams {  // hipKernelNodeParams
  Dim3 block;
  void** extra;
  Handle func;
  Dim3 grid;
  void** kernel_params;
  unsigned shared_bytes;
};

// Bytes that hold hipDeviceProp_t of any version so far, with room to spare.
inline constexpr size_t kPropertiesBytes = 16384;
inline constexpr size_t kPropertiesNameBytes = 256;
inline constexpr uint32_t kMaxSharedBytes = 160 << 10;  // of local data share: gfx950; the driver checks its own

// The name of the architecture in a hipDeviceProp_t. Its place differs from version to version, but it is the only
// text behind the device's name that begins with "gfx". Features (":sramecc+") are cut off. Empty if there is none.
std::string architecture_of(std::string_view properties);

}  // namespace hip

std::shared_ptr<Driver> make_hip_driver(std::string library, void* handle);

}  // namespace tokenspeed::device::gpu
