#include "scheduler/step.h"

#include <algorithm>

#include "check/check.h"

namespace tokenspeed::scheduler {

Step::Step(const SchedulerConfig& config)
    : page_size(config.page_size), pages_per_sequence(config.pages_per_sequence()) {
  const auto tokens = static_cast<size_t>(config.max_prefill_tokens);
  const auto seqs = static_cast<size_t>(config.max_num_seqs);
  const auto logits = static_cast<size_t>(config.max_logit_rows);
  token_ids.resize(tokens);
  positions.resize(tokens);
  slot_mapping.resize(tokens);
  cu_seqlens.resize(seqs + 1);
  context_lens.resize(seqs);
  page_table.resize(seqs * static_cast<size_t>(pages_per_sequence));
  for (auto* array : {&logit_rows, &logit_target, &top_k, &draw_position, &num_logprobs, &state_slot}) {
    array->resize(logits);
  }
  for (auto* array : {&temperature, &top_p, &min_p}) array->resize(logits);
  seed.resize(logits);
  rows.resize(logits);
}

void Step::clear(int64_t new_id) noexcept {
  id = new_id;
  num_tokens = num_seqs = num_logit_rows = 0;
  is_decode_only = true;
  cu_seqlens[0] = 0;
}

void Step::add_sequence(int32_t count, int32_t first_position, std::span<const int32_t> pages) noexcept {
  TS_ASSERT(count >= 1 && static_cast<size_t>(num_tokens + count) <= token_ids.size(), "a step has room for tokens");
  TS_ASSERT(static_cast<size_t>(num_seqs) < context_lens.size(), "a step has room for its sequences");
  const int64_t size = page_size;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t position = first_position + i;
    const auto at = static_cast<size_t>(num_tokens + i);
    positions[at] = position;
    slot_mapping[at] = pages[static_cast<size_t>(position / page_size)] * size + position % page_size;
  }
  std::copy(pages.begin(), pages.end(), page_table.begin() + int64_t{num_seqs} * pages_per_sequence);
  context_lens[static_cast<size_t>(num_seqs)] = first_position + count;
  num_tokens += count;
  num_seqs += 1;
  cu_seqlens[static_cast<size_t>(num_seqs)] = num_tokens;
}

void Step::add_chunk(std::span<const int32_t> tokens, int32_t first_position,
                     std::span<const int32_t> pages) noexcept {
  const int32_t first_row = num_tokens;
  add_sequence(static_cast<int32_t>(tokens.size()), first_position, pages);
  std::copy(tokens.begin(), tokens.end(), token_ids.begin() + first_row);
  is_decode_only = false;
}

void Step::add_decode(int32_t slot, int32_t position, std::span<const int32_t> pages) noexcept {
  const int32_t row = num_tokens;
  add_sequence(1, position, pages);
  token_ids[static_cast<size_t>(row)] = -1 - slot;
}

int32_t Step::add_row(const RowInfo& info, const RequestParams& params, int32_t token_row, int32_t target) noexcept {
  TS_ASSERT(static_cast<size_t>(num_logit_rows) < rows.size(), "a step has room for its logit rows");
  const auto at = static_cast<size_t>(num_logit_rows);
  logit_rows[at] = token_row;
  logit_target[at] = target;
  temperature[at] = params.temperature;
  top_p[at] = params.top_p;
  min_p[at] = params.min_p;
  top_k[at] = params.top_k;
  seed[at] = params.seed;
  draw_position[at] = info.position;
  num_logprobs[at] = info.is_prompt_row ? params.num_prompt_logprobs : params.num_logprobs;
  state_slot[at] = -1;
  rows[at] = info;
  return num_logit_rows++;
}

void Step::add_prompt_row(int64_t request_id, const RequestParams& params, int32_t token_row, int32_t position,
                          int32_t target) noexcept {
  add_row({request_id, true, position}, params, token_row, target);
}

int32_t Step::add_draw_row(int64_t request_id, const RequestParams& params, int32_t position, int32_t slot) noexcept {
  const int32_t row = add_row({request_id, false, position}, params, num_tokens - 1, -1);
  state_slot[static_cast<size_t>(row)] = slot;
  return row;
}

}  // namespace tokenspeed::scheduler
