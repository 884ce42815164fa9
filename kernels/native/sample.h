// Sampling: one token (or the log-probability of a given one) for each row of logits.
//
// Arguments (R = num_logit_rows, V = vocabulary, K = kMaxTopLogprobs):
//   p logits          f32[R][V], read only
//   p adjusted        f32[A][V], read only: logits under which rows with an adjustment draw (adjust.h)
//   p logit_target    i32[R]: the token whose log-probability is asked (a prompt row), or -1: draw one
//   p temperature     f32[R]: 0 is greedy
//   p top_p, p min_p  f32[R]: 1 and 0 are off
//   p top_k           i32[R]: 0 or less is off
//   p seed            u64[R]
//   p draw_position   i32[R]: position that the drawn token will have
//   p num_logprobs    i32[R]: how many of the likeliest tokens to report, at most K; 0 or less: none
//   p state_slot      i32[R]: entry of last_tokens that the drawn token is written to, or -1
//   p adjustment      i32[R]: row of adjusted, or -1: draw from logits
//   p last_tokens     i32[S]
//   p out_token       i32[R]: the drawn token, or the target
//   p out_logprob     f32[R]: its log-probability, always written
//   p out_rank        i32[R]: its rank from 1, always written
//   p out_top_ids     i32[R][K], p out_top_logprobs f32[R][K]: best first; past num_logprobs: -1 and -infinity
//   i R, i V
//   i P: parts of the vocabulary in which log-probabilities are folded; V is a multiple of it
//
// Tokens are ordered by logit, the greater first, and the lower id first where logits are equal; ranks, the
// likeliest tokens, the greedy choice and the keep sets follow this one order. A NaN logit counts as -infinity.
// A row with no finite maximum has the first token in that order and the log-probability NaN.
//
//   logprob(i) = (logit_i - max) - log(sum_j exp(logit_j - max))        of the unscaled logits, never adjusted;
//                ranks and the likeliest tokens are those of logits too. All that follows is of the draw's logits.
//                exp in float32. P = 1: its sum in sixteen float64 lanes, which are added in order. P > 1: the
//                same for each of P equal parts of the vocabulary; the sums are rounded to float32 and added in
//                float32, part 0 first. So Megatron-LM folds a vocabulary that is split over P ranks
//                (vocab_parallel_cross_entropy: the maximum is that of all ranks, each sums its part in float32,
//                the sums are all-reduced), where the all-reduce adds in the order of ranks.
//   z_i        = (logit_i - max) / temperature                          float32; greedy at temperature 0
//   keep set:    the first top_k tokens; of these the shortest prefix whose sum of e^z reaches top_p of their
//                whole sum; of these all with z >= log(min_p). It always holds the first token.
//   draw:        argmax over the keep set of z_i + g_i in float64, the lower id where equal, with Gumbel noise
//                g_i = -log(-log(u_i)),  u_i = (x_i + 0.5) / 2^32,
//                x_i = lane i % 4 of Philox4x32-10, counter (draw_position, i / 4, 0, 0), key = seed (low, high)
//                which draws i with probability e^z_i / sum of e^z over the keep set.
//
// Rows are independent: nothing of a row's result depends on its place or on the other rows. A token whose
// z_i + g_i cannot exceed what has been reached is skipped; candidates are compared in float64, so skipping
// changes nothing.
#pragma once

#include "abi.h"

namespace tokenspeed::kernels {

inline constexpr int64_t kMaxTopLogprobs = 20;

// Nucleus candidates of a row, kept in the worker's scratch: logits and weights. Flatter rows are scanned whole.
inline constexpr int64_t kSampleCandidates = 8192;
inline constexpr size_t kSampleScratchBytes = 2 * kSampleCandidates * sizeof(float);

void sample_avx2(const Invocation& inv) noexcept;
void sample_avx512(const Invocation& inv) noexcept;

}  // namespace tokenspeed::kernels
