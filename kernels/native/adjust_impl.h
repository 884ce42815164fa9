// The body of the adjustment kernel, compiled once for each instruction set: see adjust.h for what it computes. Plain
// loops, which the compiler turns into vectors: no rounding depends on how.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "adjust.h"
#include "simd.h"

namespace tokenspeed::kernels::TS_ISA {

struct AdjustArgs {
  const float* logits;
  const int32_t *token_ids, *last_tokens, *positions, *cu_seqlens, *adjust_seq, *adjust_row, *count_slot, *prompt_lens;
  const float *repetition, *presence, *frequency;
  const int32_t *cu_biases, *mask_row, *bias_ids;
  const float* bias_values;
  const int32_t* token_masks;
  int32_t* token_counts;
  float* adjusted;
  int64_t num_adjustments, vocab_size;

  explicit AdjustArgs(const Invocation& inv)
      : logits(inv.ptr<const float>(0)), token_ids(inv.ptr<const int32_t>(1)), last_tokens(inv.ptr<const int32_t>(2)),
        positions(inv.ptr<const int32_t>(3)), cu_seqlens(inv.ptr<const int32_t>(4)),
        adjust_seq(inv.ptr<const int32_t>(5)), adjust_row(inv.ptr<const int32_t>(6)),
        count_slot(inv.ptr<const int32_t>(7)), prompt_lens(inv.ptr<const int32_t>(8)),
        repetition(inv.ptr<const float>(9)), presence(inv.ptr<const float>(10)), frequency(inv.ptr<const float>(11)),
        cu_biases(inv.ptr<const int32_t>(12)), mask_row(inv.ptr<const int32_t>(13)),
        bias_ids(inv.ptr<const int32_t>(14)), bias_values(inv.ptr<const float>(15)),
        token_masks(inv.ptr<const int32_t>(16)), token_counts(inv.ptr<int32_t>(17)), adjusted(inv.ptr<float>(18)),
        num_adjustments(inv.ptr<const int32_t>(19)[kNumAdjustments]), vocab_size(inv.i64(20)) {}
};

// Tokens [begin, end) of the vocabulary.
struct Slice {
  int64_t begin, end;
};

TS_INLINE void count_tokens(const AdjustArgs& args, int64_t a, Slice slice, int32_t* counts) {
  const int64_t seq = args.adjust_seq[a], first = args.cu_seqlens[seq], last = args.cu_seqlens[seq + 1];
  if (args.positions[first] == 0) std::fill(counts + slice.begin, counts + slice.end, 0);
  for (int64_t t = first; t < last; ++t) {
    const int32_t id = args.token_ids[t];
    const int64_t token = id >= 0 ? id : args.last_tokens[-1 - static_cast<int64_t>(id)];
    if (token < slice.begin || token >= slice.end) continue;
    if (args.positions[t] < args.prompt_lens[a]) {
      counts[token] |= kPromptFlag;
    } else {
      counts[token] += 1;
    }
  }
}

TS_INLINE void add_biases(const AdjustArgs& args, int64_t a, Slice slice, float* z) {
  const int32_t* last = args.bias_ids + args.cu_biases[a + 1];
  const int32_t* id = std::lower_bound(args.bias_ids + args.cu_biases[a], last, slice.begin);
  for (; id < last && *id < slice.end; ++id) z[*id] += args.bias_values[id - args.bias_ids];
}

TS_INLINE void penalize(const AdjustArgs& args, int64_t a, Slice slice, const int32_t* counts, float* z) {
  const float repetition = args.repetition[a], presence = args.presence[a], frequency = args.frequency[a];
  for (int64_t i = slice.begin; i < slice.end; ++i) {
    const int32_t count = counts[i], drawn = count & ~kPromptFlag;
    const float scaled = z[i] > 0.0f ? z[i] / repetition : z[i] * repetition;
    const float rarer = (count != 0 ? scaled : z[i]) - frequency * static_cast<float>(drawn);
    z[i] = drawn > 0 ? rarer - presence : rarer;
  }
}

TS_INLINE void apply_mask(const int32_t* mask, Slice slice, float* z) {
  constexpr float kLowest = std::numeric_limits<float>::lowest(), kNone = -std::numeric_limits<float>::infinity();
  for (int64_t i = slice.begin; i < slice.end; ++i) {
    const bool allowed = (static_cast<uint32_t>(mask[i / 32]) >> (i % 32) & 1u) != 0;
    const float lifted = z[i] > kLowest ? z[i] : kLowest;  // a NaN too
    z[i] = allowed ? lifted : kNone;
  }
}

TS_INLINE void adjust_slice(const AdjustArgs& args, int64_t a, Slice slice) {
  const int64_t slot = args.count_slot[a], row = args.adjust_row[a], mask = args.mask_row[a];
  int32_t* counts = slot < 0 ? nullptr : args.token_counts + slot * args.vocab_size;
  if (counts != nullptr) count_tokens(args, a, slice, counts);
  if (row < 0) return;
  float* z = args.adjusted + a * args.vocab_size;
  const float* logits = args.logits + row * args.vocab_size;
  std::copy(logits + slice.begin, logits + slice.end, z + slice.begin);
  add_biases(args, a, slice, z);
  if (counts != nullptr) penalize(args, a, slice, counts, z);
  if (mask >= 0) apply_mask(args.token_masks + mask * ((args.vocab_size + 31) / 32), slice, z);
}

TS_INLINE void adjust_logits(const Invocation& inv) {
  const AdjustArgs args(inv);
  const int64_t slices = (args.vocab_size + kAdjustSlice - 1) / kAdjustSlice;
  for (int64_t item; (item = inv.claim()) < args.num_adjustments * slices;) {
    const int64_t begin = item % slices * kAdjustSlice;
    adjust_slice(args, item / slices, {begin, std::min(begin + kAdjustSlice, args.vocab_size)});
  }
}

}  // namespace tokenspeed::kernels::TS_ISA
