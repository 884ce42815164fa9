// The part of CUDA's driver interface that the device uses, declared here so that no vendor header is needed.
// tests/cpp/test_gpu_abi.cpp compares it with cuda.h where that is installed.
#pragma once

#include <memory>
#include <string>

#include "device/gpu/driver.h"

namespace tokenspeed::device::gpu {

namespace cuda {

inline constexpr int kAttributeMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
inline constexpr int kAttributeMinor = 76;
inline constexpr int kAttributeMaxSharedOptin = 97;
inline constexpr int kFunctionMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
inline constexpr int kFunctionNonPortableCluster = 14;
inline constexpr int kNodeTypeKernel = 0;
inline constexpr int kLaunchAttributeCluster = 4;
inline constexpr int kAllocationPinned = 1;
inline constexpr int kLocationDevice = 1;
inline constexpr int kAccessReadWrite = 3;
inline constexpr int kGranularityRecommended = 1;

struct MemLocation {  // CUmemLocation
  int type, id;
};
struct MemAllocationProp {  // CUmemAllocationProp
  int type, requested_handle_types;
  MemLocation location;
  void* win32_handle_metadata;
  struct {
    unsigned char compression_type, gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } alloc_flags;
};
struct MemAccessDesc {  // CUmemAccessDesc
  MemLocation location;
  int flags;
};
struct KernelNodeParams {  // CUDA_KERNEL_NODE_PARAMS_v2, and _v3
  Handle func;
  unsigned grid[3], block[3], shared_bytes;
  void** kernel_params;
  void** extra;
  Handle kern, ctx;
};
struct GraphNodeParams {  // CUgraphNodeParams
  int type, reserved0[3];
  union {
    long long reserved1[29];
    KernelNodeParams kernel;
  };
  long long reserved2;
};
struct GraphEdgeData {  // CUgraphEdgeData
  unsigned char from_port, to_port, type, reserved[5];
};
union LaunchAttributeValue {  // CUlaunchAttributeValue
  char pad[64];
  unsigned cluster[3];
};
struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  char pad[4];
  LaunchAttributeValue value;
};
struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  Handle stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
inline constexpr GraphEdgeData kProgrammaticEdge = {1, 0, 1, {}};  // CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC

}  // namespace cuda

std::shared_ptr<Driver> make_cuda_driver(std::string library, void* handle);

}  // namespace tokenspeed::device::gpu
