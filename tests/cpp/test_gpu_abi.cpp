// Our declarations of the drivers' structures against the vendors' own headers, where those are installed. A separate
// program: the vendors' names would get in the way elsewhere.
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

#include "device/gpu/cuda_api.h"
#include "device/gpu/hip_api.h"
#include "test.h"

#ifdef HAVE_HIP_HEADERS
#define __HIP_PLATFORM_AMD__ 1
#define __HIP_PLATFORM_HCC__ 1
#include <hip/hip_runtime_api.h>
#endif
#ifdef HAVE_CUDA_HEADERS
#include <cuda.h>
#endif

namespace gpu = tokenspeed::device::gpu;
namespace status = gpu::status;

#define SAME_FIELD(ours, our_field, theirs, their_field)                       \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field) && \
                sizeof(ours::our_field) == sizeof(theirs::their_field))

#ifdef HAVE_HIP_HEADERS
namespace {

using HipKernel = gpu::hip::KernelNodeParams;
static_assert(sizeof(HipKernel) == sizeof(hipKernelNodeParams) && alignof(HipKernel) == alignof(hipKernelNodeParams));
SAME_FIELD(HipKernel, block, hipKernelNodeParams, blockDim);
SAME_FIELD(HipKernel, extra, hipKernelNodeParams, extra);
SAME_FIELD(HipKernel, func, hipKernelNodeParams, func);
SAME_FIELD(HipKernel, grid, hipKernelNodeParams, gridDim);
SAME_FIELD(HipKernel, kernel_params, hipKernelNodeParams, kernelParams);
SAME_FIELD(HipKernel, shared_bytes, hipKernelNodeParams, sharedMemBytes);
SAME_FIELD(gpu::hip::Dim3, y, dim3, y);
SAME_FIELD(gpu::hip::Dim3, z, dim3, z);

static_assert(sizeof(hipDeviceProp_t) <= gpu::hip::kPropertiesBytes);
static_assert(sizeof(hipDeviceProp_t::name) == gpu::hip::kPropertiesNameBytes && offsetof(hipDeviceProp_t, name) == 0);
static_assert(sizeof(hipDeviceptr_t) == sizeof(gpu::Address) && sizeof(hipModule_t) == sizeof(gpu::Handle));
static_assert(sizeof(hipError_t) == sizeof(gpu::Status) && sizeof(hipDevice_t) == sizeof(int));

static_assert(hipSuccess == status::kSuccess && hipErrorInvalidValue == status::kInvalidValue);
static_assert(hipErrorOutOfMemory == status::kOutOfMemory && hipErrorNoDevice == status::kNoDevice);
static_assert(hipErrorInvalidDevice == status::kInvalidDevice && hipErrorInvalidImage == status::kInvalidImage);
static_assert(hipErrorNoBinaryForGpu == status::kNoBinaryForGpu && hipErrorInvalidSource == status::kInvalidSource);
static_assert(hipErrorNotFound == status::kNotFound && hipErrorNotReady == status::kNotReady);
static_assert(hipErrorIllegalAddress == status::kIllegalAddress && hipErrorLaunchFailure == status::kLaunchFailed);
static_assert(hipErrorNotSupported == status::kNotSupported);
static_assert(gpu::is_sticky(hipErrorECCNotCorrectable) && gpu::is_sticky(hipErrorIllegalAddress));
static_assert(gpu::is_sticky(hipErrorLaunchTimeOut) && gpu::is_sticky(hipErrorContextIsDestroyed));
static_assert(gpu::is_sticky(hipErrorAssert) && gpu::is_sticky(hipErrorLaunchFailure));
static_assert(gpu::is_sticky(hipErrorUnknown) && gpu::is_sticky(hipErrorRuntimeMemory));
static_assert(gpu::is_sticky(hipErrorRuntimeOther) && !gpu::is_sticky(hipErrorOutOfMemory));

static_assert(hipStreamNonBlocking == gpu::kStreamNonBlocking && hipEventBlockingSync == gpu::kEventBlockingSync);
static_assert(hipEventDisableTiming == gpu::kEventDisableTiming && hipEventDefault == gpu::kEventTiming);
static_assert(hipHostRegisterPortable == gpu::kHostPortable && hipHostRegisterMapped == gpu::kHostMapped);

}  // namespace

