// Rotary embedding and KV write: one pass over the qkv projection. It rotates q and k, rounds q, k and v
// once to the artifact's dtype, and writes k and v where paged attention reads them.
//
// Arguments (T = num_tokens, S = num_seqs):
//   p qkv           float32 [T][(NQ + 2 NKV) D]: q heads, then k heads, then v heads
//   p rope_table    float32 [max_model_len][D]: D/2 cosines, then D/2 sines, of each position
//   p positions     int32 [T]; consecutive within a sequence
//   p slot_mapping  int64 [T]: page * page_size + position % page_size
//   p cu_seqlens    int32 [S+1]
//   p kv            page 0 of this layer; page i lies page_stride bytes * i further
//   p q_out         dt [T][NQ D]
//   i T, i S, i NQ, i NKV, i D, i page_size, i page_stride
//
// A layer of a page holds K, then V (16 lanes are positions in K and dims in V):
//   float32   K [NKV][page_size/16][D][16]       V [NKV][D/16][page_size][16]
//   bfloat16  K [NKV][page_size/16][D/2][16][2]  V [NKV][D/16][page_size/2][16][2]
// V of a block of 32 positions is zeroed when the block's first position is written, so attention may
// multiply masked probabilities (exact zeros) with the rest of the block whatever the page held before.
// A sequence that starts at a position inside a block relies on an earlier step having done so.
#pragma once

#include "abi.h"

namespace tokenspeed::kernels {

inline constexpr int64_t kRopeMaxHeadDim = 256;  // D is a multiple of 16 up to this
inline constexpr int64_t kKvBlock = 32;          // positions that are zeroed together; page_size is a multiple

// Rotated keys of one block, and one rotated query.
inline constexpr size_t kRopeScratchBytes = (kKvBlock + 1) * kRopeMaxHeadDim * sizeof(float);

void rope_kv_write_f32_avx2(const Invocation& inv) noexcept;
void rope_kv_write_f32_avx512(const Invocation& inv) noexcept;
void rope_kv_write_bf16_avx2(const Invocation& inv) noexcept;
void rope_kv_write_bf16_avx512(const Invocation& inv) noexcept;

}  // namespace tokenspeed::kernels
