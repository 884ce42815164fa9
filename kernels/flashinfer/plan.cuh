// The plan of a step, made on the device: which piece of which sequence every thread block of FlashInfer's attention
// takes. FlashInfer makes it on the host, but a LaunchGraph is replayed with nothing of the host in between, so here
// the grid is fixed by the bucket and this kernel, once a step, says what is in it.
//
// FlashInfer addresses pages through offsets of each sequence into one array of page numbers, and takes the length of
// a sequence from its number of pages and the fill of the last one. The page table [S][P] serves as that array as it
// is: row i begins at i * P, and since every row then counts as P pages, the "fill of the last page" is what is missing
// from, or beyond, P - 1 pages: context_len - (P - 1) * page_size, in the wrapping arithmetic of 32-bit numbers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tokenspeed {

struct PlanArrays {
  int32_t* request;     // [tiles] sequence of a thread block
  int32_t* query_tile;  // [tiles] its tile of queries in the sequence (prefill), or null
  int32_t* kv_tile;     // [tiles] its chunk of positions in the sequence
  uint8_t* valid;       // [tiles] whether there is such a block in this step
  int32_t* indptr;      // [S + 1] where the sequence's pages begin
  int32_t* last_page;   // [S] see above
  int32_t* out_indptr;  // [S + 1] chunks of all sequences before (decode), or null
  int32_t* chunk_size;  // [1] positions of a chunk
};

struct PlanSizes {
  int32_t num_seqs;       // S of the bucket
  int32_t pages_per_seq;  // P
  int32_t page_size;
  int32_t tiles;          // thread blocks for each KV head
  int32_t query_rows;     // rows (token and q head of a group) of a query tile; 0: one token a sequence
  int32_t group;          // q heads of a KV head
  int32_t min_chunk;      // least positions of a chunk; 0: sequences are not cut
};

constexpr int kPlanThreads = 256;

__device__ inline int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

// Sum over the block of one number of each thread; every thread gets it. `scratch` has a word per warp.
__device__ inline int32_t block_sum(int32_t value, int32_t* scratch) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  int32_t sum = 0;
  for (int warp = 0; warp < kPlanThreads / 32; ++warp) sum += scratch[warp];
  return sum;
}

// Thread blocks that sequence `seq` needs when its positions are cut into chunks of `chunk` (0: not at all).
__device__ inline int32_t tiles_of(const PlanSizes& sizes, const int32_t* cu_seqlens, const int32_t* context_lens,
                                   int32_t seq, int32_t chunk) {
  if (sizes.query_rows > 0) return ceil_div((cu_seqlens[seq + 1] - cu_seqlens[seq]) * sizes.group, sizes.query_rows);
  return chunk > 0 ? ceil_div(context_lens[seq], chunk) : 1;
}

// One thread block. Shared memory: S + 1 words.
__global__ void __launch_bounds__(kPlanThreads)
    make_plan(const int32_t* cu_seqlens, const int32_t* context_lens, const int32_t* step_sizes, PlanArrays to,
              PlanSizes sizes) {
  extern __shared__ int32_t first_tile[];  // of each sequence, and their number at the end
  __shared__ int32_t scratch[kPlanThreads / 32];
  const int32_t num_seqs = step_sizes[1];

  // The smallest chunk of a ladder in steps of a quarter, multiples of the least one, that gives every chunk a block.
  int32_t chunk = sizes.min_chunk;
  while (chunk > 0) {
    int32_t count = 0;
    for (int32_t seq = threadIdx.x; seq < num_seqs; seq += kPlanThreads) {
      count += tiles_of(sizes, cu_seqlens, context_lens, seq, chunk);
    }
    if (block_sum(count, scratch) <= sizes.tiles) break;
    chunk += max(chunk / 4 / sizes.min_chunk, 1) * sizes.min_chunk;
  }

  // First tiles: each thread sums a run of sequences, the runs before it are added.
  const int32_t run = ceil_div(num_seqs, kPlanThreads);
  const int32_t begin = min(static_cast<int32_t>(threadIdx.x) * run, num_seqs), end = min(begin + run, num_seqs);
  int32_t own = 0;
  for (int32_t seq = begin; seq < end; ++seq) own += tiles_of(sizes, cu_seqlens, context_lens, seq, chunk);
  int32_t upto = own;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t left = __shfl_up_sync(~0u, upto, offset);
    if (threadIdx.x % 32 >= static_cast<unsigned>(offset)) upto += left;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 31) scratch[threadIdx.x / 32] = upto;
  __syncthreads();
  int32_t at = upto - own;
  for (unsigned warp = 0; warp < threadIdx.x / 32; ++warp) at += scratch[warp];
  for (int32_t seq = begin; seq < end; ++seq) {
    first_tile[seq] = at;
    at += tiles_of(sizes, cu_seqlens, context_lens, seq, chunk);
  }
  if (threadIdx.x == kPlanThreads - 1) first_tile[num_seqs] = at;
  __syncthreads();
  const int32_t total = first_tile[num_seqs];

  for (int32_t tile = threadIdx.x; tile < sizes.tiles; tile += kPlanThreads) {
    // Later tiles of a prompt see more positions: they come first, so that short ones fill the end.
    const int32_t number = sizes.query_rows > 0 ? total - 1 - tile : tile;
    const bool valid = number >= 0 && number < total;
    int32_t seq = 0;
    for (int32_t high = num_seqs; valid && high - seq > 1;) {
      const int32_t middle = (seq + high) / 2;
      if (first_tile[middle] <= number) seq = middle; else high = middle;
    }
    const int32_t within = valid ? number - first_tile[seq] : 0;
    to.request[tile] = seq;
    to.valid[tile] = valid;
    to.kv_tile[tile] = sizes.query_rows > 0 ? 0 : within;
    if (to.query_tile != nullptr) to.query_tile[tile] = within;
  }
  for (int32_t seq = threadIdx.x; seq <= sizes.num_seqs; seq += kPlanThreads) {
    to.indptr[seq] = seq * sizes.pages_per_seq;
    if (to.out_indptr != nullptr) to.out_indptr[seq] = first_tile[min(seq, num_seqs)];
    if (seq < sizes.num_seqs) {
      const int32_t length = seq < num_seqs ? context_lens[seq] : 1;
      to.last_page[seq] = length - (sizes.pages_per_seq - 1) * sizes.page_size;
    }
  }
  if (threadIdx.x == 0) *to.chunk_size = chunk;
}

}  // namespace tokenspeed