TEST(the_architecture_is_found_in_amds_own_structure) {
  hipDeviceProp_t properties{};
  std::strcpy(properties.name, "AMD Instinct gfx something");
  std::strcpy(properties.gcnArchName, "gfx942:sramecc+:xnack-");
  std::string bytes(gpu::hip::kPropertiesBytes, '\0');
  std::memcpy(bytes.data(), &properties, sizeof(properties));
  CHECK(gpu::hip::architecture_of(bytes) == "gfx942");
}
#else
TEST(amds_headers_are_missing) { std::puts("  not compared: no hip/hip_runtime_api.h here (libamdhip64-dev)"); }
#endif

TEST(an_architecture_is_cut_at_its_features) {
  std::string bytes(1024, '\0');
  CHECK(gpu::hip::architecture_of(bytes).empty());
  bytes.replace(10, 6, "gfx900");  // part of the name
  bytes.replace(700, 9, "gfx90a:x-");
  CHECK(gpu::hip::architecture_of(bytes) == "gfx90a");
}

#ifdef HAVE_CUDA_HEADERS
namespace {

using gpu::cuda::GraphEdgeData;
using gpu::cuda::GraphNodeParams;
using gpu::cuda::LaunchAttribute;
using gpu::cuda::LaunchConfig;
using gpu::cuda::MemAccessDesc;
using gpu::cuda::MemAllocationProp;
using CudaKernel = gpu::cuda::KernelNodeParams;

static_assert(CU_MEMHOSTREGISTER_PORTABLE == gpu::kHostPortable && CU_MEMHOSTREGISTER_DEVICEMAP == gpu::kHostMapped);

static_assert(sizeof(CudaKernel) == sizeof(CUDA_KERNEL_NODE_PARAMS_v2) &&
              sizeof(CudaKernel) == sizeof(CUDA_KERNEL_NODE_PARAMS_v3));
static_assert(offsetof(CudaKernel, grid) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, gridDimX));
static_assert(offsetof(CudaKernel, block) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, blockDimX));
SAME_FIELD(CudaKernel, func, CUDA_KERNEL_NODE_PARAMS_v2, func);
SAME_FIELD(CudaKernel, shared_bytes, CUDA_KERNEL_NODE_PARAMS_v2, sharedMemBytes);
SAME_FIELD(CudaKernel, kernel_params, CUDA_KERNEL_NODE_PARAMS_v2, kernelParams);
SAME_FIELD(CudaKernel, extra, CUDA_KERNEL_NODE_PARAMS_v2, extra);
SAME_FIELD(CudaKernel, kern, CUDA_KERNEL_NODE_PARAMS_v2, kern);
SAME_FIELD(CudaKernel, ctx, CUDA_KERNEL_NODE_PARAMS_v2, ctx);
static_assert(sizeof(GraphNodeParams) == sizeof(CUgraphNodeParams));
SAME_FIELD(GraphNodeParams, type, CUgraphNodeParams, type);
SAME_FIELD(GraphNodeParams, kernel, CUgraphNodeParams, kernel);
SAME_FIELD(GraphNodeParams, reserved2, CUgraphNodeParams, reserved2);
static_assert(sizeof(GraphEdgeData) == sizeof(CUgraphEdgeData));
SAME_FIELD(GraphEdgeData, from_port, CUgraphEdgeData, from_port);
SAME_FIELD(GraphEdgeData, to_port, CUgraphEdgeData, to_port);
SAME_FIELD(GraphEdgeData, type, CUgraphEdgeData, type);
static_assert(gpu::cuda::kProgrammaticEdge.from_port == CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC &&
              gpu::cuda::kProgrammaticEdge.type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC);
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig) && sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute));
SAME_FIELD(LaunchConfig, stream, CUlaunchConfig, hStream);
SAME_FIELD(LaunchConfig, attributes, CUlaunchConfig, attrs);
SAME_FIELD(LaunchConfig, num_attributes, CUlaunchConfig, numAttrs);
SAME_FIELD(LaunchConfig, shared_bytes, CUlaunchConfig, sharedMemBytes);
SAME_FIELD(LaunchAttribute, value, CUlaunchAttribute, value);
static_assert(sizeof(MemAllocationProp) == sizeof(CUmemAllocationProp));
SAME_FIELD(MemAllocationProp, type, CUmemAllocationProp, type);
SAME_FIELD(MemAllocationProp, requested_handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_FIELD(MemAllocationProp, location, CUmemAllocationProp, location);
SAME_FIELD(MemAllocationProp, win32_handle_metadata, CUmemAllocationProp, win32HandleMetaData);
SAME_FIELD(MemAllocationProp, alloc_flags, CUmemAllocationProp, allocFlags);
static_assert(sizeof(MemAccessDesc) == sizeof(CUmemAccessDesc));
SAME_FIELD(MemAccessDesc, flags, CUmemAccessDesc, flags);
SAME_FIELD(gpu::cuda::MemLocation, id, CUmemLocation, id);
static_assert(sizeof(CUdeviceptr) == sizeof(gpu::Address) && sizeof(CUmemGenericAllocationHandle) == sizeof(uint64_t));
static_assert(sizeof(CUresult) == sizeof(gpu::Status) && sizeof(CUdevice) == sizeof(int));

static_assert(gpu::cuda::kAttributeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(gpu::cuda::kAttributeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(gpu::cuda::kAttributeMaxSharedOptin == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
static_assert(gpu::cuda::kFunctionMaxDynamicShared == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(gpu::cuda::kFunctionNonPortableCluster == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
static_assert(gpu::cuda::kNodeTypeKernel == CU_GRAPH_NODE_TYPE_KERNEL);
static_assert(gpu::cuda::kLaunchAttributeCluster == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(gpu::cuda::kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(gpu::cuda::kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(gpu::cuda::kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(gpu::cuda::kGranularityRecommended == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);

static_assert(CUDA_ERROR_INVALID_VALUE == status::kInvalidValue && CUDA_ERROR_OUT_OF_MEMORY == status::kOutOfMemory);
static_assert(CUDA_ERROR_NO_DEVICE == status::kNoDevice && CUDA_ERROR_INVALID_DEVICE == status::kInvalidDevice);
static_assert(CUDA_ERROR_INVALID_IMAGE == status::kInvalidImage &&
              CUDA_ERROR_NO_BINARY_FOR_GPU == status::kNoBinaryForGpu);
static_assert(CUDA_ERROR_INVALID_SOURCE == status::kInvalidSource && CUDA_ERROR_NOT_FOUND == status::kNotFound);
static_assert(CUDA_ERROR_NOT_READY == status::kNotReady && CUDA_ERROR_ILLEGAL_ADDRESS == status::kIllegalAddress);
static_assert(CUDA_ERROR_LAUNCH_FAILED == status::kLaunchFailed && CUDA_ERROR_NOT_SUPPORTED == status::kNotSupported);
static_assert(gpu::is_sticky(CUDA_ERROR_ECC_UNCORRECTABLE) && gpu::is_sticky(CUDA_ERROR_NVLINK_UNCORRECTABLE));
static_assert(gpu::is_sticky(CUDA_ERROR_CONTAINED) && gpu::is_sticky(CUDA_ERROR_HARDWARE_STACK_ERROR));
static_assert(gpu::is_sticky(CUDA_ERROR_ILLEGAL_INSTRUCTION) && gpu::is_sticky(CUDA_ERROR_MISALIGNED_ADDRESS));
static_assert(gpu::is_sticky(CUDA_ERROR_INVALID_ADDRESS_SPACE) && gpu::is_sticky(CUDA_ERROR_INVALID_PC));
static_assert(gpu::is_sticky(CUDA_ERROR_TENSOR_MEMORY_LEAK) && gpu::is_sticky(CUDA_ERROR_ASSERT));
static_assert(gpu::is_sticky(CUDA_ERROR_DEVICE_UNAVAILABLE) && gpu::is_sticky(CUDA_ERROR_DEINITIALIZED));

static_assert(CU_STREAM_NON_BLOCKING == gpu::kStreamNonBlocking && CU_EVENT_BLOCKING_SYNC == gpu::kEventBlockingSync);
static_assert(CU_EVENT_DISABLE_TIMING == gpu::kEventDisableTiming && CU_EVENT_DEFAULT == gpu::kEventTiming);

}  // namespace
#else
TEST(nvidias_header_is_missing) { std::puts("  not compared: no cuda.h here (set TOKENSPEED_CUDA_INCLUDE)"); }
#endif

TEST_MAIN
