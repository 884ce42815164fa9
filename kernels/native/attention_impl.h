// The paged attention of attention.h for one engine: included by attention_<isa>.cpp. An engine supplies the
// matrix products (attention_vector.h has those on vector registers).
#pragma once

#include "attention_plan.h"
#include "attention_softmax.h"

namespace tokenspeed::kernels::TS_ISA {

// A tile of query rows with its softmax state, in the worker's scratch.
template <class Engine>
struct RowTile {
  using Operand = typename Engine::Operand;
  static constexpr int64_t kPadded = kAttentionTileRows + 16;  // rows that vector accesses may reach

  int64_t num_rows, head_dim;
  Operand* q;         // [rows][D]
  float* o;           // [rows][D]: of the current split
  float* merged_o;    // [rows][D]: of all splits before it
  float* lanes;       // l [rows][16]
  float *maximum, *merged_maximum, *merged_sum;  // [rows]
  int32_t* position;  // [rows]: the last position that a row sees
  float* scores[2];   // [16][page_size] each
  Operand* probabilities[2];

  RowTile(const AttentionArgs& args, const AttentionItem& item, std::byte* scratch)
      : num_rows(item.num_rows), head_dim(args.head_dim) {
    float* next = reinterpret_cast<float*>(scratch);
    const auto take = [&next](int64_t floats) {
      float* taken = next;
      next += floats;
      return taken;
    };
    q = reinterpret_cast<Operand*>(take(kAttentionTileRows * head_dim));
    o = take(kAttentionTileRows * head_dim);
    merged_o = take(kAttentionTileRows * head_dim);
    lanes = take(kAttentionTileRows * 16);
    for (float*& s : scores) s = take(16 * args.page_size);
    for (Operand*& p : probabilities) p = reinterpret_cast<Operand*>(take(16 * args.page_size));
    maximum = take(kPadded);
    merged_maximum = take(kPadded);
    merged_sum = take(kPadded);
    position = reinterpret_cast<int32_t*>(take(kPadded));
    load_rows(args, item);
  }

  void load_rows(const AttentionArgs& args, const AttentionItem& item) {
    using Stored = typename Engine::Stored;
    const int64_t group = args.group(), first_position = args.first_position(item.seq);
    for (int64_t r = 0; r < num_rows; ++r) {
      const int64_t token = (item.first_row + r) / group;
      position[r] = static_cast<int32_t>(first_position + token);
      const Stored* row = static_cast<const Stored*>(args.q) + row_offset(args, item, r);
      for (int64_t d = 0; d < head_dim; d += 16) Engine::store_operand(q + r * head_dim + d, load_as_f32(row + d));
    }
  }

  // Where row r lies in q and out, in elements.
  static int64_t row_offset(const AttentionArgs& args, const AttentionItem& item, int64_t r) {
    const int64_t group = args.group();
    const int64_t token = args.cu_seqlens[item.seq] + (item.first_row + r) / group;
    const int64_t head = item.kv_head * group + (item.first_row + r) % group;
    return (token * args.num_q_heads + head) * args.head_dim;
  }

  void restart() {
    for (int64_t i = 0; i < num_rows * head_dim; i += 16) store(o + i, zero());
    for (int64_t r = 0; r < num_rows; ++r) store(lanes + r * 16, zero());
    for (int64_t r = 0; r < kPadded; r += 16) store(maximum + r, set1(kNoMaximum));
  }
  float sum(int64_t r) const { return reduce_add(load(lanes + r * 16)); }
};

// Rows [first, first + rows) of a tile, at most 16, against the KV tile at position `begin`, with what goes from one
// of its three steps to the next: scores, softmax, accumulation.
template <class Engine>
struct BlockStep {
  using Stored = typename Engine::Stored;
  int64_t first, begin;
  int rows, panels;  // panels of 16 positions that some row sees; the same for all rows
  bool fresh;   // the first KV tile of a split: O starts here
  bool masked;  // some row sees less than all panels
  const Stored *k, *v;
  const Stored *next_k, *next_v;  // of the KV tile to come, to be fetched ahead; or null
  float* scores;
  typename Engine::Operand* probabilities;
  int32_t valid[16];  // if masked: positions of the KV tile that a row sees, from its first; none where not above 0
  alignas(64) float alpha[16];

