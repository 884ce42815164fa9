// The rotary embedding and KV write of rope.h for one instruction set: included by rope_<isa>.cpp.
#pragma once

#include "rope.h"
#include "simd.h"

namespace tokenspeed::kernels::TS_ISA {

struct RopeArgs {
  const float* qkv;
  const float* rope_table;
  const int32_t* positions;
  const int64_t* slot_mapping;
  const int32_t* cu_seqlens;
  std::byte* kv;
  void* q_out;
  int64_t num_seqs, num_q_heads, num_kv_heads, head_dim, page_size, page_stride;

  explicit RopeArgs(const Invocation& inv)
      : qkv(inv.ptr<const float>(0)), rope_table(inv.ptr<const float>(1)), positions(inv.ptr<const int32_t>(2)),
        slot_mapping(inv.ptr<const int64_t>(3)), cu_seqlens(inv.ptr<const int32_t>(4)), kv(inv.ptr<std::byte>(5)),
        q_out(inv.ptr<void>(6)), num_seqs(inv.i64(8)), num_q_heads(inv.i64(9)), num_kv_heads(inv.i64(10)),
        head_dim(inv.i64(11)), page_size(inv.i64(12)), page_stride(inv.i64(13)) {}

  int64_t row_floats() const { return (num_q_heads + 2 * num_kv_heads) * head_dim; }
};

// Tokens of one sequence that fall into one block of kKvBlock positions.
struct KvRun {
  int64_t token, count;
  int64_t offset;  // of the first token in its block
};

// Walks the runs of a step in order; `seek` only moves forward, as a worker's claims do.
class RunCursor {
 public:
  explicit RunCursor(const RopeArgs& args) : args_(args) { enter(0); }

  bool seek(int64_t index, KvRun& run) {
    while (index >= base_ + runs_) {
      if (seq_ + 1 >= args_.num_seqs) return false;
      base_ += runs_;
      enter(seq_ + 1);
    }
    const int64_t block = index - base_;
    const int64_t begin = block == 0 ? 0 : block * kKvBlock - first_offset_;
    const int64_t end = (block + 1) * kKvBlock - first_offset_;
    run.token = first_token_ + begin;
    run.count = (end < tokens_ ? end : tokens_) - begin;
    run.offset = block == 0 ? first_offset_ : 0;
    return true;
  }

 private:
  void enter(int64_t seq) {
    seq_ = seq;
    first_token_ = args_.cu_seqlens[seq];
    tokens_ = args_.cu_seqlens[seq + 1] - first_token_;
    first_offset_ = tokens_ > 0 ? args_.positions[first_token_] % kKvBlock : 0;
    runs_ = tokens_ > 0 ? (first_offset_ + tokens_ + kKvBlock - 1) / kKvBlock : 0;
  }

  const RopeArgs& args_;
  int64_t seq_ = 0, base_ = 0, runs_ = 0, first_token_ = 0, tokens_ = 0, first_offset_ = 0;
};

// out = the rotation of x by the angles of `table`: dims i and i + D/2 form a plane.
TS_INLINE void rotate(const float* x, const float* table, int64_t head_dim, float* out) {
  const int64_t half = head_dim / 2;
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    const f32x16 a = load(x + i), b = load(x + half + i), cosine = load(table + i), sine = load(table + half + i);
    store(out + i, sub(mul(a, cosine), mul(b, sine)));
    store(out + half + i, add(mul(b, cosine), mul(a, sine)));
  }
  if (i == half) return;
  const mask16 live = first_lanes(static_cast<int>(half - i));
  const f32x16 a = load_masked(x + i, live), b = load_masked(x + half + i, live);
  const f32x16 cosine = load_masked(table + i, live), sine = load_masked(table + half + i, live);
  store_masked(out + i, live, sub(mul(a, cosine), mul(b, sine)));
  store_masked(out + half + i, live, add(mul(b, cosine), mul(a, sine)));
}

TS_INLINE void write_query(const float* rotated, int64_t head_dim, float* out) {
  for (int64_t d = 0; d < head_dim; d += 16) store(out + d, load(rotated + d));
}
TS_INLINE void write_query(const float* rotated, int64_t head_dim, bf16* out) {
  for (int64_t d = 0; d < head_dim; d += 16) store_bf16(out + d, load(rotated + d));
}

