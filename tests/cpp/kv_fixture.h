// What the rope and attention tests share: running a kernel on threads, sequences with random q, k and v,
// and steps that go through rope_kv_write and paged_attention over poisoned, shuffled pages.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "attention.h"
#include "rope.h"

namespace tokenspeed::testing {

using kernels::ArgValue;
using kernels::Invocation;
using kernels::KernelFn;

inline ArgValue arg(const void* p) { ArgValue v; v.pointer = const_cast<void*>(p); return v; }
inline ArgValue arg(int64_t i) { ArgValue v; v.i64 = i; return v; }
inline ArgValue arg(double f) { ArgValue v; v.f64 = f; return v; }

template <class T>
struct Aligned {  // 64-byte aligned storage whose size the sanitizers see
  T* data;
  size_t size;
  explicit Aligned(size_t n) : size(n) {
    data = static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64));
    std::memset(static_cast<void*>(data), 0xff, (n * sizeof(T) + 63) / 64 * 64);  // NaN in float32 and bfloat16
  }
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
};

// Scratch of a worker, of exactly that size; it keeps what earlier kernels left there.
inline std::byte* scratch_of(size_t bytes, int worker) {
  static std::map<std::pair<size_t, int>, Aligned<std::byte>> pool;
  return pool.try_emplace({bytes, worker}, bytes).first->second.data;
}

inline void run_kernel(KernelFn fn, const std::vector<ArgValue>& args, size_t scratch_bytes, int num_workers) {
  std::atomic<int64_t> next_item{0};
  const auto work = [&](int worker, std::byte* scratch) {
    fn({args.data(), static_cast<uint32_t>(args.size()), worker, num_workers, &next_item, scratch, scratch_bytes});
  };
  std::vector<std::thread> threads;
  for (int w = 1; w < num_workers; ++w) threads.emplace_back(work, w, scratch_of(scratch_bytes, w));
  work(0, scratch_of(scratch_bytes, 0));
  for (auto& t : threads) t.join();
}

// float <-> bfloat16, written for the tests alone.
inline float widen(float x) { return x; }
inline float widen(uint16_t x) {
  const uint32_t w = uint32_t{x} << 16;
  float f;
  std::memcpy(&f, &w, 4);
  return f;
}
template <class T>
T narrow(float x);
template <>
inline float narrow<float>(float x) { return x; }
template <>
inline uint16_t narrow<uint16_t>(float x) {
  uint32_t w;
  std::memcpy(&w, &x, 4);
  const uint32_t rest = w & 0xffff, upper = w >> 16;
  return static_cast<uint16_t>(upper + (rest > 0x8000 || (rest == 0x8000 && (upper & 1))));
}

struct Shape {
  int64_t num_q_heads, num_kv_heads, head_dim, page_size, split_positions;
  int64_t row_floats() const { return (num_q_heads + 2 * num_kv_heads) * head_dim; }
};

// One row of qkv for every position of a sequence.
struct Sequence {
  std::vector<float> qkv;
  int64_t length;
  Sequence(const Shape& shape, int64_t positions, uint32_t seed, float q_scale = 1.0f)
      : qkv(positions * shape.row_floats()), length(positions) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& x : qkv) x = normal(random);
    for (int64_t p = 0; p < positions; ++p) {
      for (int64_t i = 0; i < shape.num_q_heads * shape.head_dim; ++i) qkv[p * shape.row_floats() + i] *= q_scale;
    }
  }
};

inline std::vector<float> make_rope_table(int64_t positions, int64_t head_dim) {
  std::vector<float> table(positions * head_dim);
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t i = 0; i < head_dim / 2; ++i) {
      const double angle = static_cast<double>(p) * std::pow(10000.0, -2.0 * static_cast<double>(i) / head_dim);
      table[p * head_dim + i] = static_cast<float>(std::cos(angle));
      table[p * head_dim + head_dim / 2 + i] = static_cast<float>(std::sin(angle));
    }
  }
  return table;
}

// Tokens [begin, end) of a sequence in a step.
struct Chunk {
  int64_t sequence, begin, end;
};

// KV pages and page tables for some sequences; runs steps over them. T is float or uint16_t (bfloat16).
template <class T>
class KvWorld {
 public:
  static constexpr int64_t kLayers = 2, kLayer = 1;  // the layer under test has a neighbour to spoil
  Shape shape;
  int64_t pages_per_seq, page_stride, num_pages;
  Aligned<std::byte> kv;
  std::vector<std::vector<int32_t>> pages;  // of each sequence
  std::vector<float> rope_table;

