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

void Step::copy_to(std::span<std::byte> io, std::span<const uint64_t> offsets) const {
  Copier copier(io, offsets);
  const std::array<int32_t, 4> sizes = {num_tokens, num_seqs, num_logit_rows, 0};
  copier.next(sizes.data(), 4);
  copier.next(token_ids.data(), num_tokens);
  copier.next(positions.data(), num_tokens);
  copier.next(slot_mapping.data(), num_tokens);
  copier.next(cu_seqlens.data(), int64_t{num_seqs} + 1);
  copier.next(context_lens.data(), num_seqs);
  int32_t* pages = copier.next<int32_t>(nullptr, int64_t{num_seqs} * pages_per_sequence);
  for (int32_t i = 0; i < num_seqs; ++i) {
    const int32_t held = (context_lens[static_cast<size_t>(i)] + page_size - 1) / page_size;
    const int64_t row = int64_t{i} * pages_per_sequence;
    std::memcpy(pages + row, page_table.data() + row, static_cast<size_t>(held) * sizeof(int32_t));
  }
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
