// What the scheduler is told once (the envelope's limits) and per request.
#pragma once

#include <cstdint>
#include <vector>

namespace tokenspeed::scheduler {

struct SchedulerConfig {
  int32_t max_num_seqs;        // requests on the device at once = request slots
  int32_t max_prefill_tokens;  // most tokens in a step, chunks and decodes together
  int32_t max_logit_rows;      // most rows in a step that need logits
  int32_t max_model_len;       // most tokens of a request, prompt and drawn together
  int32_t page_size;           // positions per KV page
  int32_t num_pages;
  int32_t max_waiting;         // requests queued before submit refuses
  int32_t max_in_flight = 1;   // steps planned before the oldest commits: 1 or 2

  // Row length of the page table.
  int32_t pages_per_sequence() const noexcept { return pages_for(max_model_len); }
  int32_t pages_for(int32_t num_positions) const noexcept {
    return num_positions / page_size + (num_positions % page_size != 0);
  }

  // Throws std::invalid_argument. A step must hold one token and one logit row of every sequence, or the
  // oldest request could starve.
  void validate() const;
};

struct RequestParams {
  int32_t max_new_tokens;
  float temperature;  // the sampling values pass through to the step's rows unread
  float top_p;
  int32_t top_k;
  float min_p;
  uint64_t seed;
  int32_t num_logprobs = -1;         // -1: none
  int32_t num_prompt_logprobs = -1;  // -1: none; else every prompt token but the last gets a logit row
  std::vector<int32_t> stop_token_ids = {};
};

}  // namespace tokenspeed::scheduler
