// rope_kv_write: rotation, rounding, page layout, zeroing of fresh blocks, and independence of chunking.
#include <cmath>
#include <random>

#include "kv_fixture.h"
#include "rope_table.h"
#include "test.h"

using namespace tokenspeed::testing;
namespace k = tokenspeed::kernels;

namespace {

struct Variant {
  const char* name;
  KernelFn fn;
  bool available;
};

template <class T>
std::vector<Variant> variants();
template <>
std::vector<Variant> variants<float>() {
  return {{"avx2", k::rope_kv_write_f32_avx2, __builtin_cpu_supports("avx2") != 0},
          {"avx512", k::rope_kv_write_f32_avx512, __builtin_cpu_supports("avx512vl") != 0}};
}
template <>
std::vector<Variant> variants<uint16_t>() {
  return {{"avx2", k::rope_kv_write_bf16_avx2, __builtin_cpu_supports("avx2") != 0},
          {"avx512", k::rope_kv_write_bf16_avx512, __builtin_cpu_supports("avx512vl") != 0}};
}

// The layouts of rope.h, element by element.
template <class T>
int64_t k_index(const Shape& s, int64_t head, int64_t position, int64_t d) {
  const int64_t pair = sizeof(T) == 2 ? 2 : 1;
  return ((head * (s.page_size / 16) + position / 16) * (s.head_dim / pair) + d / pair) * 16 * pair +
         position % 16 * pair + d % pair;
}
template <class T>
int64_t v_index(const Shape& s, int64_t head, int64_t position, int64_t d) {
  const int64_t pair = sizeof(T) == 2 ? 2 : 1;
  return s.num_kv_heads * s.page_size * s.head_dim +
         ((head * (s.head_dim / 16) + d / 16) * (s.page_size / pair) + position / pair) * 16 * pair + d % 16 * pair +
         position % pair;
}

// Runs the kernel alone over the chunks; returns q [tokens][NQ D].
template <class T>
std::vector<T> write(const KvWorld<T>& world, KernelFn fn, const std::vector<Sequence>& sequences,
                     const std::vector<Chunk>& chunks, int workers) {
  const Shape& s = world.shape;
  std::vector<float> qkv;
  std::vector<int32_t> positions, cu_seqlens{0};
  std::vector<int64_t> slots;
  for (const Chunk& c : chunks) {
    const auto row = [&](int64_t p) { return sequences[c.sequence].qkv.begin() + p * s.row_floats(); };
    qkv.insert(qkv.end(), row(c.begin), row(c.end));
    for (int64_t p = c.begin; p < c.end; ++p) {
      positions.push_back(static_cast<int32_t>(p));
      slots.push_back(world.pages[c.sequence][p / s.page_size] * s.page_size + p % s.page_size);
    }
    cu_seqlens.push_back(static_cast<int32_t>(positions.size()));
  }
  const int64_t tokens = positions.size(), num_seqs = chunks.size();
  Aligned<T> q(tokens * s.num_q_heads * s.head_dim);
  run_kernel(fn,
             {arg(qkv.data()), arg(world.rope_table.data()), arg(positions.data()), arg(slots.data()),
              arg(cu_seqlens.data()), arg(world.layer()), arg(q.data), arg(tokens), arg(num_seqs), arg(s.num_q_heads),
              arg(s.num_kv_heads), arg(s.head_dim), arg(s.page_size), arg(world.page_stride)},
             k::kRopeScratchBytes, workers);
  return {q.data, q.data + q.size};
}

template <class T>
bool same_bits(T a, T b) { return std::memcmp(&a, &b, sizeof(T)) == 0; }

// Checks every element of K and V of the world against the sequences, each written up to `length`.
template <class T>
void check_pages(const KvWorld<T>& world, const std::vector<Sequence>& sequences, const char* what) {
  const Shape& s = world.shape;
  int64_t wrong = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const int64_t length = sequences[i].length;
    for (int64_t p = 0; p < (length + 31) / 32 * 32; ++p) {
      const T* page = reinterpret_cast<const T*>(world.layer() + world.pages[i][p / s.page_size] * world.page_stride);
      const int64_t in_page = p % s.page_size;
      for (int64_t head = 0; head < s.num_kv_heads; ++head) {
        std::vector<float> key(s.head_dim);
        const float* row = sequences[i].qkv.data() + p * s.row_floats();
        if (p < length) {
          const float* angles = world.rope_table.data() + p * s.head_dim;
          key = rotated(row + (s.num_q_heads + head) * s.head_dim, angles, s.head_dim);
        }
        const float* value = row + (s.num_q_heads + s.num_kv_heads + head) * s.head_dim;
        for (int64_t d = 0; d < s.head_dim; ++d) {
          const T v = p < length ? narrow<T>(value[d]) : T{0};
          wrong += !same_bits(page[v_index<T>(s, head, in_page, d)], v);
          if (p < length) wrong += !same_bits(page[k_index<T>(s, head, in_page, d)], narrow<T>(key[d]));
        }
      }
    }
  }
  if (wrong != 0) std::printf("%s: %ld elements differ\n", what, static_cast<long>(wrong));
  CHECK(wrong == 0);
}

