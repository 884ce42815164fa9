// A device that runs the scheduler's steps on plain memory: one token per KV position. It draws from what it *reads*
// through page_table, the last-token table and the rows' arrays, so that a wrong page, position, slot, row or move of a
// page changes the stream. Memory begins as garbage, and is garbage again where a step failed.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/scheduler.h"

namespace tokenspeed::scheduler::testing {

inline constexpr int32_t kVocab = 40;

inline uint64_t mix(uint64_t hash, uint64_t value) noexcept {
  const uint64_t mixed = (hash ^ value) * 0x9e3779b97f4a7c15;
  return mixed ^ mixed >> 29;
}
inline uint64_t mix(uint64_t hash, float value) noexcept { return mix(hash, uint64_t{std::bit_cast<uint32_t>(value)}); }
inline uint64_t mix(uint64_t hash, int32_t value) noexcept { return mix(hash, uint64_t{static_cast<uint32_t>(value)}); }

// What penalties look at: the tokens of the prompt, and those drawn, in no order.
struct Counts {
  uint64_t prompt = 0, drawn = 0;
  void add(int32_t token, bool is_prompt) noexcept { (is_prompt ? prompt : drawn) += mix(uint64_t{77}, token); }
  bool operator==(const Counts&) const = default;
};

// What a draw depends on beside the tokens before it.
struct Asked {
  uint64_t seed;
  float temperature, top_p, min_p;
  int32_t top_k, num_logprobs;
  float repetition = 1, presence = 0, frequency = 0;
  std::span<const int32_t> bias_ids = {};
  std::span<const float> bias_values = {};
  std::span<const int32_t> token_mask = {};

  uint64_t hash() const noexcept {
    uint64_t h = mix(mix(mix(mix(seed, temperature), top_p), min_p), top_k);
    h = mix(mix(mix(mix(h, num_logprobs), repetition), presence), frequency);
    for (const int32_t id : bias_ids) h = mix(h, id);
    for (const float value : bias_values) h = mix(h, value);
    for (const int32_t word : token_mask) h = mix(h, word);
    return h;
  }
};

inline Asked asked_by(const RequestParams& p) noexcept {
  return {p.seed, p.temperature, p.top_p, p.min_p, p.top_k, p.num_logprobs, p.repetition_penalty, p.presence_penalty,
          p.frequency_penalty, p.bias_ids, p.bias_values, p.token_mask};
}

// As the device finds it in the step's arrays.
inline Asked asked_in(const Step& s, int32_t row) noexcept {
  Asked asked{s.seed[row], s.temperature[row], s.top_p[row], s.min_p[row], s.top_k[row], s.num_logprobs[row]};
  const int32_t a = s.adjustment[row];
  if (a < 0) return asked;
  asked.repetition = s.repetition_penalty[a];
  asked.presence = s.presence_penalty[a];
  asked.frequency = s.frequency_penalty[a];
  const auto begin = static_cast<size_t>(s.cu_biases[a]), count = static_cast<size_t>(s.cu_biases[a + 1]) - begin;
  asked.bias_ids = std::span(s.bias_ids + begin, count);
  asked.bias_values = std::span(s.bias_values + begin, count);
  const auto words = static_cast<size_t>(s.mask_words);
  const int32_t mask = s.mask_row[a];
  if (mask >= 0) asked.token_mask = std::span(s.token_masks + words * static_cast<size_t>(mask), words);
  return asked;
}

// The hash of a sequence, token by token; keys and values depend on the adapter that computed them.
inline uint64_t absorb(uint64_t context, int32_t token, int32_t key) noexcept { return mix(mix(context, token), key); }

inline int32_t draw_token(uint64_t asked, uint64_t context, const Counts& counted) noexcept {
  const uint64_t h = mix(mix(mix(asked, context), counted.prompt), counted.drawn);
  return static_cast<int32_t>((h >> 20) % kVocab);
}

class Device {
 public:
  // Of a sequence of a step: what computes its keys and values, and the oldest weights whose ones it may read.
  struct Sequence {
    int32_t key = 0;
    int64_t oldest_weights = 0;
  };
  struct Output {
    std::vector<int32_t> tokens;     // per logit row
    std::vector<uint64_t> contexts;  // per logit row: what it read
  };

  explicit Device(const SchedulerConfig& c)
      : page_size_(c.page_size),
        kv_(size_of(c.num_pages)),
        host_(size_of(c.num_host_pages)),
        last_(static_cast<size_t>(c.max_num_seqs), kGarbage),
        counts_(static_cast<size_t>(c.max_num_seqs)) {}

  const Output& run(const Step& s, std::span<const Sequence> sequences, int64_t weights) {
    move_pages(s);
    write(s, sequences, weights);
    count(s);
    out_.tokens.assign(static_cast<size_t>(s.num_logit_rows), 0);
    out_.contexts.assign(static_cast<size_t>(s.num_logit_rows), 0);
    int32_t seq = 0;
    for (int32_t row = 0; row < s.num_logit_rows; ++row) {
      while (s.logit_rows[row] >= s.cu_seqlens[seq + 1]) ++seq;
      const auto at = static_cast<size_t>(row);
      out_.contexts[at] = read(s, seq, s.positions[s.logit_rows[row]], sequences[static_cast<size_t>(seq)]);
      const int32_t a = s.adjustment[row];
      const Counts counted = a >= 0 && s.count_slot[a] >= 0 ? counts_[static_cast<size_t>(s.count_slot[a])] : Counts{};
      out_.tokens[at] = s.logit_target[row] >= 0 ? s.logit_target[row]
                                                 : draw_token(asked_in(s, row).hash(), out_.contexts[at], counted);
    }
    for (int32_t row = 0; row < s.num_logit_rows; ++row) {
      if (s.state_slot[row] >= 0) last_[static_cast<size_t>(s.state_slot[row])] = out_.tokens[static_cast<size_t>(row)];
    }
    return out_;
  }

