// Shorthands of the scheduler's tests: small configurations, requests, and what a step holds as vectors.
#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/scheduler.h"

namespace tokenspeed::scheduler::testing {

using Ints = std::vector<int32_t>;
using Ids = std::vector<int64_t>;

// Small numbers, so that every limit is met.
inline SchedulerConfig small() {
  return {.max_num_seqs = 3, .max_prefill_tokens = 8, .max_logit_rows = 6, .max_model_len = 32, .page_size = 4,
          .num_pages = 16, .max_waiting = 4, .prefix_index = false};
}
inline SchedulerConfig cached() {
  SchedulerConfig config = small();
  config.prefix_index = true;
  return config;
}

inline RequestParams wants(int32_t max_new_tokens) {
  return {.max_new_tokens = max_new_tokens, .temperature = 1, .top_p = 1, .top_k = 0, .min_p = 0, .seed = 7};
}

inline Ints prompt(int32_t n, int32_t first = 100) {
  Ints tokens(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) tokens[static_cast<size_t>(i)] = first + i;
  return tokens;
}

template <class T>
std::vector<T> head(const T* array, int32_t n) {
  return {array, array + n};
}

inline Ints tokens(const Step* s) { return head(s->token_ids, s->num_tokens); }
inline Ints lens(const Step* s) { return head(s->context_lens, s->num_seqs); }
inline Ints bounds(const Step* s) { return head(s->cu_seqlens, s->num_seqs + 1); }
inline Ints pages(const Step* s, int32_t seq, int32_t n) {
  return head(s->page_table + int64_t{seq} * s->pages_per_sequence, n);
}
inline Ids ids(const Step* s) {  // of the rows
  Ids all;
  for (int32_t row = 0; row < s->num_logit_rows; ++row) all.push_back(s->rows[static_cast<size_t>(row)].request_id);
  return all;
}

// Commits the step with `token` in every row.
inline std::vector<DrawnToken> commit(Scheduler& scheduler, const Step* step, int32_t token = 1) {
  const Ints drawn(static_cast<size_t>(step->num_logit_rows), token);
  const auto result = scheduler.commit(step->id, drawn);
  return {result.begin(), result.end()};
}

// One step, planned and committed; false where there was none.
inline bool turn(Scheduler& scheduler, int32_t token = 1) {
  const Step* step = scheduler.next_step();
  if (step != nullptr) commit(scheduler, step, token);
  return step != nullptr;
}
inline void run_dry(Scheduler& scheduler) {
  while (turn(scheduler)) {}
}

inline Ids fail(Scheduler& scheduler, const Step* step) {
  const auto ended = scheduler.fail_step(step->id);
  return {ended.begin(), ended.end()};
}

// Pages that a new request could have.
inline int32_t to_be_had(const Scheduler& s) { return s.num_free_pages() + s.num_cached_pages(); }

// (tokens found in the prefix index, of these from the host) of the step's first admission.
inline std::pair<int32_t, int32_t> hit(const Step* s) {
  const Admission& a = s->decision.admitted.at(0);
  return {a.num_cached_tokens, a.num_restored_tokens};
}

template <class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace tokenspeed::scheduler::testing
