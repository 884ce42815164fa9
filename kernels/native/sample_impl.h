// The body of the sampling kernel, compiled once for each instruction set: see sample.h for what it computes.
#pragma once

#include "sample_select.h"

namespace tokenspeed::kernels::TS_ISA {

struct SampleArgs {
  const float *logits, *adjusted;
  const int32_t* logit_target;
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const uint64_t* seed;
  const int32_t *draw_position, *num_logprobs, *state_slot, *adjustment;
  int32_t *last_tokens, *out_token;
  float* out_logprob;
  int32_t *out_rank, *out_top_ids;
  float* out_top_logprobs;
  int64_t num_rows, vocab_size, logprob_shards;

  explicit SampleArgs(const Invocation& inv)
      : logits(inv.ptr<const float>(0)), adjusted(inv.ptr<const float>(1)), logit_target(inv.ptr<const int32_t>(2)),
        temperature(inv.ptr<const float>(3)), top_p(inv.ptr<const float>(4)), min_p(inv.ptr<const float>(5)),
        top_k(inv.ptr<const int32_t>(6)), seed(inv.ptr<const uint64_t>(7)),
        draw_position(inv.ptr<const int32_t>(8)), num_logprobs(inv.ptr<const int32_t>(9)),
        state_slot(inv.ptr<const int32_t>(10)), adjustment(inv.ptr<const int32_t>(11)),
        last_tokens(inv.ptr<int32_t>(12)), out_token(inv.ptr<int32_t>(13)), out_logprob(inv.ptr<float>(14)),
        out_rank(inv.ptr<int32_t>(15)), out_top_ids(inv.ptr<int32_t>(16)), out_top_logprobs(inv.ptr<float>(17)),
        num_rows(inv.i64(18)), vocab_size(inv.i64(19)), logprob_shards(inv.i64(20)) {}
};

TS_INLINE bool is_finite(float v) { return v - v == 0.0f; }

// The sum of exp(logit - best).
TS_INLINE double exp_sum(const Row& row, float best) {
  f64x16 sum = zero_f64();
  for (int64_t i = 0; i < row.size; i += 16) sum = add(sum, exp(sub(lanes_at(row, i), set1(best))));
  return reduce_add(sum);
}

// log of the sum of the header; 0 for a row without a finite maximum, whose logprobs become NaN anyway.
TS_INLINE float log_sum(const Row& row, float best, int64_t num_shards) {
  if (!is_finite(best)) return 0.0f;
  if (num_shards <= 1) return static_cast<float>(std::log(exp_sum(row, best)));
  const int64_t size = row.size / num_shards;
  float sum = 0.0f;
  for (int64_t shard = 0; shard < num_shards; ++shard) {
    sum += static_cast<float>(exp_sum({row.logits + shard * size, size}, best));
  }
  return static_cast<float>(std::log(static_cast<double>(sum)));
}

TS_INLINE double score(float z, uint64_t seed, uint32_t position, int64_t token) {
  const auto block = philox4x32({position, static_cast<uint32_t>(token / 4), 0, 0},
                                {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const double u = (static_cast<double>(block[token % 4]) + 0.5) * 0x1p-32;
  return static_cast<double>(z) - std::log(-std::log(u));
}

// Gumbel-max over the keep set. The leader is at first the likeliest token, which every keep set holds. A token
// overtakes when z + g exceeds the leader's score s, that is, when 1 - u < 1 - exp(-exp(z - s)). Three sieves:
// can any u do it; is 1 - u below exp(z - s), which is a little more and cheap; does the exact score.
class GumbelRace {
 public:
  GumbelRace(const Row& row, const Scale& scale, int64_t first, uint64_t seed, uint32_t position)
      : row_(row), scale_(scale), leader_(first), seed_(seed), position_(position),
        top_(score(0.0f, seed, position, first)) {}

  int64_t run(const Keep& keep, float lowest_z) {
    for (int64_t start = 0; start < row_.size; start += 64) {
      f32x16 z[4];
      int alive[4] = {0, 0, 0, 0};
      for (int j = 0; j < 4 && start + 16 * j < row_.size; ++j) {
        const int64_t i = start + 16 * j;
        const f32x16 v = lanes_at(row_, i);
        z[j] = scale_.z(v);
        alive[j] = keep_bits(keep, v, i) & bits_at_least(z[j], set1(lowest_z)) & bits(greater(z[j], bar(kGumbelMax)));
      }
      if (any(alive[0] | alive[1] | alive[2] | alive[3])) run_chunk(start, z, alive);
    }
    return leader_;
  }

 private:
  // What a float32 score must exceed to matter: a little less than the leader's, for the rounding of both.
  f32x16 bar(float noise) const { return set1(static_cast<float>(top_) - noise - 1e-3f); }

  void run_chunk(int64_t start, const f32x16 z[4], const int alive[4]) {
    u32x16 x[4];
    random_bits(seed_, position_, static_cast<uint32_t>(start / 64), x);
    for (int j = 0; j < 4; ++j) {
      if (!any(alive[j])) continue;
      int close = alive[j] & bits(greater(exp(sub(z[j], bar(0.0f))), complement_of_u(x[j])));
      for (; any(close); close &= close - 1) enter(start + 16 * j + __builtin_ctz(close));
    }
  }

  void enter(int64_t token) {
    const double reached = score(scale_.z(clean(row_.logits[token])), seed_, position_, token);
    if (reached > top_ || (reached == top_ && token < leader_)) {
      top_ = reached;
      leader_ = token;
    }
  }

  const Row row_;
  const Scale scale_;
  int64_t leader_;
  uint64_t seed_;
  uint32_t position_;
  double top_;
};

TS_INLINE int64_t draw(const SampleArgs& args, int64_t r, const Row& row, const Best& best, float* scratch) {
  const Scale scale{best.value, args.temperature[r]};
  if (!(scale.temperature > 0.0f) || !is_finite(best.value)) return best.token;
  const int32_t top_k = args.top_k[r];
  const float top_p = args.top_p[r], min_p = args.min_p[r];
  Keep keep;
  if (top_k > 0 && top_k < row.size) keep = keep_top_k(row, scale, top_k, scratch);
  if (top_p < 1.0f) keep = keep_top_p(row, scale, keep, top_p, scratch);
  const float lowest_z = min_p > 0.0f ? static_cast<float>(std::log(static_cast<double>(min_p))) : -kInfinity;
  GumbelRace race(row, scale, best.token, args.seed[r], static_cast<uint32_t>(args.draw_position[r]));
  return race.run(keep, lowest_z);
}

// The row's own draw, from its adjusted logits if it has an adjustment.
TS_INLINE int64_t drawn_token(const SampleArgs& args, int64_t r, const Row& row, const Best& best, float* scratch) {
  const int64_t adjustment = args.adjustment[r];
  const Row source{adjustment < 0 ? row.logits : args.adjusted + adjustment * row.size, row.size};
  return draw(args, r, source, adjustment < 0 ? best : best_of(source), scratch);
}

TS_INLINE void report_likeliest(const SampleArgs& args, int64_t r, const Row& row, const Best& best, float norm) {
  int64_t count = args.num_logprobs[r] < kMaxTopLogprobs ? args.num_logprobs[r] : kMaxTopLogprobs;
  count = count < row.size ? count : row.size;
  int32_t* ids = args.out_top_ids + r * kMaxTopLogprobs;
  float* logprobs = args.out_top_logprobs + r * kMaxTopLogprobs;
  if (count > 0) first_tokens(row, count, logprobs, ids);
  for (int64_t i = 0; i < count; ++i) logprobs[i] = (logprobs[i] - best.value) - norm;
  for (int64_t i = count > 0 ? count : 0; i < kMaxTopLogprobs; ++i) {
    ids[i] = -1;
    logprobs[i] = -kInfinity;
  }
}

TS_INLINE void sample_row(const SampleArgs& args, int64_t r, float* scratch) {
  const Row row{args.logits + r * args.vocab_size, args.vocab_size};
  const Best best = best_of(row);
  const float norm = log_sum(row, best.value, args.logprob_shards);
  const int32_t target = args.logit_target[r];
  const bool asked = target >= 0 && target < row.size;
  const int64_t token = asked ? target : drawn_token(args, r, row, best, scratch);
  args.out_token[r] = static_cast<int32_t>(token);
  args.out_logprob[r] = (clean(row.logits[token]) - best.value) - norm;
  args.out_rank[r] = static_cast<int32_t>(token == best.token ? 1 : rank_of(row, token));
  report_likeliest(args, r, row, best, norm);
  if (!asked && args.state_slot[r] >= 0) args.last_tokens[args.state_slot[r]] = static_cast<int32_t>(token);
}

TS_INLINE void sample_rows(const Invocation& inv) {
  const SampleArgs args(inv);
  auto* scratch = reinterpret_cast<float*>(inv.scratch);
  for (int64_t r; (r = inv.claim()) < args.num_rows;) sample_row(args, r, scratch);
}

}  // namespace tokenspeed::kernels::TS_ISA