  // False if no row sees the KV tile.
  bool plan(const AttentionArgs& args, const RowTile<Engine>& tile) {
    const int64_t last = tile.position[first + rows - 1];
    if (last < begin) return false;
    const int64_t all = args.page_size / 16, seen = (last - begin) / 16 + 1;
    constexpr int64_t align = Engine::kPanelAlign;
    panels = static_cast<int>(seen >= all ? all : (seen + align - 1) / align * align);
    masked = tile.position[first] - begin + 1 < panels * 16;
    if (!masked) return true;
    for (int r = 0; r < 16; ++r) valid[r] = r < rows ? static_cast<int32_t>(tile.position[first + r] - begin + 1) : 0;
    return true;
  }
};

// How attend_split takes blocks through KV tiles, each in three steps: it fills next() and calls take(), over and
// over, then finish(). An engine that is pipelined computes block i's scores, then the softmax of block i-1, then the
// accumulation of block i-2: steps that do not wait for each other, so that a core may overlap them. Whose turn it is
// changes no bit: blocks share nothing but KV, and those of the same rows follow each other in order.
template <class Engine>
class Walk {
 public:
  Walk(const AttentionArgs& args, RowTile<Engine>& tile) : args_(args), tile_(tile) {}

  BlockStep<Engine>& next() {
    BlockStep<Engine>& step = *back(0);
    step.scores = tile_.scores[taken_ % 2];
    step.probabilities = tile_.probabilities[taken_ % 2];
    return step;
  }
  void take() {
    if constexpr (Engine::kPipelined) {
      Engine::advance(args_, tile_, back(2), back(1), back(0));
      ++taken_;
    } else {
      Engine::advance(args_, tile_, back(0), back(0), back(0));
    }
  }
  void finish() {
    if (taken_ == 0) return;
    Engine::advance(args_, tile_, back(2), back(1), nullptr);
    ++taken_;
    Engine::advance(args_, tile_, back(2), nullptr, nullptr);
  }

 private:
  BlockStep<Engine>* back(int64_t n) { return taken_ >= n ? &steps_[(taken_ - n) % 3] : nullptr; }

  const AttentionArgs& args_;
  RowTile<Engine>& tile_;
  BlockStep<Engine> steps_[3];
  int64_t taken_ = 0;
};

// Computes (m, l, O) of every row of the tile over the positions of one split.
template <class Engine>
void attend_split(const AttentionArgs& args, const AttentionItem& item, int64_t split,
                            RowTile<Engine>& tile) {
  using Stored = typename Engine::Stored;
  const int64_t head_elements = args.page_size * args.head_dim;
  const int64_t first = split * args.split_positions, context = tile.position[tile.num_rows - 1] + 1;
  const int64_t end = context < first + args.split_positions ? context : first + args.split_positions;
  const int32_t* pages = args.page_table + item.seq * args.pages_per_seq;
  // The last tile that this worker will come to: fetching ahead goes on across splits.
  const int64_t reach = args.parallel_splits(item.seq) > 1 ? end : context;
  const bool fetch = args.num_tiles(item.seq) <= Engine::kFetchingTiles;
  const int step = Engine::block_rows(tile.num_rows);
  const auto keys = [&](int64_t position) {
    const std::byte* page = args.kv + pages[position / args.page_size] * args.page_stride;
    return reinterpret_cast<const Stored*>(page) + item.kv_head * head_elements;
  };

  tile.restart();
  Walk<Engine> walk(args, tile);
  for (int64_t begin = first; begin < end; begin += args.page_size) {
    for (int64_t r = 0; r < tile.num_rows; r += step) {
      const int64_t left = tile.num_rows - r;
      const bool last_block = left <= step, ahead = fetch && last_block && begin + args.page_size < reach;
      BlockStep<Engine>& block = walk.next();
      block.first = r;
      block.begin = begin;
      block.rows = static_cast<int>(last_block ? left : step);
      block.fresh = begin == first;
      block.k = keys(begin);
      block.v = block.k + args.num_kv_heads * head_elements;
      block.next_k = ahead ? keys(begin + args.page_size) : nullptr;
      block.next_v = ahead ? block.next_k + args.num_kv_heads * head_elements : nullptr;
      if (block.plan(args, tile)) walk.take();
    }
  }
  walk.finish();
}

template <class Engine>
void merge_tile(RowTile<Engine>& tile, int64_t split, int64_t first_position) {
  const int64_t dim = tile.head_dim;
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    if (tile.position[r] < first_position) continue;
    const float* o = tile.o + r * dim;
    float* merged = tile.merged_o + r * dim;
    if (split == 0) {
      for (int64_t d = 0; d < dim; d += 16) store(merged + d, load(o + d));
      tile.merged_maximum[r] = tile.maximum[r];
      tile.merged_sum[r] = tile.sum(r);
    } else {
      merge_split(tile.merged_maximum + r, tile.merged_sum + r, merged, tile.maximum[r], tile.sum(r), o, dim);
    }
  }
}

