// What every paged_attention kernel must satisfy, whatever its instruction set.
#pragma once

#include "test.h"

#include "kv_fixture.h"

namespace tokenspeed::testing {

struct AttentionVariant {
  const char* name;
  KernelFn rope, attention;
  bool available;  // on this machine
};

// Group sizes 1 to 53 (over 48 rows a token), every tail of D against the panel widths, one page per split.
inline const std::vector<Shape> kAttentionShapes = {
    {9, 3, 64, 64, 128}, {4, 2, 80, 32, 64},  {8, 1, 128, 96, 96},    {6, 2, 16, 64, 192},
    {3, 3, 96, 64, 256}, {53, 1, 32, 32, 64}, {14, 2, 48, 32, 1024},
};
inline const std::vector<Shape> kFewAttentionShapes = {{9, 3, 64, 64, 128}, {4, 2, 80, 32, 64}, {53, 1, 48, 32, 64}};

// A sequence's q, k and v as the kernels see them, rotated and rounded to T, [position][NQ + 2 NKV][D].
template <class T>
std::vector<float> rounded_rows(const KvWorld<T>& world, const Sequence& seq) {
  const Shape& s = world.shape;
  std::vector<float> rows = seq.qkv;
  for (int64_t p = 0; p < seq.length; ++p) {
    for (int64_t head = 0; head < s.num_q_heads + s.num_kv_heads; ++head) {
      float* x = rows.data() + p * s.row_floats() + head * s.head_dim;
      const std::vector<float> y = rotated(x, world.rope_table.data() + p * s.head_dim, s.head_dim);
      std::copy(y.begin(), y.end(), x);
    }
  }
  for (float& x : rows) x = widen(narrow<T>(x));
  return rows;
}

// Output of one position and head in float64; and the scale of the rounding errors, sum p |v|.
inline void reference_row(const Shape& s, const std::vector<float>& rows, int64_t position, int64_t head,
                          std::vector<double>& out, std::vector<double>& magnitude) {
  const int64_t dim = s.head_dim, kv_head = head / (s.num_q_heads / s.num_kv_heads);
  const auto row = [&](int64_t p, int64_t row_head) { return rows.data() + p * s.row_floats() + row_head * dim; };
  const float* q = row(position, head);
  std::vector<double> scores(position + 1);
  double top = -INFINITY, sum = 0;
  for (int64_t p = 0; p <= position; ++p) {
    const float* key = row(p, s.num_q_heads + kv_head);
    double dot = 0;
    for (int64_t d = 0; d < dim; ++d) dot += static_cast<double>(q[d]) * static_cast<double>(key[d]);
    scores[p] = dot / std::sqrt(static_cast<double>(dim));
    top = std::max(top, scores[p]);
  }
  out.assign(dim, 0);
  magnitude.assign(dim, 0);
  for (int64_t p = 0; p <= position; ++p) {
    const double weight = std::exp(scores[p] - top);
    const float* value = row(p, s.num_q_heads + s.num_kv_heads + kv_head);
    sum += weight;
    for (int64_t d = 0; d < dim; ++d) {
      out[d] += weight * static_cast<double>(value[d]);
      magnitude[d] += weight * std::fabs(static_cast<double>(value[d]));
    }
  }
  for (int64_t d = 0; d < dim; ++d) {
    out[d] /= sum;
    magnitude[d] /= sum;
  }
}

// Error bound relative to sum p |v|: bfloat16 rounds the probabilities and the output once each.
template <class T>
constexpr double kTolerance = sizeof(T) == 2 ? 2.0 / 256 : 2e-5;

// One chunk a sequence, over lengths around every boundary, against float64. `score_scale` stretches the
// scores: at 30 the running maximum jumps by hundreds.
template <class T>
void check_reference(const AttentionVariant& variant, float score_scale, const std::vector<Shape>& shapes) {
  if (!variant.available) return;
  for (const Shape& shape : shapes) {
    std::vector<Sequence> sequences;
    std::vector<Chunk> chunks;
    for (int64_t length : {1, 15, 17, 33, 64, 65, 131, 200}) {
      chunks.push_back({static_cast<int64_t>(chunks.size()), 0, length});
      sequences.emplace_back(shape, length, 100u + static_cast<uint32_t>(length), score_scale);
    }
    const KvWorld<T> world(shape, sequences.size(), 224, 9);
    const auto out = world.step(variant.rope, variant.attention, sequences, chunks, 2);
    double worst = 0;
    std::vector<double> expected, magnitude;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const std::vector<float> rows = rounded_rows(world, sequences[i]);
      for (int64_t p = sequences[i].length - 1; p >= 0; p -= 1 + sequences[i].length / 5) {
        for (int64_t head = 0; head < shape.num_q_heads; head += 1 + shape.num_q_heads / 8) {
          reference_row(shape, rows, p, head, expected, magnitude);
          for (int64_t d = 0; d < shape.head_dim; ++d) {
            const double got = static_cast<double>(
                widen(out[i][(p * shape.num_q_heads + head) * shape.head_dim + d]));
            const double error = std::fabs(got - expected[d]) / (magnitude[d] + 1e-3);
            worst = std::isnan(got) ? INFINITY : std::max(worst, error);
          }
        }
      }
    }
    // Rounding q.k in float32 moves a score by its own size times 2^-24 or so.
    const double bound = kTolerance<T> * (sizeof(T) == 2 ? 1 : std::max(1.0f, score_scale));
    if (!(worst < bound)) {
      std::printf("%s D=%ld group=%ld: error %.3g, bound %.3g\n", variant.name, static_cast<long>(shape.head_dim),
                  static_cast<long>(shape.num_q_heads / shape.num_kv_heads), worst, bound);
    }
    CHECK(worst < bound);
  }
}

