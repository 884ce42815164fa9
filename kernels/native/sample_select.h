// Orders and keep sets over one row of logits. Every keep set is a prefix of the one order (greater logit first,
// then lower id), so it is a threshold and, among the tokens that equal it, a last id: nothing is sorted. A
// histogram finds the narrow range of z that holds the threshold, and bisection over the float32 values there
// ends at an exact one.
#pragma once

#include "sample.h"
#include "sample_simd.h"

namespace tokenspeed::kernels::TS_ISA {

struct Row {
  const float* logits;
  int64_t size;
};

// NaN becomes -infinity and -0 becomes +0, so that equal logits have equal bits.
TS_INLINE f32x16 clean(f32x16 v) { return add(max(v, set1(-kInfinity)), zero()); }
TS_INLINE float clean(float v) { return v != v ? -kInfinity : v + 0.0f; }

// Sixteen logits from token i on; -infinity past the end of the row.
TS_INLINE f32x16 lanes_at(const Row& row, int64_t i) {
  if (i + 16 <= row.size) return clean(load(row.logits + i));
  const mask16 live = first_lanes(static_cast<int>(row.size - i));
  return select(live, clean(load_masked(row.logits + i, live)), set1(-kInfinity));
}
TS_INLINE int live_bits(const Row& row, int64_t i) {
  return i + 16 <= row.size ? 0xffff : (1 << (row.size - i)) - 1;
}
TS_INLINE int bits_at_least(f32x16 v, f32x16 threshold) { return ~bits(greater(threshold, v)) & 0xffff; }

struct Best {
  float value;
  int64_t token;
};

TS_INLINE Best best_of(const Row& row) {
  f32x16 top[4] = {set1(-kInfinity), set1(-kInfinity), set1(-kInfinity), set1(-kInfinity)};
  int64_t i = 0;
  for (; i + 64 <= row.size; i += 64) {
    for (int j = 0; j < 4; ++j) top[j] = max(clean(load(row.logits + i + 16 * j)), top[j]);
  }
  for (; i < row.size; i += 16) top[0] = max(lanes_at(row, i), top[0]);
  const float value = reduce_max(max(max(top[0], top[1]), max(top[2], top[3])));
  for (i = 0;; i += 16) {
    const int equal = bits_at_least(lanes_at(row, i), set1(value));
    if (any(equal)) return {value, i + __builtin_ctz(equal)};
  }
}

// Of the tokens equal to `threshold`, those up to `last_id` belong; all above it do.
struct Keep {
  float threshold = -kInfinity;
  int64_t last_id = INT64_MAX;
};

TS_INLINE int keep_bits(const Keep& keep, f32x16 v, int64_t i) {
  const f32x16 threshold = set1(keep.threshold);
  if (keep.last_id >= i + 15) return bits_at_least(v, threshold);
  const int above = bits(greater(v, threshold));
  if (keep.last_id < i) return above;
  return above | (bits_at_least(v, threshold) & ((2 << (keep.last_id - i)) - 1));
}

// How many tokens precede or are `token` in the order.
TS_INLINE int64_t rank_of(const Row& row, int64_t token) {
  const float value = clean(row.logits[token]);
  const Keep before{value, token};
  int64_t count = 0;
  for (int64_t i = 0; i < row.size; i += 16) {
    count += __builtin_popcount(static_cast<unsigned>(keep_bits(before, lanes_at(row, i), i) & live_bits(row, i)));
  }
  return count;
}

// The n-th token (from 1) among those equal to `value`, or the last one if there are fewer.
TS_INLINE int64_t nth_equal(const Row& row, float value, int64_t n) {
  int64_t last = 0;
  for (int64_t i = 0; i < row.size; i += 16) {
    const f32x16 v = lanes_at(row, i);
    int equal = bits_at_least(v, set1(value)) & ~bits(greater(v, set1(value))) & live_bits(row, i);
    for (; any(equal); equal &= equal - 1) {
      last = i + __builtin_ctz(equal);
      if (--n == 0) return last;
    }
  }
  return last;
}

// float32 values in their order as consecutive integers, and back; not for NaN.
TS_INLINE int64_t key_of(float v) {
  int32_t w;
  std::memcpy(&w, &v, 4);
  return w >= 0 ? w : static_cast<int64_t>(INT32_MIN) - w;
}
TS_INLINE float value_of(int64_t key) {
  const int32_t w = static_cast<int32_t>(key >= 0 ? key : INT32_MIN - key);
  float v;
  std::memcpy(&v, &w, 4);
  return v;
}

// The greatest value v in [low, high] with reached(v); reached(low) holds, and reached is monotone.
template <class Reached>
TS_INLINE float bisect(float low, float high, Reached reached) {
  int64_t yes = key_of(low), no = key_of(high) + 1;
  while (no - yes > 1) {
    const int64_t middle = yes + (no - yes) / 2;
    (reached(value_of(middle)) ? yes : no) = middle;
  }
  return value_of(yes);
}

// The k first tokens in order, best first; k <= row.size. Nearly all vectors fail the one comparison.
TS_INLINE void insert_ranked(float v, int64_t token, int64_t count, float* values, int32_t* ids) {
  int64_t j = count - 1;
  for (; j > 0 && values[j - 1] < v; --j) {
    values[j] = values[j - 1];
    ids[j] = ids[j - 1];
  }
  values[j] = v;
  ids[j] = static_cast<int32_t>(token);
}
TS_INLINE void first_tokens(const Row& row, int64_t k, float* values, int32_t* ids) {
  for (int64_t i = 0; i < k; ++i) insert_ranked(clean(row.logits[i]), i, i + 1, values, ids);
  const Row rest{row.logits + k, row.size - k};
  for (int64_t i = 0; i < rest.size; i += 16) {
    int better = bits(greater(lanes_at(rest, i), set1(values[k - 1])));
    for (; any(better); better &= better - 1) {
      const int64_t at = i + __builtin_ctz(better);
      const float v = clean(rest.logits[at]);
      if (v > values[k - 1]) insert_ranked(v, k + at, k, values, ids);
    }
  }
}

// z of the header.
struct Scale {
  float best, temperature;
  f32x16 z(f32x16 v) const { return div(sub(v, set1(best)), set1(temperature)); }
  float z(float v) const { return (v - best) / temperature; }
};

// How much a token adds to what its prefix must reach.
struct Mass {
  static f32x16 of(f32x16 z) { return exp(z); }
};
struct Count {
  static f32x16 of(f32x16) { return set1(1.0f); }
};

// What the kept tokens add up to in each range of z; the last bucket has no lower end.
struct Histogram {
  static constexpr int kBuckets = 256, kParts = 4;  // neighbours add to different parts: no chain of additions
  static constexpr float kBucketsPerUnit = 16.0f;
  double parts[kParts][kBuckets] = {};

