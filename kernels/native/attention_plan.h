// How a step of paged attention is cut into items, and in which order workers take them.
#pragma once

#include "attention.h"
#include "simd.h"

namespace tokenspeed::kernels::TS_ISA {

struct AttentionArgs {
  const void* q;
  const std::byte* kv;
  const int32_t* cu_seqlens;
  const int32_t* context_lens;
  const int32_t* page_table;
  void* out;
  float* workspace;
  int64_t num_seqs, num_q_heads, num_kv_heads, head_dim, page_size, page_stride, pages_per_seq, split_positions;
  int64_t group_size;    // q heads of a KV head
  int64_t long_context;  // one decode row above this is worth sharing among workers
  float scale_log2;      // scale * log2 e: scores to exponents of two

  explicit AttentionArgs(const Invocation& inv)
      : q(inv.ptr<const void>(0)), kv(inv.ptr<const std::byte>(1)), cu_seqlens(inv.ptr<const int32_t>(2)),
        context_lens(inv.ptr<const int32_t>(3)), page_table(inv.ptr<const int32_t>(4)), out(inv.ptr<void>(5)),
        workspace(inv.ptr<float>(6)), num_seqs(inv.i64(8)), num_q_heads(inv.i64(9)), num_kv_heads(inv.i64(10)),
        head_dim(inv.i64(11)), page_size(inv.i64(12)), page_stride(inv.i64(13)), pages_per_seq(inv.i64(14)),
        split_positions(inv.i64(15)), scale_log2(static_cast<float>(inv.args[16].f64 * 1.4426950408889634)) {
    group_size = num_q_heads / num_kv_heads;
    int64_t positions = 0;
    for (int64_t seq = 0; seq < num_seqs; ++seq) positions += context_lens[seq];
    long_context = num_kv_heads * positions / (8 * inv.num_workers);
  }

  int64_t group() const { return group_size; }
  int64_t num_tokens(int64_t seq) const { return cu_seqlens[seq + 1] - cu_seqlens[seq]; }
  int64_t first_position(int64_t seq) const { return context_lens[seq] - num_tokens(seq); }
  int64_t num_splits(int64_t positions) const { return (positions + split_positions - 1) / split_positions; }
  int64_t num_tiles(int64_t seq) const {
    return (num_tokens(seq) * group() + kAttentionTileRows - 1) / kAttentionTileRows;
  }
  // Splits of a sequence that are items of their own; 1 where an item walks through all of them, which reads
  // ahead better. Only speed depends on this.
  int64_t parallel_splits(int64_t seq) const {
    const bool shared = num_seqs <= kAttentionSplitSeqs && num_tokens(seq) == 1 && context_lens[seq] > long_context;
    return shared ? num_splits(context_lens[seq]) : 1;
  }
  int64_t num_items(int64_t seq) const { return num_tiles(seq) * num_kv_heads * parallel_splits(seq); }
  int64_t num_merges(int64_t seq) const { return parallel_splits(seq) > 1 ? num_kv_heads : 0; }

  // The workspace record of a decode row's split: O, then m and l.
  int64_t record_floats() const { return head_dim + 16; }
  float* record(int64_t seq, int64_t head, int64_t split) const {
    const int64_t max_splits = num_splits(pages_per_seq * page_size);
    return workspace + ((seq * num_q_heads + head) * max_splits + split) * record_floats();
  }
};

// Rows [first_row, first_row + num_rows) of the (token, head in group) rows of a sequence.
struct AttentionItem {
  int64_t seq, kv_head, first_row, num_rows;
  int64_t split;  // of parallel_splits(seq)
};

// Finds the sequence of an item or merge index. Indexes only grow, as a worker's claims do.
class SeqCursor {
 public:
  using Count = int64_t (AttentionArgs::*)(int64_t) const;
  SeqCursor(const AttentionArgs& args, Count count) : args_(args), count_(count), items_((args.*count)(0)) {}

  // Leaves `index` relative to the sequence. The caller stays below the total count.
  int64_t seek(int64_t& index) {
    while (index >= base_ + items_) {
      base_ += items_;
      items_ = (args_.*count_)(++seq_);
    }
    index -= base_;
    return seq_;
  }

 private:
  const AttentionArgs& args_;
  Count count_;
  int64_t seq_ = 0, base_ = 0, items_;
};

// Within a sequence: head by head, so that a head's KV stays in a near cache, and the longest tile first.
TS_INLINE AttentionItem item_of(const AttentionArgs& args, int64_t seq, int64_t index) {
  const int64_t tiles = args.num_tiles(seq), splits = args.parallel_splits(seq);
  const int64_t rows = args.num_tokens(seq) * args.group();
  const int64_t tile = tiles - 1 - index / splits % tiles;
  AttentionItem item;
  item.seq = seq;
  item.kv_head = index / (tiles * splits);
  item.first_row = tile * kAttentionTileRows;
  item.num_rows = rows - item.first_row < kAttentionTileRows ? rows - item.first_row : kAttentionTileRows;
  item.split = index % splits;
  return item;
}

}  // namespace tokenspeed::kernels::TS_ISA