const Shape kShapes[] = {
    {9, 3, 64, 64, 1024}, {4, 4, 80, 32, 64}, {8, 1, 128, 96, 96}, {2, 2, 16, 32, 64}, {3, 1, 48, 64, 64},
};

template <class T>
void check_layouts() {
  for (const Shape& shape : kShapes) {
    const int64_t lengths[] = {1, 31, 32, 33, 70, 129};
    std::vector<Sequence> sequences;
    std::vector<Chunk> whole;
    for (int64_t length : lengths) {
      whole.push_back({static_cast<int64_t>(sequences.size()), 0, length});
      sequences.emplace_back(shape, length, 7u + static_cast<uint32_t>(length));
    }
    for (const Variant& v : variants<T>()) {
      if (!v.available) continue;
      KvWorld<T> world(shape, sequences.size(), 160, 3);
      const std::vector<T> q = write(world, v.fn, sequences, whole, 2);
      check_pages(world, sequences, v.name);
      int64_t wrong = 0, token = 0;
      for (const Sequence& s : sequences) {
        for (int64_t p = 0; p < s.length; ++p, ++token) {
          for (int64_t head = 0; head < shape.num_q_heads; ++head) {
            const auto y = rotated(s.qkv.data() + p * shape.row_floats() + head * shape.head_dim,
                                   world.rope_table.data() + p * shape.head_dim, shape.head_dim);
            for (int64_t d = 0; d < shape.head_dim; ++d) {
              wrong += !same_bits(q[(token * shape.num_q_heads + head) * shape.head_dim + d], narrow<T>(y[d]));
            }
          }
        }
      }
      CHECK(wrong == 0);
    }
  }
}

// Token by token, and in random chunks packed in random steps, by 1 to 4 workers: the same pages.
template <class T>
void check_chunking() {
  std::mt19937 random(11);
  for (const Shape& shape : kShapes) {
    std::vector<Sequence> sequences;
    for (int64_t length : {64, 77, 100}) sequences.emplace_back(shape, length, static_cast<uint32_t>(length));
    for (const Variant& v : variants<T>()) {
      if (!v.available) continue;
      for (int max_chunk : {1, 3, 40}) {
        KvWorld<T> world(shape, sequences.size(), 128, 5);
        std::vector<int64_t> done(sequences.size(), 0);
        for (bool more = true; more;) {
          std::vector<Chunk> chunks;
          for (size_t i = 0; i < sequences.size(); ++i) {
            const int64_t left = sequences[i].length - done[i];
            const int64_t count = std::min<int64_t>(left, 1 + random() % max_chunk);
            if (count > 0) chunks.push_back({static_cast<int64_t>(i), done[i], done[i] + count});
            done[i] += count;
          }
          more = !chunks.empty();
          if (more) write(world, v.fn, sequences, chunks, 1 + static_cast<int>(random() % 4));
        }
        check_pages(world, sequences, v.name);
      }
    }
  }
}

}  // namespace