// keys [count][D] become lanes first.. of K panels; all lie within one block, hence in two panels at most.
TS_INLINE void write_keys(const float* keys, int64_t count, int64_t first, int64_t head_dim, float* k_head) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t p = first + i;
    float* lane = k_head + p / 16 * head_dim * 16 + p % 16;
    for (int64_t d = 0; d < head_dim; ++d) lane[d * 16] = keys[i * head_dim + d];
  }
}
TS_INLINE void write_keys(const float* keys, int64_t count, int64_t first, int64_t head_dim, bf16* k_head) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t p = first + i;
    bf16* lane = k_head + p / 16 * head_dim * 16 + p % 16 * 2;
    alignas(64) bf16 rounded[kRopeMaxHeadDim];
    for (int64_t d = 0; d < head_dim; d += 16) store_bf16(rounded + d, load(keys + i * head_dim + d));
    for (int64_t d = 0; d < head_dim; d += 2) std::memcpy(lane + d * 16, rounded + d, 2 * sizeof(bf16));
  }
}

// values[i * stride] is the row of position first + i; v_head is V of one head in the page.
TS_INLINE void write_values(const float* values, int64_t stride, int64_t count, int64_t first, int64_t head_dim,
                            int64_t page_size, float* v_head) {
  for (int64_t d = 0; d < head_dim; d += 16) {
    float* panel = v_head + d * page_size;
    for (int64_t i = 0; i < count; ++i) store(panel + (first + i) * 16, load(values + i * stride + d));
  }
}
TS_INLINE void write_values(const float* values, int64_t stride, int64_t count, int64_t first, int64_t head_dim,
                            int64_t page_size, bf16* v_head) {
  for (int64_t d = 0; d < head_dim; d += 16) {
    bf16* panel = v_head + d * page_size;
    for (int64_t i = 0; i < count;) {
      const int64_t p = first + i;
      bf16* row = panel + p / 2 * 32;
      const float* value = values + i * stride + d;
      if (p % 2 == 0 && i + 1 < count) {
        store_pairs(row, load(value), load(value + stride));
        i += 2;
        continue;
      }
      alignas(32) bf16 rounded[16];  // half of a pair: the other half is another step's
      store_bf16(rounded, load(value));
      for (int lane = 0; lane < 16; ++lane) row[lane * 2 + p % 2] = rounded[lane];
      ++i;
    }
  }
}

// Zeroes V of the block that `position` (in the page) starts, for one head.
template <class Stored>
TS_INLINE void zero_block(int64_t position, int64_t head_dim, int64_t page_size, Stored* v_head) {
  for (int64_t d = 0; d < head_dim; d += 16) {
    std::memset(v_head + d * page_size + position * 16, 0, kKvBlock * 16 * sizeof(Stored));
  }
}

// One item: the tokens of a run, for one kv head and the q heads that share it.
template <class Stored>
TS_INLINE void rope_item(const RopeArgs& args, const KvRun& run, int64_t kv_head, float* scratch) {
  const int64_t dim = args.head_dim, group = args.num_q_heads / args.num_kv_heads;
  const int64_t slot = args.slot_mapping[run.token];
  const int64_t page = slot / args.page_size, in_page = slot % args.page_size;
  const int64_t head_elements = args.page_size * dim;
  Stored* k_head = reinterpret_cast<Stored*>(args.kv + page * args.page_stride) + kv_head * head_elements;
  Stored* v_head = k_head + args.num_kv_heads * head_elements;
  float* keys = scratch;
  float* rotated = scratch + kKvBlock * kRopeMaxHeadDim;

  for (int64_t i = 0; i < run.count; ++i) {
    const int64_t token = run.token + i;
    const float* row = args.qkv + token * args.row_floats();
    const float* table = args.rope_table + args.positions[token] * dim;
    Stored* q_out = static_cast<Stored*>(args.q_out) + token * args.num_q_heads * dim;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      rotate(row + head * dim, table, dim, rotated);
      write_query(rotated, dim, q_out + head * dim);
    }
    rotate(row + (args.num_q_heads + kv_head) * dim, table, dim, keys + i * dim);
  }
  write_keys(keys, run.count, in_page, dim, k_head);
  if (run.offset == 0 && run.count < kKvBlock) zero_block(in_page, dim, args.page_size, v_head);
  const float* values = args.qkv + run.token * args.row_floats();
  write_values(values + (args.num_q_heads + args.num_kv_heads + kv_head) * dim, args.row_floats(), run.count, in_page,
               dim, args.page_size, v_head);
}

template <class Stored>
TS_INLINE void rope_kv_write(const Invocation& inv) {
  const RopeArgs args(inv);
  if (args.num_seqs <= 0) return;
  RunCursor cursor(args);
  KvRun run;
  for (;;) {
    const int64_t item = inv.claim();
    if (!cursor.seek(item / args.num_kv_heads, run)) return;
    rope_item<Stored>(args, run, item % args.num_kv_heads, reinterpret_cast<float*>(inv.scratch));
  }
}

}  // namespace tokenspeed::kernels::TS_ISA
