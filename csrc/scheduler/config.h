// What the scheduler is told once (the envelope's limits, and policy) and per request.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace tokenspeed::scheduler {

struct SchedulerConfig {
  int32_t max_num_seqs;        // requests on the device at once = request slots
  int32_t max_prefill_tokens;  // most tokens in a step, chunks and decodes together
  int32_t max_logit_rows;      // most rows in a step that need logits
  int32_t max_model_len;       // most tokens of a request, prompt and drawn together
  int32_t page_size;           // positions per KV page
  int32_t num_pages;
  int32_t max_waiting;            // requests queued before submit refuses; preempted ones do not count
  int32_t max_in_flight = 1;      // steps planned before the oldest commits: 1, 2 or 3 (depth 0, 1, 2)
  int32_t vocab_size = 0;         // of logit biases and token masks; 0: no request has any
  bool prefix_index = true;       // whether pages of one request are found by the next
  int32_t num_host_pages = 0;     // of the host tier; 0: there is none
  std::string cache_salt = {};    // of the prefix index: the artifact's digest
  bool record_kv_events = false;  // whether take_events has anything to give
  int64_t aging_ns = 0;           // waiting that long makes up for one priority class; 0: never

  // 32-bit words of a token mask.
  int32_t mask_words() const noexcept { return vocab_size / 32 + (vocab_size % 32 != 0); }

  // Row length of the page table.
  int32_t pages_per_sequence() const noexcept { return pages_for(max_model_len); }
  int32_t pages_for(int32_t num_positions) const noexcept {
    return num_positions / page_size + (num_positions % page_size != 0);
  }

  // Throws std::invalid_argument. A step must hold one token and one logit row of every sequence, or the
  // oldest request could starve.
  void validate() const;
};

inline constexpr int32_t kMaxLogitBias = 1024;  // MAX_LOGIT_BIAS of tokenspeed/step.py
inline constexpr int64_t kNoDeadline = std::numeric_limits<int64_t>::max();

struct RequestParams {
  int32_t max_new_tokens;
  float temperature;  // the sampling values pass through to the step's rows unread
  float top_p;
  int32_t top_k;
  float min_p;
  uint64_t seed;
  int32_t num_logprobs = -1;         // -1: none
  int32_t num_prompt_logprobs = -1;  // -1: none; else prompt tokens get logit rows, from logprob_start_len - 1 on
  int32_t logprob_start_len = 0;     // positions of the prompt from here on have log-probabilities, but for the first
  std::vector<int32_t> stop_token_ids = {};

  // What is asked of the logits before a draw; passed through unread as well.
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  std::vector<int32_t> bias_ids = {};  // ascending
  std::vector<float> bias_values = {};
  std::vector<int32_t> token_mask = {};  // mask_words() words, or empty: every token is allowed

  int32_t priority = 0;                 // class, 0 (first) to 9
  int32_t tenant = 0;                   // whose fair share it counts for
  int64_t deadline_ns = kNoDeadline;    // on the clock of `now_ns`
  std::string cache_key = {};           // prefixes are shared within a key: a LoRA adapter, a client's salt

  bool has_penalties() const noexcept {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }
  bool adjusts_draws() const noexcept { return has_penalties() || !bias_ids.empty() || !token_mask.empty(); }
  // Whether it may begin behind cached pages: penalties count tokens of the prompt as they are computed.
  bool may_skip_prompt() const noexcept { return !has_penalties(); }
  // Where the first logit row of a prompt of `num_prompt` tokens stands, whose target is the next token; num_prompt - 1
  // where there is none.
  int32_t first_prompt_row(int32_t num_prompt) const noexcept {
    if (num_prompt_logprobs < 0) return num_prompt - 1;
    return logprob_start_len == 0 ? 0 : logprob_start_len - 1;
  }
};

}  // namespace tokenspeed::scheduler
