// FlashInfer's prefill attention over our pages: sequences of any number of tokens, causal.
//
// Macros, set by the build: TOKENSPEED_HEAD_DIM, TOKENSPEED_GROUP (q heads of a KV head), TOKENSPEED_TILE (rows of a
// query tile), TOKENSPEED_MMA_KV (16 positions each in a KV tile). FlashInfer picks the last from the GPU's shared
// memory and so compiles four kernels; here one is compiled, and the launcher refuses if FlashInfer wants another.
#include <cuda_bf16.h>

#include <flashinfer/utils.cuh>

#undef DISPATCH_NUM_MMA_KV
#define DISPATCH_NUM_MMA_KV(max_mma_kv, NUM_MMA_KV, ...)                                                      \
  if (const uint32_t most = (max_mma_kv);                                                                     \
      most >= TOKENSPEED_MMA_KV && (TOKENSPEED_MMA_KV == 8 || most < 2 * TOKENSPEED_MMA_KV)) {                \
    constexpr size_t NUM_MMA_KV = TOKENSPEED_MMA_KV;                                                          \
    __VA_ARGS__                                                                                               \
  } else {                                                                                                    \
    FLASHINFER_ERROR("compiled for KV tiles of " + std::to_string(16 * TOKENSPEED_MMA_KV) +                   \
                     " positions a warp, but this GPU has room for " + std::to_string(16 * most));            \
  }

#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variants.cuh>

#include "launcher.cuh"
#include "pages.cuh"
#include "plan.cuh"

namespace {

using Element = nv_bfloat16;
using Params = flashinfer::BatchPrefillPagedParams<Element, Element, Element, int32_t>;
using Variant = flashinfer::DefaultAttention<false, false, false, false>;

enum PlanPointer { kCuSeqlens, kContextLens, kStepSizes, kPlanRequest, kPlanQueryTile, kPlanKvTile, kPlanValid,
                   kPlanIndptr, kPlanLastPage, kPlanChunkSize };
enum PlanInteger { kPlanSeqs, kPlanPages, kPlanPageSize, kPlanTiles };
enum Pointer { kQuery, kKv, kQueryIndptr, kPageTable, kOut, kRequest, kQueryTile, kKvTile, kValid, kIndptr, kLastPage,
               kChunkSize };
enum Integer { kNumSeqs, kPageSize, kPageStride, kNumKvHeads, kTiles };

template <typename T>
T* as(void* pointer) { return static_cast<T*>(pointer); }

}  // namespace

TOKENSPEED_LAUNCHER(tokenspeed_flashinfer_prefill_plan) {
  (void)floats;
  return tokenspeed::report([&] {
    const tokenspeed::PlanArrays arrays{as<int32_t>(pointers[kPlanRequest]), as<int32_t>(pointers[kPlanQueryTile]),
                                        as<int32_t>(pointers[kPlanKvTile]), as<uint8_t>(pointers[kPlanValid]),
                                        as<int32_t>(pointers[kPlanIndptr]), as<int32_t>(pointers[kPlanLastPage]),
                                        nullptr, as<int32_t>(pointers[kPlanChunkSize])};
    const auto seqs = static_cast<int32_t>(integers[kPlanSeqs]);
    const tokenspeed::PlanSizes sizes{seqs, static_cast<int32_t>(integers[kPlanPages]),
                                      static_cast<int32_t>(integers[kPlanPageSize]),
                                      static_cast<int32_t>(integers[kPlanTiles]), TOKENSPEED_TILE, TOKENSPEED_GROUP, 0};
    tokenspeed::make_plan<<<1, tokenspeed::kPlanThreads, (seqs + 1) * sizeof(int32_t), stream>>>(
        as<const int32_t>(pointers[kCuSeqlens]), as<const int32_t>(pointers[kContextLens]),
        as<const int32_t>(pointers[kStepSizes]), arrays, sizes);
    return cudaGetLastError();
  });
}

TOKENSPEED_LAUNCHER(tokenspeed_flashinfer_prefill) {
  return tokenspeed::report([&] {
    const auto num_kv_heads = static_cast<uint32_t>(integers[kNumKvHeads]);
    tokenspeed::Zeroed<Params> params;
    params->q = as<Element>(pointers[kQuery]);
    tokenspeed::make_pages<Element>(
        params->paged_kv, pointers[kKv], integers[kPageStride], num_kv_heads,
        static_cast<uint32_t>(integers[kPageSize]), TOKENSPEED_HEAD_DIM, static_cast<uint32_t>(integers[kNumSeqs]),
        as<int32_t>(pointers[kPageTable]), as<int32_t>(pointers[kIndptr]), as<int32_t>(pointers[kLastPage]));
    params->q_indptr = params->o_indptr = as<int32_t>(pointers[kQueryIndptr]);
    params->o = as<Element>(pointers[kOut]);
    new (&params->group_size) flashinfer::uint_fastdiv(TOKENSPEED_GROUP);
    params->num_qo_heads = num_kv_heads * TOKENSPEED_GROUP;
    params->q_stride_n = static_cast<int32_t>(num_kv_heads) * TOKENSPEED_GROUP * TOKENSPEED_HEAD_DIM;
    params->q_stride_h = TOKENSPEED_HEAD_DIM;
    params->window_left = -1;
    params->sm_scale = static_cast<float>(floats[0]);
    params->rope_rcp_scale = params->rope_rcp_theta = 1.f;
    params->request_indices = as<int32_t>(pointers[kRequest]);
    params->qo_tile_indices = as<int32_t>(pointers[kQueryTile]);
    params->kv_tile_indices = as<int32_t>(pointers[kKvTile]);
    params->kv_chunk_size_ptr = as<int32_t>(pointers[kChunkSize]);
    params->block_valid_mask = as<bool>(pointers[kValid]);
    params->padded_batch_size = static_cast<uint32_t>(integers[kTiles]);
    return flashinfer::BatchPrefillWithPagedKVCacheDispatched<
        /*SAME_KV_STRIDES=*/true, TOKENSPEED_TILE, TOKENSPEED_HEAD_DIM, TOKENSPEED_HEAD_DIM,
        flashinfer::PosEncodingMode::kNone, /*USE_FP16_QK_REDUCTION=*/false, flashinfer::MaskMode::kCausal,
        /*USE_TOKEN_HEAD_SF=*/false, Variant>(*params, nullptr, nullptr, /*enable_pdl=*/false, stream);
  });
}