  static f32x16 bucket_of(f32x16 z) {
    return min(mul(z, set1(-kBucketsPerUnit)), set1(static_cast<float>(kBuckets - 1)));
  }
  double at(int bucket) const {
    return (parts[0][bucket] + parts[1][bucket]) + (parts[2][bucket] + parts[3][bucket]);
  }
  double total() const {
    double sum = 0;
    for (int bucket = 0; bucket < kBuckets; ++bucket) sum += at(bucket);
    return sum;
  }
};

template <class Measure>
TS_INLINE void fill(Histogram& histogram, const Row& row, const Scale& scale, const Keep& keep) {
  constexpr int kLast = Histogram::kBuckets - 1;
  f64x16 rest = zero_f64();  // most of a peaked row is in the last bucket, and needs no scatter
  for (int64_t i = 0; i < row.size; i += 16) {
    const f32x16 v = lanes_at(row, i), z = scale.z(v);
    const int kept = keep_bits(keep, v, i) & live_bits(row, i);
    if (!any(kept)) continue;
    const f32x16 place = Histogram::bucket_of(z), weights = select(mask_of(kept), Measure::of(z), zero());
    if (!any(kept & bits(greater(set1(static_cast<float>(kLast)), place)))) {
      rest = add(rest, weights);
      continue;
    }
    alignas(64) int32_t bucket[16];
    alignas(64) float weight[16];
    store_truncated(bucket, place);
    store(weight, weights);
    for (int j = 0; j < 16; ++j) histogram.parts[j % Histogram::kParts][bucket[j]] += static_cast<double>(weight[j]);
  }
  histogram.parts[0][kLast] += reduce_add(rest);
}

// Tokens of one bucket, packed in order of id.
struct Candidates {
  float* logits;   // padded to whole vectors with -infinity
  float* weights;  // padded with 0
  int64_t count = 0;
  float lowest = kInfinity, highest = -kInfinity;

