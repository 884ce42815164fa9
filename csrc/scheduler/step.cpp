#include "scheduler/step.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>

#include "check/check.h"

namespace tokenspeed::scheduler {

namespace {

// Writes arrays to their places in an io set.
class Copier {
 public:
  Copier(std::span<std::byte> io, std::span<const uint64_t> offsets) : io_(io), offsets_(offsets) {
    if (offsets.size() != Step::kNumInputs) {
      throw std::invalid_argument("step inputs: need " + std::to_string(Step::kNumInputs) + " offsets, have " +
                                  std::to_string(offsets.size()));
    }
  }

  // The next tensor: `count` elements, of which the caller writes some itself when `source` is null.
  template <class T>
  T* next(const T* source, int64_t count) {
    const uint64_t offset = offsets_[tensor_++];
    const uint64_t nbytes = static_cast<uint64_t>(count) * sizeof(T);
    if (offset % alignof(T) != 0 || offset > io_.size() || nbytes > io_.size() - offset) {
      throw std::invalid_argument("step inputs: tensor " + std::to_string(tensor_ - 1) + " needs " +
                                  std::to_string(nbytes) + " bytes at byte " + std::to_string(offset) + " of " +
                                  std::to_string(io_.size()));
    }
    auto* at = reinterpret_cast<T*>(io_.data() + offset);
    if (source != nullptr) std::memcpy(at, source, nbytes);
    return at;
  }

