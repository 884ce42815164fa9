// FlashInfer's decode attention over our pages: sequences of one token each.
//
// Macros, set by the build: TOKENSPEED_HEAD_DIM, TOKENSPEED_GROUP (q heads of a KV head). FlashInfer's dispatch over
// group sizes, head dimensions and GPUs is narrowed to these, or it would compile every kernel that it has.

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

#include "attention.cuh"

namespace {

using tokenspeed::as, tokenspeed::Element, tokenspeed::Variant;
using Params = flashinfer::BatchDecodeParams<Element, Element, Element, int32_t>;

enum OwnPlanPointer { kPlanOutIndptr = tokenspeed::kOwnPlanPointer };
enum OwnPlanInteger { kMinChunk = tokenspeed::kOwnPlanInteger };
enum OwnPointer { kOutIndptr = tokenspeed::kOwnPointer, kPartialOut, kPartialLse };
enum OwnInteger { kSplit = tokenspeed::kOwnInteger };

}  // namespace

TOKENSPEED_LAUNCHER(tokenspeed_flashinfer_decode_plan) {
  (void)floats;
  return tokenspeed::report([&] {
    return tokenspeed::launch_plan(stream, pointers, integers,
                                   {/*query_tile=*/nullptr, as<int32_t>(pointers[kPlanOutIndptr]), /*query_rows=*/0,
                                    /*group=*/1, static_cast<int32_t>(integers[kMinChunk])});
  });
}

TOKENSPEED_LAUNCHER(tokenspeed_flashinfer_decode) {
  return tokenspeed::report([&] {
    tokenspeed::Zeroed<Params> params;
    tokenspeed::set_common(*params, pointers, integers, floats[0]);
    params->o_indptr = as<int32_t>(pointers[kOutIndptr]);
    const bool split = integers[kSplit] != 0;
    return flashinfer::BatchDecodeWithPagedKVCacheDispatched<TOKENSPEED_HEAD_DIM, flashinfer::PosEncodingMode::kNone,
                                                             Variant>(
        *params, split ? as<Element>(pointers[kPartialOut]) : nullptr,
        split ? as<float>(pointers[kPartialLse]) : nullptr, /*enable_pdl=*/false, stream);
  });
}