// All rows of all sequences, computed in steps of random chunks (at most max_chunk tokens of a sequence).
template <class T>
std::vector<std::vector<T>> outputs(const AttentionVariant& variant, const KvWorld<T>& world,
                                    const std::vector<Sequence>& sequences, int64_t max_chunk, int workers,
                                    uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int64_t> done(sequences.size(), 0);
  std::vector<std::vector<T>> rows(sequences.size());
  for (;;) {
    std::vector<Chunk> chunks;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const int64_t left = sequences[i].length - done[i];
      const int64_t count = std::min<int64_t>(left, max_chunk > 1 ? 1 + random() % max_chunk : 1);
      if (count == 0 || (max_chunk > 1 && random() % 4 == 0)) continue;
      chunks.push_back({static_cast<int64_t>(i), done[i], done[i] + count});
      done[i] += count;
    }
    if (chunks.empty()) {
      bool finished = true;
      for (size_t i = 0; i < sequences.size(); ++i) finished = finished && done[i] == sequences[i].length;
      if (finished) return rows;
      continue;
    }
    const auto out = world.step(variant.rope, variant.attention, sequences, chunks, workers);
    for (size_t i = 0; i < chunks.size(); ++i) {
      auto& all = rows[chunks[i].sequence];
      all.insert(all.end(), out[i].begin(), out[i].end());
    }
  }
}

template <class T>
bool equal_bits(const std::vector<std::vector<T>>& a, const std::vector<std::vector<T>>& b, const char* what) {
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < a[i].size(); ++j) {
      if (j < b[i].size() && std::memcmp(&a[i][j], &b[i][j], sizeof(T)) == 0) continue;
      std::printf("%s: first mismatch in sequence %zu at element %zu of %zu\n", what, i, j, a[i].size());
      return false;
    }
  }
  return true;
}

// A row has the same bits as a decode, in any chunk, alone or packed, by any number of workers, in any pages.
template <class T>
void check_invariance(const AttentionVariant& variant, float score_scale, const std::vector<Shape>& shapes) {
  if (!variant.available) return;
  for (const Shape& shape : shapes) {
    std::vector<Sequence> sequences;
    for (int64_t length : {150, 97, 33}) {
      sequences.emplace_back(shape, length, static_cast<uint32_t>(length), score_scale);
    }
    KvWorld<T> world(shape, sequences.size(), 160, 21);
    std::vector<std::vector<T>> whole;  // each sequence alone, in one chunk, by one worker
    for (int64_t i = 0; i < static_cast<int64_t>(sequences.size()); ++i) {
      whole.push_back(world.step(variant.rope, variant.attention, sequences, {{i, 0, sequences[i].length}}, 1)[0]);
    }
    world.shuffle_pages(22);  // pages now hold the stale rows of other sequences
    CHECK(equal_bits(whole, outputs(variant, world, sequences, 1, 2, 1), "token by token"));
    for (int workers = 1; workers <= 4; ++workers) {
      world.shuffle_pages(30 + static_cast<uint32_t>(workers));
      const int64_t max_chunk = workers % 2 == 1 ? 7 : 90;
      CHECK(equal_bits(whole, outputs(variant, world, sequences, max_chunk, workers, 40u + workers), "chunks"));
    }
  }
}

// More decoding sequences than have splits of their own: one item walks through all its splits.
template <class T>
void check_many_decodes(const AttentionVariant& variant) {
  if (!variant.available) return;
  const Shape shape{3, 1, 16, 32, 32};
  std::vector<Sequence> sequences;
  std::vector<std::vector<T>> few;
  std::vector<Chunk> last;
  const KvWorld<T> world(shape, kernels::kAttentionSplitSeqs + 1, 130, 5);
  for (int64_t i = 0; i <= kernels::kAttentionSplitSeqs; ++i) {
    sequences.emplace_back(shape, 60 + i, static_cast<uint32_t>(i));
    last.push_back({i, 59 + i, 60 + i});
  }
  for (const Chunk& c : last) {
    world.step(variant.rope, variant.attention, sequences, {{c.sequence, 0, c.begin}}, 1);
    few.push_back(world.step(variant.rope, variant.attention, sequences, {c}, 2)[0]);
  }
  CHECK(equal_bits(few, world.step(variant.rope, variant.attention, sequences, last, 2), variant.name));
}

}  // namespace tokenspeed::testing
