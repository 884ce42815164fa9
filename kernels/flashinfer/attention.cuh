// What the launchers of FlashInfer's attention have in common: the arguments that come first, the launch of the plan,
// our KV pages as FlashInfer sees them, and the parameters that every one of its attention kernels takes.
//
// Macros, set by the build: TOKENSPEED_HEAD_DIM, TOKENSPEED_GROUP (q heads of a KV head).
#pragma once

#include <cuda_bf16.h>

#include <flashinfer/attention/variants.cuh>
#include <flashinfer/layout.cuh>
#include <flashinfer/page.cuh>

#include <cstdint>
#include <new>

#include "launcher.cuh"
#include "plan.cuh"

namespace tokenspeed {

using Element = nv_bfloat16;
using Variant = flashinfer::DefaultAttention<false, false, false, false>;

// Arguments of a launcher of a plan, in the order of tokenspeed/kernels/flashinfer_specs.py; its own ones follow.
enum PlanPointer { kCuSeqlens, kContextLens, kStepSizes, kPlanRequest, kPlanKvTile, kPlanValid, kPlanIndptr,
                   kPlanLastPage, kPlanChunkSize, kOwnPlanPointer };
enum PlanInteger { kPlanSeqs, kPlanPages, kPlanPageSize, kPlanTiles, kOwnPlanInteger };

// Likewise of a launcher of attention.
enum Pointer { kQuery, kKv, kPageTable, kOut, kRequest, kKvTile, kValid, kIndptr, kLastPage, kChunkSize, kOwnPointer };
enum Integer { kNumSeqs, kPageSize, kPageStride, kNumKvHeads, kTiles, kOwnInteger };

template <typename T>
T* as(void* pointer) { return static_cast<T*>(pointer); }

// What the plans differ in. `query_tile`, `out_indptr`: null where the phase has none; the rest as in PlanSizes.
struct PlanOwn {
  int32_t* query_tile;
  int32_t* out_indptr;
  int32_t query_rows;
  int32_t group;
  int32_t min_chunk;
};

inline cudaError_t launch_plan(cudaStream_t stream, void* const* pointers, const int64_t* integers, PlanOwn own) {
  const PlanArrays arrays{as<int32_t>(pointers[kPlanRequest]), own.query_tile, as<int32_t>(pointers[kPlanKvTile]),
                          as<uint8_t>(pointers[kPlanValid]), as<int32_t>(pointers[kPlanIndptr]),
                          as<int32_t>(pointers[kPlanLastPage]), own.out_indptr,
                          as<int32_t>(pointers[kPlanChunkSize])};
  const auto seqs = static_cast<int32_t>(integers[kPlanSeqs]);
  const PlanSizes sizes{seqs, static_cast<int32_t>(integers[kPlanPages]), static_cast<int32_t>(integers[kPlanPageSize]),
                        static_cast<int32_t>(integers[kPlanTiles]), own.query_rows, own.group, own.min_chunk};
  make_plan<<<1, kPlanThreads, (seqs + 1) * sizeof(int32_t), stream>>>(
      as<const int32_t>(pointers[kCuSeqlens]), as<const int32_t>(pointers[kContextLens]),
      as<const int32_t>(pointers[kStepSizes]), arrays, sizes);
  return cudaGetLastError();
}

// Makes `to` anew, in place, so that its padding stays what it was. The KV pointer is the layer's K of page 0:
// K [num_kv_heads][page_size][head_dim], then V of the same shape, and pages are `page_stride` bytes apart.
inline void make_pages(flashinfer::paged_kv_t<Element, int32_t>& to, void* const* pointers, const int64_t* integers) {
  const auto num_heads = static_cast<uint32_t>(integers[kNumKvHeads]);
  const auto page_size = static_cast<uint32_t>(integers[kPageSize]);
  const int64_t strides[] = {integers[kPageStride] / static_cast<int64_t>(sizeof(Element)),
                             static_cast<int64_t>(page_size) * TOKENSPEED_HEAD_DIM, TOKENSPEED_HEAD_DIM};
  auto* const k = as<Element>(pointers[kKv]);
  new (&to) flashinfer::paged_kv_t<Element, int32_t>(
      num_heads, page_size, TOKENSPEED_HEAD_DIM, static_cast<uint32_t>(integers[kNumSeqs]),
      flashinfer::QKVLayout::kHND, k, k + num_heads * strides[1], strides, as<int32_t>(pointers[kPageTable]),
      as<int32_t>(pointers[kIndptr]), as<int32_t>(pointers[kLastPage]));
}

// Sets what FlashInfer's BatchDecodeParams and BatchPrefillPagedParams both have.
template <typename Params>
void set_common(Params& params, void* const* pointers, const int64_t* integers, double scale) {
  const auto num_heads = static_cast<uint32_t>(integers[kNumKvHeads]) * TOKENSPEED_GROUP;
  params.q = as<Element>(pointers[kQuery]);
  make_pages(params.paged_kv, pointers, integers);
  params.o = as<Element>(pointers[kOut]);
  params.padded_batch_size = static_cast<uint32_t>(integers[kTiles]);
  params.num_qo_heads = num_heads;
  params.q_stride_n = static_cast<int32_t>(num_heads * TOKENSPEED_HEAD_DIM);
  params.q_stride_h = TOKENSPEED_HEAD_DIM;
  params.window_left = -1;
  params.sm_scale = static_cast<float>(scale);
  params.rope_rcp_scale = params.rope_rcp_theta = 1.f;
  params.request_indices = as<int32_t>(pointers[kRequest]);
  params.kv_tile_indices = as<int32_t>(pointers[kKvTile]);
  params.kv_chunk_size_ptr = as<int32_t>(pointers[kChunkSize]);
  params.block_valid_mask = as<bool>(pointers[kValid]);
}

}  // namespace tokenspeed