// An item that walks through all its splits and writes the output.
template <class Engine>
void attend_rows(const AttentionArgs& args, const AttentionItem& item, RowTile<Engine>& tile) {
  const int64_t splits = args.num_splits(tile.position[tile.num_rows - 1] + 1);
  for (int64_t split = 0; split < splits; ++split) {
    attend_split<Engine>(args, item, split, tile);
    merge_tile(tile, split, split * args.split_positions);
  }
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    auto* out = static_cast<typename Engine::Stored*>(args.out) + tile.row_offset(args, item, r);
    write_output(tile.merged_o + r * args.head_dim, tile.merged_sum[r], args.head_dim, out);
  }
}

// An item that computes one split of a decode row and leaves it in the workspace.
template <class Engine>
void attend_one_split(const AttentionArgs& args, const AttentionItem& item, RowTile<Engine>& tile) {
  const int64_t dim = args.head_dim;
  attend_split<Engine>(args, item, item.split, tile);
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    float* record = args.record(item.seq, item.kv_head * args.group() + item.first_row + r, item.split);
    for (int64_t d = 0; d < dim; d += 16) store(record + d, load(tile.o + r * dim + d));
    record[dim] = tile.maximum[r];
    record[dim + 1] = tile.sum(r);
  }
}

// Merges the splits of a decode row's heads, in ascending order, into the record of the first.
template <class Stored>
void merge_records(const AttentionArgs& args, int64_t seq, int64_t kv_head) {
  const int64_t dim = args.head_dim, splits = args.parallel_splits(seq), group = args.group();
  const int64_t token = args.cu_seqlens[seq];
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    float* row = args.record(seq, head, 0);
    for (int64_t split = 1; split < splits; ++split) {
      const float* next = args.record(seq, head, split);
      merge_split(row + dim, row + dim + 1, row, next[dim], next[dim + 1], next, dim);
    }
    write_output(row, row[dim + 1], dim, static_cast<Stored*>(args.out) + (token * args.num_q_heads + head) * dim);
  }
}

// The node's counter, which starts at 0: claimed items in the lower half, finished ones in the upper. So the
// workspace holds no state, and whoever claims a merge knows when all splits are there. Items are claimed in
// order: by the time a merge is claimed, every split is finished or in the hands of a running worker.
class ItemQueue {
 public:
  explicit ItemQueue(const Invocation& inv) : counter_(*inv.next_item) {}
  int64_t claim() { return counter_.fetch_add(1, std::memory_order_relaxed) & 0xffffffff; }
  void finish() { counter_.fetch_add(int64_t{1} << 32, std::memory_order_release); }
  void wait_finished(int64_t items) const {
    while (counter_.load(std::memory_order_acquire) >> 32 < items) _mm_pause();
  }

 private:
  std::atomic<int64_t>& counter_;
};

template <class Engine>
TS_INLINE void paged_attention(const Invocation& inv) {
  const AttentionArgs args(inv);
  int64_t items = 0, merges = 0;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    items += args.num_items(seq);
    merges += args.num_merges(seq);
  }
  if (items == 0) return;
  [[maybe_unused]] const typename Engine::Session session;
  ItemQueue queue(inv);
  SeqCursor item_cursor(args, &AttentionArgs::num_items), merge_cursor(args, &AttentionArgs::num_merges);

  int64_t index = queue.claim();
  for (; index < items; index = queue.claim()) {
    const int64_t seq = item_cursor.seek(index);
    const AttentionItem item = item_of(args, seq, index);
    RowTile<Engine> tile(args, item, inv.scratch);
    if (args.parallel_splits(seq) > 1) {
      attend_one_split<Engine>(args, item, tile);
    } else {
      attend_rows<Engine>(args, item, tile);
    }
    if (merges > 0) queue.finish();
  }
  for (; index < items + merges; index = queue.claim()) {
    queue.wait_finished(items);
    int64_t merge = index - items;
    const int64_t seq = merge_cursor.seek(merge);
    merge_records<typename Engine::Stored>(args, seq, merge);
  }
}

}  // namespace tokenspeed::kernels::TS_ISA
