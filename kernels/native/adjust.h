// What sequences ask of their logits before they draw: biases, penalties and allowed tokens.
//
// Arguments (R = num_logit_rows, A adjustments, B biases, W words of a token mask, V vocabulary):
//   p logits               f32[R][V], read only
//   p token_ids            i32[T]: ids, or -1 - slot: last_tokens[slot]
//   p last_tokens          i32[S], read only
//   p positions            i32[T], p cu_seqlens i32[num_seqs + 1]
//   p adjust_seq           i32[A]: the sequence of an adjustment
//   p adjust_row           i32[A]: its logit row that draws, or -1
//   p count_slot           i32[A]: its row of token_counts, or -1: no penalties
//   p prompt_lens          i32[A]: positions of its prompt
//   p repetition_penalty, p presence_penalty, p frequency_penalty  f32[A]
//   p cu_biases            i32[A + 1]: biases of adjustment a are [cu_biases[a], cu_biases[a + 1])
//   p mask_row             i32[A]: its row of token_masks, or -1
//   p bias_ids             i32[B], ascending within an adjustment; p bias_values f32[B]
//   p token_masks          i32[masks][W]: bit t % 32 of word t / 32 says whether token t is allowed
//   p token_counts         i32[slots][V]: updated
//   p adjusted             f32[A][V]: written where adjust_row is not negative
//   p step_sizes           i32[8]: the fourth is A
//   i V
//
// First the counts: a sequence that starts from position 0 in this step starts from nothing; each of its tokens at a
// position of the prompt sets kPromptFlag, each other one adds 1. Then, for each token, in float32 and in this order:
//
//   z = logit + bias
//   z = z > 0 ? z / repetition : z * repetition      if the prompt has the token or it was drawn
//   z = z - frequency * n, then z - presence         n times drawn; presence if n > 0
//   z = allowed ? max(z, lowest float) : -infinity   if there is a mask; a NaN becomes the lowest float
//
// Of each adjustment the vocabulary is cut into slices; a worker does all of this for one slice.
#pragma once

#include "abi.h"

namespace tokenspeed::kernels {

inline constexpr int32_t kPromptFlag = 1 << 30;
inline constexpr int64_t kAdjustSlice = 16384;  // tokens; a multiple of the bits of a mask's word
inline constexpr int kNumAdjustments = 3;       // its index in step_sizes

void adjust_logits_avx2(const Invocation& inv) noexcept;
void adjust_logits_avx512(const Invocation& inv) noexcept;

}  // namespace tokenspeed::kernels
