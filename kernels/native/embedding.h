// Token embedding: out[t][h] = table[token][h] in float32, read from the panel16 table that the LM head shares.
//
// embedding_<dt>: p token_ids i32[T], p last_tokens i32[S], p table panel16 [V][H], p out f32[T][H], i T, i H
//
// A token id below 0 stands for the last token of request slot -1 - id: a decode input never visits the host.
// float32 panels are [V/16][H][16], bfloat16 panels [V/16][H/2][16][2]; H is even.
#pragma once

#include "abi.h"

namespace tokenspeed::kernels {

void embedding_f32_avx2(const Invocation& inv) noexcept;
void embedding_f32_avx512(const Invocation& inv) noexcept;
void embedding_bf16_avx2(const Invocation& inv) noexcept;
void embedding_bf16_avx512(const Invocation& inv) noexcept;

}  // namespace tokenspeed::kernels
