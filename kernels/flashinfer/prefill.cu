// FlashInfer's prefill attention over our pages: sequences of any number of tokens, causal.
//
// Macros, set by the build: TOKENSPEED_HEAD_DIM, TOKENSPEED_GROUP (q heads of a KV head), TOKENSPEED_TILE (rows of a
// query tile), TOKENSPEED_MMA_KV (16 positions each in a KV tile). FlashInfer picks the last from the GPU's shared
// memory and so compiles four kernels; here one is compiled, and the launcher refuses if FlashInfer wants another.

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

#include "attention.cuh"

namespace {

using tokenspeed::as, tokenspeed::Element, tokenspeed::Variant;
using Params = flashinfer::BatchPrefillPagedParams<Element, Element, Element, int32_t>;

enum OwnPlanPointer { kPlanQueryTile = tokenspeed::kOwnPlanPointer };
enum OwnPointer { kQueryIndptr = tokenspeed::kOwnPointer, kQueryTile };

}  // namespace

TOKENSPEED_LAUNCHER(tokenspeed_flashinfer_prefill_plan) {
  (void)floats;
  return tokenspeed::report([&] {
    return tokenspeed::launch_plan(stream, pointers, integers,
                                   {as<int32_t>(pointers[kPlanQueryTile]), /*out_indptr=*/nullptr, TOKENSPEED_TILE,
                                    TOKENSPEED_GROUP, /*min_chunk=*/0});
  });
}

TOKENSPEED_LAUNCHER(tokenspeed_flashinfer_prefill) {
  return tokenspeed::report([&] {
    tokenspeed::Zeroed<Params> params;
    tokenspeed::set_common(*params, pointers, integers, floats[0]);
    params->q_indptr = params->o_indptr = as<int32_t>(pointers[kQueryIndptr]);
    new (&params->group_size) flashinfer::uint_fastdiv(TOKENSPEED_GROUP);
    params->qo_tile_indices = as<int32_t>(pointers[kQueryTile]);
    return flashinfer::BatchPrefillWithPagedKVCacheDispatched<
        /*SAME_KV_STRIDES=*/true, TOKENSPEED_TILE, TOKENSPEED_HEAD_DIM, TOKENSPEED_HEAD_DIM,
        flashinfer::PosEncodingMode::kNone, /*USE_FP16_QK_REDUCTION=*/false, flashinfer::MaskMode::kCausal,
        /*USE_TOKEN_HEAD_SF=*/false, Variant>(*params, nullptr, nullptr, /*enable_pdl=*/false, stream);
  });
}
