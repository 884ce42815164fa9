// FlashInfer's decode attention over our pages: sequences of one token each.
//
// Macros, set by the build: TOKENSPEED_HEAD_DIM, TOKENSPEED_GROUP (q heads of a KV head). FlashInfer's dispatch over
// group sizes, head dimensions and GPUs is narrowed to these, or it would compile every kernel that it has.
#include <cuda_bf16.h>

#include <flashinfer/utils.cuh>

#undef DISPATCH_GQA_GROUP_SIZE
#define DISPATCH_GQA_GROUP_SIZE(group_size, GROUP_SIZE, ...)                     \
  if ((group_size) == TOKENSPEED_GROUP) {                                        \
    constexpr size_t GROUP_SIZE = TOKENSPEED_GROUP;                              \
    __VA_ARGS__                                                                  \
  } else {                                                                       \
    FLASHINFER_ERROR("compiled for another number of q heads of a KV head");     \
  }
#undef DISPATCH_HEAD_DIM
#define DISPATCH_HEAD_DIM(head_dim, HEAD_DIM, ...)              \
  if ((head_dim) == TOKENSPEED_HEAD_DIM) {                      \
    constexpr size_t HEAD_DIM = TOKENSPEED_HEAD_DIM;            \
    __VA_ARGS__                                                 \
  } else {                                                      \
    FLASHINFER_ERROR("compiled for another head dimension");    \
  }
#undef DISPATCH_COMPUTE_CAP_DECODE_NUM_STAGES_SMEM
#define DISPATCH_COMPUTE_CAP_DECODE_NUM_STAGES_SMEM(compute_capacity, NUM_STAGES_SMEM, ...) \
  if ((compute_capacity).first >= 8) {                                                      \
    constexpr uint32_t NUM_STAGES_SMEM = 2;                                                 \
    __VA_ARGS__                                                                             \
  } else {                                                                                  \
    FLASHINFER_ERROR("compiled for GPUs from compute capability 8.0 on");                   \
  }

#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/variants.cuh>

#include "launcher.cuh"
#include "pages.cuh"
#include "plan.cuh"

namespace {

using Element = nv_bfloat16;
using Params = flashinfer::BatchDecodeParams<Element, Element, Element, int32_t>;
using Variant = flashinfer::DefaultAttention<false, false, false, false>;

enum PlanPointer { kCuSeqlens, kContextLens, kStepSizes, kPlanRequest, kPlanKvTile, kPlanValid, kPlanIndptr,
                   kPlanLastPage, kPlanOutIndptr, kPlanChunkSize };
enum PlanInteger { kPlanSeqs, kPlanPages, kPlanPageSize, kPlanTiles, kMinChunk };
enum Pointer { kQuery, kKv, kPageTable, kOut, kRequest, kKvTile, kValid, kIndptr, kLastPage, kOutIndptr, kChunkSize,
               kPartialOut, kPartialLse };
enum Integer { kNumSeqs, kPageSize, kPageStride, kNumKvHeads, kTiles, kSplit };

template <typename T>
T* as(void* pointer) { return static_cast<T*>(pointer); }

}  // namespace

TOKENSPEED_LAUNCHER(tokenspeed_flashinfer_decode_plan) {
  (void)floats;
  return tokenspeed::report([&] {
    const tokenspeed::PlanArrays arrays{as<int32_t>(pointers[kPlanRequest]), nullptr,
                                        as<int32_t>(pointers[kPlanKvTile]), as<uint8_t>(pointers[kPlanValid]),
                                        as<int32_t>(pointers[kPlanIndptr]), as<int32_t>(pointers[kPlanLastPage]),
                                        as<int32_t>(pointers[kPlanOutIndptr]), as<int32_t>(pointers[kPlanChunkSize])};
    const auto seqs = static_cast<int32_t>(integers[kPlanSeqs]);
    const tokenspeed::PlanSizes sizes{seqs, static_cast<int32_t>(integers[kPlanPages]),
                                      static_cast<int32_t>(integers[kPlanPageSize]),
                                      static_cast<int32_t>(integers[kPlanTiles]), 0, 1,
                                      static_cast<int32_t>(integers[kMinChunk])};
    tokenspeed::make_plan<<<1, tokenspeed::kPlanThreads, (seqs + 1) * sizeof(int32_t), stream>>>(
        as<const int32_t>(pointers[kCuSeqlens]), as<const int32_t>(pointers[kContextLens]),
        as<const int32_t>(pointers[kStepSizes]), arrays, sizes);
    return cudaGetLastError();
  });
}

TOKENSPEED_LAUNCHER(tokenspeed_flashinfer_decode) {
  return tokenspeed::report([&] {
    const auto num_kv_heads = static_cast<uint32_t>(integers[kNumKvHeads]);
    tokenspeed::Zeroed<Params> params;
    params->q = as<Element>(pointers[kQuery]);
    tokenspeed::make_pages<Element>(
        params->paged_kv, pointers[kKv], integers[kPageStride], num_kv_heads,
        static_cast<uint32_t>(integers[kPageSize]), TOKENSPEED_HEAD_DIM, static_cast<uint32_t>(integers[kNumSeqs]),
        as<int32_t>(pointers[kPageTable]), as<int32_t>(pointers[kIndptr]), as<int32_t>(pointers[kLastPage]));
    params->o = as<Element>(pointers[kOut]);
    params->padded_batch_size = static_cast<uint32_t>(integers[kTiles]);
    params->num_qo_heads = num_kv_heads * TOKENSPEED_GROUP;
    params->q_stride_n = static_cast<int32_t>(num_kv_heads) * TOKENSPEED_GROUP * TOKENSPEED_HEAD_DIM;
    params->q_stride_h = TOKENSPEED_HEAD_DIM;
    params->window_left = -1;
    params->sm_scale = static_cast<float>(floats[0]);
    params->rope_rcp_scale = params->rope_rcp_theta = 1.f;
    params->request_indices = as<int32_t>(pointers[kRequest]);
    params->kv_tile_indices = as<int32_t>(pointers[kKvTile]);
    params->o_indptr = as<int32_t>(pointers[kOutIndptr]);
    params->kv_chunk_size_ptr = as<int32_t>(pointers[kChunkSize]);
    params->block_valid_mask = as<bool>(pointers[kValid]);
    const bool split = integers[kSplit] != 0;
    return flashinfer::BatchDecodeWithPagedKVCacheDispatched<TOKENSPEED_HEAD_DIM, flashinfer::PosEncodingMode::kNone,
                                                             Variant>(
        *params, split ? as<Element>(pointers[kPartialOut]) : nullptr,
        split ? as<float>(pointers[kPartialLse]) : nullptr, /*enable_pdl=*/false, stream);
  });
}