  // The step began and failed: whatever it was to write is garbage.
  void fail(const Step& s) {
    for (const PageMove& m : s.moves_out) spoil(host_, m.host_page);
    for (const PageMove& m : s.moves_in) spoil(kv_, m.device_page);
    for (int32_t t = 0; t < s.num_tokens; ++t) kv_[static_cast<size_t>(s.slot_mapping[t])] = {};
    for (int32_t row = 0; row < s.num_logit_rows; ++row) {
      if (s.state_slot[row] >= 0) last_[static_cast<size_t>(s.state_slot[row])] = kGarbage;
    }
    for (int32_t a = 0; a < s.num_adjustments; ++a) {
      if (s.count_slot[a] >= 0) counts_[static_cast<size_t>(s.count_slot[a])] = {1, 1};
    }
  }

  // Nothing that was on the host may be read from now on.
  void spoil_host() { host_.assign(host_.size(), {}); }

  // Steps that wrote where their page table does not say, or where it is out of range.
  int64_t num_wrong_writes() const noexcept { return num_wrong_writes_; }

 private:
  static constexpr int32_t kGarbage = -99;
  struct Cell {
    int32_t token = kGarbage;
    int32_t key = -1;
    int64_t weights = -1;  // that it was computed with
  };

  size_t size_of(int32_t pages) const noexcept { return static_cast<size_t>(pages) * static_cast<size_t>(page_size_); }

  void copy(const std::vector<Cell>& from, int32_t from_page, std::vector<Cell>& to, int32_t to_page) {
    std::copy_n(from.begin() + page_size_ * from_page, page_size_, to.begin() + page_size_ * to_page);
  }
  void spoil(std::vector<Cell>& memory, int32_t page) {
    for (size_t i = 0; i < static_cast<size_t>(page_size_); ++i) memory[size_of(page) + i] = {};
  }
  void move_pages(const Step& s) {
    for (const PageMove& m : s.moves_out) copy(kv_, m.device_page, host_, m.host_page);
    for (const PageMove& m : s.moves_in) copy(host_, m.host_page, kv_, m.device_page);
  }

  size_t slot_of(const Step& s, int32_t seq, int32_t position) const noexcept {
    const int32_t page = s.page_table[int64_t{seq} * s.pages_per_sequence + position / page_size_];
    return size_of(page) + static_cast<size_t>(position % page_size_);
  }
  int32_t token_of(const Step& s, int32_t t) const noexcept {
    return s.token_ids[t] >= 0 ? s.token_ids[t] : last_[static_cast<size_t>(-1 - s.token_ids[t])];
  }

  // All keys and values of a step are written before any are read.
  void write(const Step& s, std::span<const Sequence> sequences, int64_t weights) {
    for (int32_t seq = 0; seq < s.num_seqs; ++seq) {
      for (int32_t t = s.cu_seqlens[seq]; t < s.cu_seqlens[seq + 1]; ++t) {
        const size_t slot = slot_of(s, seq, s.positions[t]);
        num_wrong_writes_ += slot != static_cast<size_t>(s.slot_mapping[t]) || slot >= kv_.size();
        if (slot < kv_.size()) kv_[slot] = {token_of(s, t), sequences[static_cast<size_t>(seq)].key, weights};
      }
    }
  }

  void count(const Step& s) {
    for (int32_t a = 0; a < s.num_adjustments; ++a) {
      if (s.count_slot[a] < 0) continue;
      Counts& counted = counts_[static_cast<size_t>(s.count_slot[a])];
      const int32_t seq = s.adjust_seq[a], begin = s.cu_seqlens[seq];
      if (s.positions[begin] == 0) counted = {};
      for (int32_t t = begin; t < s.cu_seqlens[seq + 1]; ++t) {
        counted.add(token_of(s, t), s.positions[t] < s.prompt_lens[a]);
      }
    }
  }

  uint64_t read(const Step& s, int32_t seq, int32_t position, const Sequence& sequence) const noexcept {
    uint64_t context = 0;
    for (int32_t p = 0; p <= position; ++p) {
      const size_t slot = slot_of(s, seq, p);
      if (slot >= kv_.size() || kv_[slot].weights < sequence.oldest_weights) return ~uint64_t{0};
      context = absorb(context, kv_[slot].token, kv_[slot].key);
    }
    return context;
  }

  const int32_t page_size_;
  std::vector<Cell> kv_, host_;
  std::vector<int32_t> last_;
  std::vector<Counts> counts_;
  Output out_;
  int64_t num_wrong_writes_ = 0;
};

}  // namespace tokenspeed::scheduler::testing