  double from(float threshold) const {
    f64x16 sum = zero_f64();
    for (int64_t i = 0; i < count; i += 16) {
      sum = add(sum, select(greater(set1(threshold), load(logits + i)), zero(), load(weights + i)));
    }
    return reduce_add(sum);
  }
};

// Packs the kept tokens of a bucket; false when they do not fit (then `lowest` and `highest` are right still).
template <class Measure>
TS_INLINE bool collect(const Row& row, const Scale& scale, const Keep& keep, int bucket, Candidates& out) {
  bool fits = true;
  const float first = static_cast<float>(bucket), next = first + 1.0f;
  for (int64_t i = 0; i < row.size; i += 16) {
    const f32x16 v = lanes_at(row, i), z = scale.z(v), place = Histogram::bucket_of(z);
    int kept = keep_bits(keep, v, i) & live_bits(row, i) & bits_at_least(place, set1(first)) &
               bits(greater(set1(next), place));
    if (!any(kept)) continue;
    alignas(64) float logits[16], weights[16];
    store(logits, v);
    store(weights, Measure::of(z));
    fits = fits && out.count + 32 <= kSampleCandidates;
    for (; any(kept); kept &= kept - 1) {
      const int j = __builtin_ctz(kept);
      out.lowest = logits[j] < out.lowest ? logits[j] : out.lowest;
      out.highest = logits[j] > out.highest ? logits[j] : out.highest;
      if (!fits) continue;
      out.logits[out.count] = logits[j];
      out.weights[out.count++] = weights[j];
    }
  }
  for (int64_t i = out.count; i % 16 != 0; ++i) {
    out.logits[i] = -kInfinity;
    out.weights[i] = 0.0f;
  }
  return fits;
}

template <class Measure>
TS_INLINE double measure_from(const Row& row, const Scale& scale, float threshold) {
  f64x16 sum = zero_f64();
  for (int64_t i = 0; i < row.size; i += 16) {
    const f32x16 v = lanes_at(row, i);
    const int reached = bits_at_least(v, set1(threshold)) & live_bits(row, i);
    if (any(reached)) sum = add(sum, select(mask_of(reached), Measure::of(scale.z(v)), zero()));
  }
  return reduce_add(sum);
}

// The shortest prefix of `within` that reaches `share` of its whole measure (or, for absolute, `share` itself).
template <class Measure>
TS_INLINE Keep shortest_prefix(const Row& row, const Scale& scale, const Keep& within, double share, bool absolute,
                               float* scratch) {
  Histogram histogram;
  fill<Measure>(histogram, row, scale, within);
  const double target = absolute ? share : share * histogram.total();
  int bucket = 0;
  double above = 0;  // of all buckets before it
  while (bucket + 1 < Histogram::kBuckets && above + histogram.at(bucket) < target) above += histogram.at(bucket++);
  Candidates packed{scratch, scratch + kSampleCandidates};
  const bool fits = collect<Measure>(row, scale, within, bucket, packed);
  const auto from = [&](float v) { return fits ? above + packed.from(v) : measure_from<Measure>(row, scale, v); };
  const float threshold = bisect(packed.lowest, packed.highest, [&](float v) { return from(v) >= target; });
  // As many of the tokens that equal the threshold as are still missing.
  const double before = threshold < packed.highest ? from(value_of(key_of(threshold) + 1)) : above;
  const double each = static_cast<double>(first_lane(Measure::of(scale.z(set1(threshold)))));
  const double missing = std::ceil((target - before) / each);
  const int64_t last = nth_equal(row, threshold, missing >= 1 && missing < 1e9 ? static_cast<int64_t>(missing) : 1);
  return {threshold, threshold == within.threshold && within.last_id < last ? within.last_id : last};
}

TS_INLINE Keep keep_top_k(const Row& row, const Scale& scale, int64_t k, float* scratch) {
  constexpr int64_t kListed = 64;  // up to here one pass with a sorted list is faster
  if (k > kListed) return shortest_prefix<Count>(row, scale, Keep{}, static_cast<double>(k), true, scratch);
  float values[kListed];
  int32_t ids[kListed];
  first_tokens(row, k, values, ids);
  return {values[k - 1], ids[k - 1]};
}

TS_INLINE Keep keep_top_p(const Row& row, const Scale& scale, const Keep& within, float top_p, float* scratch) {
  return shortest_prefix<Mass>(row, scale, within, static_cast<double>(top_p), false, scratch);
}

}  // namespace tokenspeed::kernels::TS_ISA
