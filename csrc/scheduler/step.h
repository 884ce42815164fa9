// One forward pass as flat arrays, named and typed as INPUTS of tokenspeed/step.py, written where the device reads
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "check/check.h"
#include "scheduler/config.h"

namespace tokenspeed::scheduler {

// What a logit row is for.
struct RowInfo {
  int64_t request_id;
  bool is_prompt_row;  // asks the log-probability of a prompt token; else draws a token
};

// Memory of a step's inputs: tensor i of STEP_SIZES and INPUTS in tokenspeed/step.py lies at byte offsets[i] of `io`,
// with room for the envelope's largest step. It outlives the steps in it.
struct StepMemory {
  static constexpr size_t kNumTensors = 30;
  std::span<std::byte> io;
  std::vector<uint64_t> offsets;
};

// A request that a step takes from the queue.
struct Admission {
  int64_t request_id;
  int32_t num_cached_tokens;    // that are not computed again
  int32_t num_restored_tokens;  // of these, those whose pages come back from the host tier
  int64_t waited_ns;            // since it was submitted, or preempted
  bool is_resumed;              // it had been preempted
};

// A page that moves between device and host before a step runs: all that leave the device, then all that come.
struct PageMove {
  int32_t device_page;
  int32_t host_page;
};

// Why a plan admits no (further) request.
enum class Held : uint8_t { NothingWaits, Tokens, LogitRows, Pages, Slots, ChunkFirst, Decodes };

// What was decided with a step, and seen at that time.
struct Decision {
  Held held = Held::NothingWaits;
  int64_t now_ns = 0;
  int32_t num_decodes = 0, num_chunks = 0;
  int32_t num_decode_tokens = 0, num_prefill_tokens = 0;
  int32_t num_waiting = 0, num_running = 0;  // when it was planned
  int32_t num_free_pages = 0, num_cached_pages = 0;  // of the device; cached: in no request's use
  int32_t num_evicted_pages = 0;
  std::vector<Admission> admitted;
  std::vector<int64_t> preempted;  // since the step before
};

// A step fills the first num_tokens, num_seqs, num_logit_rows entries, and of adjustments as many as there are. A
// page_table row is filled as far as its sequence has pages. The arrays are written to anew once the step has
// committed.
class Step {
 public:
  // In memory of its own, without `memory`. Throws std::invalid_argument when a tensor does not fit.
  explicit Step(const SchedulerConfig& config, const StepMemory* memory = nullptr);
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  // Empties the step for reuse; allocates nothing.
  void clear(int64_t new_id) noexcept;

  // A decode of a request, which is what `tag` stands for: a row that holds a decode of the same tag gets only what
  // changes from step to step. Decodes come before all chunks. `pages` are the `num_pages` up to `page`, that of
  // `position`; the token is read on the device from the last-token table at `slot`.
  void add_decode(uint64_t tag, int64_t request_id, const RequestParams& params, int32_t slot, int32_t position,
                  const int32_t* pages, int32_t num_pages, int32_t page) noexcept {
    TS_ASSERT(num_decodes == num_tokens && num_decodes < max_seqs_, "decodes come before chunks, and have room");
    const int32_t row = num_decodes++;
    num_tokens = num_seqs = num_logit_rows = num_decodes;
    const DecodeRow& held = decode_rows_[static_cast<size_t>(row)];
    if (held.tag != tag) write_decode(row, tag, request_id, params, slot);
    if (held.num_pages != num_pages) write_pages(row, pages, num_pages);
    positions[row] = position;
    slot_mapping[row] = int64_t{page} * page_size + position % page_size;
    context_lens[row] = draw_position[row] = position + 1;
  }

  // The next sequence: known tokens from `first_position` on. `pages` are the sequence's pages, up to that of its last
  // position here.
  void add_chunk(std::span<const int32_t> tokens, int32_t first_position, std::span<const int32_t> pages) noexcept;

  // Rows of the chunk added last. `token_row` counts from the step's first token.
  void add_prompt_row(int64_t request_id, const RequestParams& params, int32_t token_row, int32_t position,
                      int32_t target) noexcept;
  // Draws from the step's last token; returns the row.
  int32_t add_draw_row(int64_t request_id, const RequestParams& params, int32_t position, int32_t slot) noexcept;

  // What the sequence added last asks of its logits. `row` is its row that draws, or -1; penalties count its tokens
  // under `slot`, of which the first `num_prompt` are the prompt's.
  void add_adjustment(const RequestParams& params, int32_t row, int32_t slot, int32_t num_prompt) noexcept;

  // The step is whole: writes step_sizes. Rows that it wrote as a chunk's are nobody's decode any more.
  void finish() noexcept;

  // Reads what the next step of `count` decodes will write, and changes nothing.
  void warm(size_t count) const noexcept;

  bool is_decode_only() const noexcept { return num_tokens == num_decodes; }

  int64_t id = 0;
  int32_t num_tokens = 0, num_seqs = 0, num_logit_rows = 0;
  int32_t num_decodes = 0;
  int32_t num_adjustments = 0, num_biases = 0, num_masks = 0;
  std::vector<PageMove> moves_out, moves_in;
  Decision decision;

  int32_t* step_sizes;
  int32_t* token_ids;
  int32_t* positions;
  int64_t* slot_mapping;
  int32_t* cu_seqlens;
  int32_t* context_lens;
  int32_t* logit_rows;
  int32_t* logit_target;
  float* temperature;
  float* top_p;
  float* min_p;
  int32_t* top_k;
  uint64_t* seed;
  int32_t* draw_position;
  int32_t* num_logprobs;
  int32_t* state_slot;
  int32_t* adjustment;
  int32_t* adjust_seq;
  int32_t* adjust_row;
  int32_t* count_slot;
  int32_t* prompt_lens;
  float* repetition_penalty;
  float* presence_penalty;
  float* frequency_penalty;
  int32_t* cu_biases;
  int32_t* mask_row;
  int32_t* page_table;
  int32_t* bias_ids;
  float* bias_values;
  int32_t* token_masks;
  std::vector<RowInfo> rows;

  const int32_t page_size, pages_per_sequence, mask_words;

 private:
  // What a row holds of the decode that it was written for last.
  struct DecodeRow {
    uint64_t tag = 0;  // 0: no decode's
    int32_t num_pages = 0;
  };

  void write_decode(int32_t row, uint64_t tag, int64_t request_id, const RequestParams& params, int32_t slot) noexcept;
  void write_pages(int32_t row, const int32_t* pages, int32_t num_pages) noexcept;
  int32_t add_row(const RowInfo& info, const RequestParams& params, int32_t token_row, int32_t position,
                  int32_t target) noexcept;

  const int32_t max_tokens_, max_seqs_, max_rows_;
  std::unique_ptr<std::byte[]> own_;
  std::vector<DecodeRow> decode_rows_;
};

}  // namespace tokenspeed::scheduler
