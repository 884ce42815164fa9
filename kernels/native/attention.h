// Paged causal attention for prefill chunks and decode steps, over the KV pages that rope.h lays out.
//
// Arguments (T = num_tokens, S = num_seqs):
//   p q             dt [T][NQ D]
//   p kv            page 0 of this layer; page i lies page_stride bytes * i further
//   p cu_seqlens    int32 [S+1]: the tokens of sequence i are rows [cu_seqlens[i], cu_seqlens[i+1])
//   p context_lens  int32 [S]: positions of the sequence, those of this step included
//   p page_table    int32 [S][P]: the page of each run of page_size positions
//   p out           dt [T][NQ D]
//   p workspace     attention_workspace_bytes(...), contents undefined before and after
//   i T, i S, i NQ, i NKV, i D, i page_size, i page_stride, i P, i split_positions, f scale
//
// Arithmetic of one row (a token and a q head), the same in a decode, a chunk or a packed step:
//   Positions are taken in tiles of page_size. Scores q.k accumulate over dims in order. Softmax is online,
//   in base 2: p = 2^(score * (scale * log2 e) - m). m becomes the greatest score * (scale * log2 e) of a tile
//   when that exceeds it by more than 8, and stays otherwise: p is at most 2^8, and O is hardly ever rescaled.
//   2^x is good to an ulp in a float32 kernel, and to 1e-4 where p is rounded to bfloat16 (2e-3).
//   The row sum l adds the float32 p, before rounding, in sixteen lanes (lane = position % 16, panels of a
//   tile in order); O += p V with p rounded to dt, over positions in order, in float32.
//   (m, l, O) starts afresh at every multiple of split_positions; l's lanes are then added in simd.h's fixed
//   tree, and splits are merged in ascending order. The output is O / l, rounded once to dt.
// The bits also agree between avx2 and avx512, for either dtype. avx512bf16 and amx multiply pairs in their
// own instructions and have bits of their own.
//
// V must be finite at every position up to the end of the last block of 32 that holds a position of the
// sequence: rope_kv_write sees to it. K may hold anything beyond the sequence.
// The amx kernel needs the operating system's permission to use tiles, asked for once per process.
#pragma once

#include "abi.h"

namespace tokenspeed::kernels {

inline constexpr int64_t kAttentionMaxHeadDim = 256;   // D is a multiple of 16 up to this
inline constexpr int64_t kAttentionMaxPageSize = 256;  // page_size is a multiple of 32 up to this
inline constexpr int64_t kAttentionTileRows = 48;      // query rows that one item takes through the KV tiles

// A sequence of one token may be computed split by split, in parallel, when a step has no more sequences than
// this. Busier steps have items enough, and the workspace stays small.
inline constexpr int64_t kAttentionSplitSeqs = 64;

// Bytes of the workspace: one record of D + 16 floats per sequence, q head and split.
// max_splits = ceil(P * page_size / split_positions), with P the row length of the page table.
constexpr size_t attention_workspace_bytes(int64_t max_num_seqs, int64_t num_q_heads, int64_t head_dim,
                                           int64_t max_splits) noexcept {
  const int64_t seqs = max_num_seqs < kAttentionSplitSeqs ? max_num_seqs : kAttentionSplitSeqs;
  return static_cast<size_t>(seqs * num_q_heads * max_splits * (head_dim + 16)) * sizeof(float);
}

// Per worker: Q, O and the merged O of a tile of rows, their (m, l) and positions, and two blocks of
// scores and probabilities.
inline constexpr size_t kAttentionScratchBytes =
    kAttentionTileRows * (3 * kAttentionMaxHeadDim + 2 * 16 + 8) * sizeof(float) +
    4 * 16 * kAttentionMaxPageSize * sizeof(float);

void paged_attention_f32_avx2(const Invocation& inv) noexcept;
void paged_attention_f32_avx512(const Invocation& inv) noexcept;
void paged_attention_bf16_avx2(const Invocation& inv) noexcept;
void paged_attention_bf16_avx512(const Invocation& inv) noexcept;
void paged_attention_bf16_avx512bf16(const Invocation& inv) noexcept;
void paged_attention_bf16_amx(const Invocation& inv) noexcept;

}  // namespace tokenspeed::kernels