 private:
  std::span<std::byte> io_;
  std::span<const uint64_t> offsets_;
  size_t tensor_ = 0;
};

}  // namespace

Step::Step(const SchedulerConfig& config)
    : page_size(config.page_size), pages_per_sequence(config.pages_per_sequence()), mask_words(config.mask_words()) {
  const auto tokens = static_cast<size_t>(config.max_prefill_tokens);
  const auto seqs = static_cast<size_t>(config.max_num_seqs);
  const auto logits = static_cast<size_t>(config.max_logit_rows);
  token_ids.resize(tokens);
  positions.resize(tokens);
  slot_mapping.resize(tokens);
  cu_seqlens.resize(seqs + 1);
  context_lens.resize(seqs);
  page_table.resize(seqs * static_cast<size_t>(pages_per_sequence));
  for (auto* array : {&logit_rows, &logit_target, &top_k, &draw_position, &num_logprobs, &state_slot, &adjustment}) {
    array->resize(logits);
  }
  for (auto* array : {&temperature, &top_p, &min_p}) array->resize(logits);
  seed.resize(logits);
  rows.resize(logits);
  for (auto* array : {&adjust_seq, &adjust_row, &count_slot, &prompt_lens, &mask_row}) array->reserve(seqs);
  for (auto* array : {&repetition_penalty, &presence_penalty, &frequency_penalty}) array->reserve(seqs);
  cu_biases.reserve(seqs + 1);
  if (mask_words > 0) {
    bias_ids.reserve(seqs * static_cast<size_t>(kMaxLogitBias));
    bias_values.reserve(seqs * static_cast<size_t>(kMaxLogitBias));
    token_masks.reserve(seqs * static_cast<size_t>(mask_words));
  }
}

void Step::warm(size_t count) const noexcept {
  const auto touch = [count](const auto& array, size_t width = 1) {
    const size_t bytes = std::min(count * width, array.size()) * sizeof(array[0]);
    const auto* p = reinterpret_cast<const volatile char*>(array.data());
    for (size_t at = 0; at < bytes; at += 64) static_cast<void>(p[at]);
  };
  touch(token_ids), touch(positions), touch(slot_mapping), touch(cu_seqlens), touch(context_lens);
  touch(page_table, static_cast<size_t>(pages_per_sequence));
  touch(logit_rows), touch(logit_target), touch(temperature), touch(top_p), touch(min_p), touch(top_k), touch(seed);
  touch(draw_position), touch(num_logprobs), touch(state_slot), touch(adjustment), touch(rows);
}

void Step::clear(int64_t new_id) noexcept {
  id = new_id;
  num_tokens = num_seqs = num_logit_rows = 0;
  is_decode_only = true;
  cu_seqlens[0] = 0;
  for (auto* array : {&adjust_seq, &adjust_row, &count_slot, &prompt_lens, &mask_row, &bias_ids, &token_masks}) {
    array->clear();
  }
  for (auto* array : {&repetition_penalty, &presence_penalty, &frequency_penalty, &bias_values}) array->clear();
  cu_biases.assign(1, 0);
}

void Step::copy_to(std::span<std::byte> io, std::span<const uint64_t> offsets) const {
  Copier copier(io, offsets);
  const auto num_adjustments = static_cast<int32_t>(adjust_seq.size());
  const std::array<int32_t, 8> sizes = {num_tokens,
                                        num_seqs,
                                        num_logit_rows,
                                        num_adjustments,
                                        static_cast<int32_t>(bias_ids.size()),
                                        mask_words == 0 ? 0 : static_cast<int32_t>(token_masks.size()) / mask_words,
                                        0,
                                        0};
  copier.next(sizes.data(), 8);
  copier.next(token_ids.data(), num_tokens);
  copier.next(positions.data(), num_tokens);
  copier.next(slot_mapping.data(), num_tokens);
  copier.next(cu_seqlens.data(), int64_t{num_seqs} + 1);
  copier.next(context_lens.data(), num_seqs);
  copier.next(logit_rows.data(), num_logit_rows);
  copier.next(logit_target.data(), num_logit_rows);
  copier.next(temperature.data(), num_logit_rows);
  copier.next(top_p.data(), num_logit_rows);
  copier.next(min_p.data(), num_logit_rows);
  copier.next(top_k.data(), num_logit_rows);
  copier.next(seed.data(), num_logit_rows);
  copier.next(draw_position.data(), num_logit_rows);
  copier.next(num_logprobs.data(), num_logit_rows);
  copier.next(state_slot.data(), num_logit_rows);
  copier.next(adjustment.data(), num_logit_rows);
  copier.next(adjust_seq.data(), num_adjustments);
  copier.next(adjust_row.data(), num_adjustments);
  copier.next(count_slot.data(), num_adjustments);
  copier.next(prompt_lens.data(), num_adjustments);
  copier.next(repetition_penalty.data(), num_adjustments);
  copier.next(presence_penalty.data(), num_adjustments);
  copier.next(frequency_penalty.data(), num_adjustments);
  copier.next(cu_biases.data(), int64_t{num_adjustments} + 1);
  copier.next(mask_row.data(), num_adjustments);
  int32_t* pages = copier.next<int32_t>(nullptr, int64_t{num_seqs} * pages_per_sequence);
  for (int32_t i = 0; i < num_seqs; ++i) {
    const int32_t held = (context_lens[static_cast<size_t>(i)] + page_size - 1) / page_size;
    const int64_t row = int64_t{i} * pages_per_sequence;
    std::memcpy(pages + row, page_table.data() + row, static_cast<size_t>(held) * sizeof(int32_t));
  }
  copier.next(bias_ids.data(), static_cast<int64_t>(bias_ids.size()));
  copier.next(bias_values.data(), static_cast<int64_t>(bias_values.size()));
  copier.next(token_masks.data(), static_cast<int64_t>(token_masks.size()));
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
  adjustment[at] = -1;
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

void Step::add_adjustment(const RequestParams& params, int32_t row, int32_t slot, int32_t num_prompt) noexcept {
  TS_ASSERT(adjust_seq.size() < context_lens.size(), "a sequence has one adjustment");
  if (row >= 0) adjustment[static_cast<size_t>(row)] = static_cast<int32_t>(adjust_seq.size());
  adjust_seq.push_back(num_seqs - 1);
  adjust_row.push_back(row);
  count_slot.push_back(params.has_penalties() ? slot : -1);
  prompt_lens.push_back(num_prompt);
  repetition_penalty.push_back(params.repetition_penalty);
  presence_penalty.push_back(params.presence_penalty);
  frequency_penalty.push_back(params.frequency_penalty);
  mask_row.push_back(-1);
  if (row >= 0) {
    bias_ids.insert(bias_ids.end(), params.bias_ids.begin(), params.bias_ids.end());
    bias_values.insert(bias_values.end(), params.bias_values.begin(), params.bias_values.end());
    if (!params.token_mask.empty()) {
      mask_row.back() = static_cast<int32_t>(token_masks.size()) / mask_words;
      token_masks.insert(token_masks.end(), params.token_mask.begin(), params.token_mask.end());
    }
  }
  cu_biases.push_back(static_cast<int32_t>(bias_ids.size()));
}

}  // namespace tokenspeed::scheduler
