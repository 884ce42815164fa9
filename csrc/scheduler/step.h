// One forward pass as flat arrays, named and typed as INPUTS of tokenspeed/step.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/config.h"

namespace tokenspeed::scheduler {

// What a logit row is for.
struct RowInfo {
  int64_t request_id;
  bool is_prompt_row;  // asks the log-probability of a prompt token; else draws a token
  int32_t position;    // of the token asked for or drawn
};

// Arrays are allocated once at their largest; a step fills the first num_tokens, num_seqs, num_logit_rows
// entries, and of adjustments as many as there are. A page_table row is filled as far as its sequence has pages; behind that it holds page numbers
// of earlier steps, or 0.
struct Step {
  explicit Step(const SchedulerConfig& config);
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  // Reads what a step of `count` decodes will write, and changes nothing.
  void warm(size_t count) const noexcept;

  // Empties the step for reuse; allocates nothing.
  void clear(int64_t new_id) noexcept;

  // The next sequence: known tokens from `first_position` on, or one token read on the device from the
  // last-token table at `slot`. `pages` are the sequence's pages, up to that of its last position here.
  void add_chunk(std::span<const int32_t> tokens, int32_t first_position, std::span<const int32_t> pages) noexcept;
  void add_decode(int32_t slot, int32_t position, std::span<const int32_t> pages) noexcept;

  // Rows of the sequence added last. `token_row` counts from the step's first token.
  void add_prompt_row(int64_t request_id, const RequestParams& params, int32_t token_row, int32_t position,
                      int32_t target) noexcept;
  // Draws from the step's last token; returns the row.
  int32_t add_draw_row(int64_t request_id, const RequestParams& params, int32_t position, int32_t slot) noexcept;

  // What the sequence added last asks of its logits. `row` is its row that draws, or -1; penalties count its tokens
  // under `slot`, of which the first `num_prompt` are the prompt's.
  void add_adjustment(const RequestParams& params, int32_t row, int32_t slot, int32_t num_prompt) noexcept;

  // Copies what the step filled into `io`: tensor i of INPUTS in tokenspeed/step.py to byte offsets[i]. Of a
  // page_table row only the pages of its sequence. Throws std::invalid_argument when a tensor does not fit.
  static constexpr size_t kNumInputs = 30;
  void copy_to(std::span<std::byte> io, std::span<const uint64_t> offsets) const;

  int64_t id = 0;
  int32_t num_tokens = 0;
  int32_t num_seqs = 0;
  int32_t num_logit_rows = 0;
  bool is_decode_only = true;  // every sequence is one decode

  std::vector<int32_t> token_ids;
  std::vector<int32_t> positions;
  std::vector<int64_t> slot_mapping;
  std::vector<int32_t> cu_seqlens;
  std::vector<int32_t> context_lens;
  std::vector<int32_t> page_table;
  std::vector<int32_t> logit_rows;
  std::vector<int32_t> logit_target;
  std::vector<float> temperature;
  std::vector<float> top_p;
  std::vector<float> min_p;
  std::vector<int32_t> top_k;
  std::vector<uint64_t> seed;
  std::vector<int32_t> draw_position;
  std::vector<int32_t> num_logprobs;
  std::vector<int32_t> state_slot;
  std::vector<int32_t> adjustment;
  std::vector<RowInfo> rows;

  // Of adjustments; these grow within what the constructor reserved.
  std::vector<int32_t> adjust_seq, adjust_row, count_slot, prompt_lens;
  std::vector<float> repetition_penalty, presence_penalty, frequency_penalty;
  std::vector<int32_t> cu_biases, mask_row;
  std::vector<int32_t> bias_ids;
  std::vector<float> bias_values;
  std::vector<int32_t> token_masks;

  int32_t page_size;
  int32_t pages_per_sequence;
  int32_t mask_words;

 private:
  void add_sequence(int32_t count, int32_t first_position, std::span<const int32_t> pages) noexcept;
  int32_t add_row(const RowInfo& info, const RequestParams& params, int32_t token_row, int32_t target) noexcept;
};

}  // namespace tokenspeed::scheduler
