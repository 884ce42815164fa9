#include "scheduler/step.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "check/check.h"

namespace tokenspeed::scheduler {

namespace {

constexpr uint64_t kAlignment = 64;  // of tensors in a step's own memory

// Walks over the tensors in the order of STEP_SIZES and INPUTS: once to lay them out, or to find them.
class Tensors {
 public:
  Tensors() = default;
  explicit Tensors(const StepMemory& memory) : memory_(&memory) {
    if (memory.offsets.size() != StepMemory::kNumTensors) {
      throw std::invalid_argument("step inputs: need " + std::to_string(StepMemory::kNumTensors) + " offsets, have " +
                                  std::to_string(memory.offsets.size()));
    }
  }

  template <class T>
  void next(T*& tensor, int64_t count) {
    const uint64_t nbytes = static_cast<uint64_t>(count) * sizeof(T);
    if (memory_ != nullptr) {
      const uint64_t offset = memory_->offsets[index_];
      if (offset % alignof(T) != 0 || offset > memory_->io.size() || nbytes > memory_->io.size() - offset) {
        throw std::invalid_argument("step inputs: tensor " + std::to_string(index_) + " needs " +
                                    std::to_string(nbytes) + " bytes at byte " + std::to_string(offset) + " of " +
                                    std::to_string(memory_->io.size()));
      }
      tensor = reinterpret_cast<T*>(memory_->io.data() + offset);
    }
    offsets_.push_back(end_);
    end_ += (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    ++index_;
  }

  uint64_t num_bytes() const noexcept { return end_; }
  std::vector<uint64_t> offsets() const { return offsets_; }

 private:
  const StepMemory* memory_ = nullptr;
  std::vector<uint64_t> offsets_;
  uint64_t end_ = 0;
  size_t index_ = 0;
};

void visit(Tensors& tensors, Step& s, const SchedulerConfig& c) {
  const int64_t tokens = c.max_prefill_tokens, seqs = c.max_num_seqs, rows = c.max_logit_rows;
  const int64_t adjusted = c.mask_words() > 0 ? seqs : 0;  // biases and masks need a vocabulary
  tensors.next(s.step_sizes, 8);
  tensors.next(s.token_ids, tokens);
  tensors.next(s.positions, tokens);
  tensors.next(s.slot_mapping, tokens);
  tensors.next(s.cu_seqlens, seqs + 1);
  tensors.next(s.context_lens, seqs);
  tensors.next(s.logit_rows, rows);
  tensors.next(s.logit_target, rows);
  tensors.next(s.temperature, rows);
  tensors.next(s.top_p, rows);
  tensors.next(s.min_p, rows);
  tensors.next(s.top_k, rows);
  tensors.next(s.seed, rows);
  tensors.next(s.draw_position, rows);
  tensors.next(s.num_logprobs, rows);
  tensors.next(s.state_slot, rows);
  tensors.next(s.adjustment, rows);
  tensors.next(s.adjust_seq, seqs);
  tensors.next(s.adjust_row, seqs);
  tensors.next(s.count_slot, seqs);
  tensors.next(s.prompt_lens, seqs);
  tensors.next(s.repetition_penalty, seqs);
  tensors.next(s.presence_penalty, seqs);
  tensors.next(s.frequency_penalty, seqs);
  tensors.next(s.cu_biases, seqs + 1);
  tensors.next(s.mask_row, seqs);
  tensors.next(s.page_table, seqs * c.pages_per_sequence());
  tensors.next(s.bias_ids, adjusted * kMaxLogitBias);
  tensors.next(s.bias_values, adjusted * kMaxLogitBias);
  tensors.next(s.token_masks, adjusted * c.mask_words());
}

size_t at(int64_t index) noexcept { return static_cast<size_t>(index); }

}  // namespace

Step::Step(const SchedulerConfig& config, const StepMemory* memory)
    : page_size(config.page_size),
      pages_per_sequence(config.pages_per_sequence()),
      mask_words(config.mask_words()),
      max_tokens_(config.max_prefill_tokens),
      max_seqs_(config.max_num_seqs),
      max_rows_(config.max_logit_rows) {
  StepMemory own;
  if (memory == nullptr) {
    Tensors layout;
    visit(layout, *this, config);
    own_ = std::make_unique<std::byte[]>(layout.num_bytes() + kAlignment);
    void* begin = own_.get();
    size_t space = layout.num_bytes() + kAlignment;
    own = {{static_cast<std::byte*>(std::align(kAlignment, layout.num_bytes(), begin, space)), layout.num_bytes()},
           layout.offsets()};
    memory = &own;
  }
  Tensors found(*memory);
  visit(found, *this, config);
  rows.resize(at(max_rows_));
  decode_rows_.resize(at(max_seqs_));
  decision.admitted.reserve(at(max_seqs_));
  decision.preempted.reserve(at(max_seqs_));
}

void Step::clear(int64_t new_id) noexcept {
  id = new_id;
  num_tokens = num_seqs = num_logit_rows = num_decodes = 0;
  num_adjustments = num_biases = num_masks = 0;
  cu_seqlens[0] = cu_biases[0] = 0;
  moves_out.clear();
  moves_in.clear();
  decision.admitted.clear();
  decision.preempted.clear();
}

// What does not change while a request decodes in the same row.
void Step::write_decode(int32_t row, uint64_t tag, int64_t request_id, const RequestParams& params,
                        int32_t slot) noexcept {
  token_ids[row] = -1 - slot;
  cu_seqlens[row + 1] = row + 1;
  logit_rows[row] = row;
  logit_target[row] = -1;
  temperature[row] = params.temperature;
  top_p[row] = params.top_p;
  min_p[row] = params.min_p;
  top_k[row] = params.top_k;
  seed[row] = params.seed;
  num_logprobs[row] = params.num_logprobs;
  state_slot[row] = slot;
  adjustment[row] = -1;
  rows[at(row)] = {request_id, false};
  decode_rows_[at(row)] = {tag, 0};
}

void Step::write_pages(int32_t row, const int32_t* pages, int32_t num_pages) noexcept {
  int32_t& held = decode_rows_[at(row)].num_pages;
  std::copy(pages + held, pages + num_pages, page_table + int64_t{row} * pages_per_sequence + held);
  held = num_pages;
}

void Step::add_chunk(std::span<const int32_t> tokens, int32_t first_position,
                     std::span<const int32_t> pages) noexcept {
  const auto count = static_cast<int32_t>(tokens.size());
  TS_ASSERT(count >= 1 && num_tokens + count <= max_tokens_, "a step has room for tokens");
  TS_ASSERT(num_seqs < max_seqs_, "a step has room for its sequences");
  std::copy(tokens.begin(), tokens.end(), token_ids + num_tokens);
  for (int32_t i = 0; i < count; ++i) {
    const int32_t position = first_position + i;
    positions[num_tokens + i] = position;
    slot_mapping[num_tokens + i] = int64_t{pages[at(position / page_size)]} * page_size + position % page_size;
  }
  std::copy(pages.begin(), pages.end(), page_table + int64_t{num_seqs} * pages_per_sequence);
  context_lens[num_seqs] = first_position + count;
  num_tokens += count;
  num_seqs += 1;
  cu_seqlens[num_seqs] = num_tokens;
}

int32_t Step::add_row(const RowInfo& info, const RequestParams& params, int32_t token_row, int32_t position,
                      int32_t target) noexcept {
  TS_ASSERT(num_logit_rows < max_rows_, "a step has room for its logit rows");
  const int32_t row = num_logit_rows++;
  logit_rows[row] = token_row;
  logit_target[row] = target;
  temperature[row] = params.temperature;
  top_p[row] = params.top_p;
  min_p[row] = params.min_p;
  top_k[row] = params.top_k;
  seed[row] = params.seed;
  draw_position[row] = position;
  num_logprobs[row] = info.is_prompt_row ? params.num_prompt_logprobs : params.num_logprobs;
  state_slot[row] = -1;
  adjustment[row] = -1;
  rows[at(row)] = info;
  return row;
}

void Step::add_prompt_row(int64_t request_id, const RequestParams& params, int32_t token_row, int32_t position,
                          int32_t target) noexcept {
  add_row({request_id, true}, params, token_row, position, target);
}

int32_t Step::add_draw_row(int64_t request_id, const RequestParams& params, int32_t position, int32_t slot) noexcept {
  const int32_t row = add_row({request_id, false}, params, num_tokens - 1, position, -1);
  state_slot[row] = slot;
  return row;
}

void Step::add_adjustment(const RequestParams& params, int32_t row, int32_t slot, int32_t num_prompt) noexcept {
  TS_ASSERT(num_adjustments < max_seqs_, "a sequence has one adjustment");
  const int32_t i = num_adjustments++;
  if (row >= 0) adjustment[row] = i;
  adjust_seq[i] = num_seqs - 1;
  adjust_row[i] = row;
  count_slot[i] = params.has_penalties() ? slot : -1;
  prompt_lens[i] = num_prompt;
  repetition_penalty[i] = params.repetition_penalty;
  presence_penalty[i] = params.presence_penalty;
  frequency_penalty[i] = params.frequency_penalty;
  mask_row[i] = -1;
  if (row >= 0) {
    std::copy(params.bias_ids.begin(), params.bias_ids.end(), bias_ids + num_biases);
    std::copy(params.bias_values.begin(), params.bias_values.end(), bias_values + num_biases);
    num_biases += static_cast<int32_t>(params.bias_ids.size());
    if (!params.token_mask.empty()) {
      mask_row[i] = num_masks++;
      std::copy(params.token_mask.begin(), params.token_mask.end(), token_masks + int64_t{mask_row[i]} * mask_words);
    }
  }
  cu_biases[i + 1] = num_biases;
}

void Step::finish() noexcept {
  if (num_tokens > num_decodes) {
    const int32_t end = std::min(max_seqs_, std::max({num_tokens, num_seqs, num_logit_rows}));
    for (int32_t row = num_decodes; row < end; ++row) decode_rows_[at(row)] = {};
  }
  const int32_t sizes[] = {num_tokens, num_seqs, num_logit_rows, num_adjustments, num_biases, num_masks, 0, 0};
  std::copy(std::begin(sizes), std::end(sizes), step_sizes);
}

void Step::warm(size_t count) const noexcept {
  const size_t n = std::min(count, at(max_seqs_));
  const auto touch = [](const auto* array, size_t length) {
    const auto* p = reinterpret_cast<const volatile char*>(array);
    for (size_t byte = 0; byte < length * sizeof(*array); byte += 64) static_cast<void>(p[byte]);
  };
  touch(positions, n), touch(slot_mapping, n), touch(context_lens, n), touch(draw_position, n);
  touch(decode_rows_.data(), n);
}

}  // namespace tokenspeed::scheduler