TEST(layout_and_rotation_f32) { check_layouts<float>(); }
TEST(layout_and_rotation_bf16) { check_layouts<uint16_t>(); }
TEST(chunking_never_matters_f32) { check_chunking<float>(); }
TEST(chunking_never_matters_bf16) { check_chunking<uint16_t>(); }

TEST(neighbouring_layers_and_pages_are_untouched) {
  const Shape shape{4, 2, 32, 32, 64};
  const std::vector<Sequence> sequences{{shape, 40, 1}};
  KvWorld<float> world(shape, 1, 64, 2);
  write(world, k::rope_kv_write_f32_avx2, sequences, {{0, 0, 40}}, 2);
  int64_t touched = 0;
  for (int64_t page = 0; page < world.num_pages; ++page) {
    const auto& used = world.pages[0];
    const bool mine = page == used[0] || page == used[1];
    const auto* bytes = reinterpret_cast<const uint8_t*>(world.kv.data + page * world.page_stride);
    const int64_t end = mine ? world.layer_bytes() : world.page_stride;  // layer 0, or all layers
    for (int64_t i = 0; i < end; ++i) touched += bytes[i] != 0xff;
  }
  CHECK(touched == 0);
}

// An angle's sine and cosine in the precision of long double, rounded once.
static bool exact(float angle) {
  const k::CosSin turn = k::cos_sin(angle);
  return turn.cos == static_cast<float>(cosl(static_cast<long double>(angle))) &&
         turn.sin == static_cast<float>(sinl(static_cast<long double>(angle)));
}

TEST(cosines_and_sines_are_rounded_once) {
  std::mt19937 random(1);
  int64_t wrong = 0;
  for (int i = 0; i < 300000; ++i) {  // every magnitude below 2^20, subnormal ones among them
    const uint32_t bits = static_cast<uint32_t>(random()) % 0x49800000u;
    float angle;
    std::memcpy(&angle, &bits, 4);
    wrong += !exact(angle);
  }
  for (int n = 0; n < 660000; n += 7) {  // around multiples of pi / 2, where the reduction cancels
    const float angle = static_cast<float>(n * 1.5707963267948966);
    wrong += !exact(angle) + !exact(std::nextafterf(angle, 1e9f));
  }
  CHECK(wrong == 0);
}

TEST(rope_tables_hold_cosines_then_sines_of_rounded_products) {
  const int64_t positions = 201, head_dim = 48, half = head_dim / 2;
  std::vector<float> frequencies;
  for (int64_t i = 0; i < half; ++i) frequencies.push_back(std::pow(10000.0f, -static_cast<float>(i) / half));
  const float factor = 1.2079441f;
  std::vector<float> first;
  for (int workers : {1, 3}) {
    std::vector<float> table(static_cast<size_t>(positions * head_dim), -1.0f);
    run_kernel(k::rope_table_avx2,
               {arg(frequencies.data()), arg(table.data()), arg(positions), arg(head_dim), arg(double{factor})}, 0,
               workers);
    int64_t wrong = 0;
    for (int64_t p = 0; p < positions; ++p) {
      for (int64_t i = 0; i < half; ++i) {
        const k::CosSin turn = k::cos_sin(static_cast<float>(p) * frequencies[static_cast<size_t>(i)]);
        const float* row = table.data() + p * head_dim;
        wrong += row[i] != factor * turn.cos || row[half + i] != factor * turn.sin;
      }
    }
    CHECK(wrong == 0);
    if (workers == 1) first = table;
    CHECK(table == first);
  }
}

TEST_MAIN