  KvWorld(const Shape& s, int64_t num_seqs, int64_t max_len, uint32_t seed)
      : shape(s), pages_per_seq((max_len + s.page_size - 1) / s.page_size + 1),
        page_stride(kLayers * layer_bytes()), num_pages(num_seqs * pages_per_seq + 1), kv(num_pages * page_stride),
        pages(num_seqs), rope_table(make_rope_table(max_len, s.head_dim)) {
    shuffle_pages(seed);
  }

  int64_t layer_bytes() const { return 2 * shape.num_kv_heads * shape.page_size * shape.head_dim * sizeof(T); }
  std::byte* layer() const { return kv.data + kLayer * layer_bytes(); }
  void shuffle_pages(uint32_t seed) {
    std::vector<int32_t> order(num_pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    for (size_t i = 0; i < pages.size(); ++i) {
      pages[i].assign(order.begin() + i * pages_per_seq, order.begin() + (i + 1) * pages_per_seq);
    }
  }

  // Runs one step; the attention output of chunk i goes to rows of out[i]: [tokens][NQ * D].
  std::vector<std::vector<T>> step(KernelFn rope, KernelFn attention, const std::vector<Sequence>& sequences,
                                   const std::vector<Chunk>& chunks, int num_workers) const {
    const int64_t num_seqs = chunks.size(), q_row = shape.num_q_heads * shape.head_dim;
    std::vector<float> qkv;
    std::vector<int32_t> positions, cu_seqlens{0}, context_lens, page_table;
    std::vector<int64_t> slots;
    for (const Chunk& c : chunks) {
      const Sequence& s = sequences[c.sequence];
      qkv.insert(qkv.end(), s.qkv.begin() + c.begin * shape.row_floats(), s.qkv.begin() + c.end * shape.row_floats());
      for (int64_t p = c.begin; p < c.end; ++p) {
        positions.push_back(static_cast<int32_t>(p));
        slots.push_back(pages[c.sequence][p / shape.page_size] * shape.page_size + p % shape.page_size);
      }
      cu_seqlens.push_back(static_cast<int32_t>(positions.size()));
      context_lens.push_back(static_cast<int32_t>(c.end));
      page_table.insert(page_table.end(), pages[c.sequence].begin(), pages[c.sequence].end());
    }
    const int64_t tokens = positions.size();
    Aligned<T> q(tokens * q_row), out(tokens * q_row);
    run_kernel(rope,
               {arg(qkv.data()), arg(rope_table.data()), arg(positions.data()), arg(slots.data()),
                arg(cu_seqlens.data()), arg(layer()), arg(q.data), arg(tokens), arg(num_seqs), arg(shape.num_q_heads),
                arg(shape.num_kv_heads), arg(shape.head_dim), arg(shape.page_size), arg(page_stride)},
               kernels::kRopeScratchBytes, num_workers);
    const int64_t max_splits =
        (pages_per_seq * shape.page_size + shape.split_positions - 1) / shape.split_positions;
    Aligned<std::byte> workspace(
        kernels::attention_workspace_bytes(num_seqs, shape.num_q_heads, shape.head_dim, max_splits));
    run_kernel(attention,
               {arg(q.data), arg(layer()), arg(cu_seqlens.data()), arg(context_lens.data()), arg(page_table.data()),
                arg(out.data), arg(workspace.data), arg(tokens), arg(num_seqs), arg(shape.num_q_heads),
                arg(shape.num_kv_heads), arg(shape.head_dim), arg(shape.page_size), arg(page_stride),
                arg(pages_per_seq), arg(shape.split_positions),
                arg(1.0 / std::sqrt(static_cast<double>(shape.head_dim)))},
               kernels::kAttentionScratchBytes, num_workers);
    std::vector<std::vector<T>> rows;
    for (int64_t i = 0; i < num_seqs; ++i) {
      rows.emplace_back(out.data + cu_seqlens[i] * q_row, out.data + cu_seqlens[i + 1] * q_row);
    }
    return rows;
  }
};

// x rotated as the kernel does it, in float32 and before rounding.
inline std::vector<float> rotated(const float* x, const float* table, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  std::vector<float> y(head_dim);
  for (int64_t i = 0; i < half; ++i) {
    y[i] = x[i] * table[i] - x[half + i] * table[half + i];
    y[half + i] = x[half + i] * table[i] + x[i] * table[half + i];
  }
  return y;
}

}  // namespace tokenspeed::testing
