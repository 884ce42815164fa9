// What the scheduler plans, step by step, and what it does when things go wrong.
#include "scheduler/scheduler.h"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <new>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "test.h"

using namespace tokenspeed::scheduler;

static_assert(!std::is_copy_constructible_v<Scheduler> && !std::is_move_constructible_v<Scheduler>);
static_assert(!std::is_copy_constructible_v<Step> && !std::is_move_constructible_v<Step>);
static_assert(std::is_same_v<decltype(std::declval<Scheduler&>().next_step()), std::shared_ptr<const Step>>);

// Counts allocations, to show that a step makes none.
static int64_t num_allocations = 0;
[[gnu::noinline]] void* operator new(size_t size) {
  ++num_allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

using Ints = std::vector<int32_t>;
using StepPtr = std::shared_ptr<const Step>;

// Small numbers, so that every limit is met.
SchedulerConfig small() {
  return {.max_num_seqs = 3, .max_prefill_tokens = 8, .max_logit_rows = 6, .max_model_len = 32, .page_size = 4,
          .num_pages = 16, .max_waiting = 4};
}

RequestParams wants(int32_t max_new_tokens) {
  return {.max_new_tokens = max_new_tokens, .temperature = 1, .top_p = 1, .top_k = 0, .min_p = 0, .seed = 7};
}

Ints prompt(int32_t n) {
  Ints tokens(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) tokens[static_cast<size_t>(i)] = 100 + i;
  return tokens;
}

template <class T>
std::vector<T> head(const std::vector<T>& array, int32_t n) {
  return {array.begin(), array.begin() + n};
}

Ints tokens(const StepPtr& s) { return head(s->token_ids, s->num_tokens); }
Ints lens(const StepPtr& s) { return head(s->context_lens, s->num_seqs); }
Ints bounds(const StepPtr& s) { return head(s->cu_seqlens, s->num_seqs + 1); }

std::vector<DrawnToken> commit(Scheduler& scheduler, const StepPtr& step, int32_t token = 1) {
  const Ints drawn(static_cast<size_t>(step->num_logit_rows), token);
  const auto result = scheduler.commit(step->id, drawn);
  return {result.begin(), result.end()};
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

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST(decodes_come_first_then_chunks_in_arrival_order) {
  Scheduler s(small());
  s.submit(1, prompt(3), wants(4));
  commit(s, s.next_step());
  s.submit(2, prompt(2), wants(4));
  s.submit(3, prompt(6), wants(4));
  const StepPtr step = s.next_step();
  CHECK((tokens(step) == Ints{-1, 100, 101, 100, 101, 102, 103, 104}));  // 1 decodes; 2 whole; 3 cut to the budget
  CHECK((head(step->positions, 8) == Ints{3, 0, 1, 0, 1, 2, 3, 4}));
  CHECK((lens(step) == Ints{4, 2, 5} && bounds(step) == Ints{0, 1, 3, 8}));
  CHECK((head(step->logit_rows, step->num_logit_rows) == Ints{0, 2}));
  CHECK((head(step->state_slot, 2) == Ints{0, 1} && head(step->draw_position, 2) == Ints{4, 2}));
  CHECK(!step->is_decode_only && step->rows[1].request_id == 2 && !step->rows[1].is_prompt_row);
}

TEST(an_incomplete_prefill_holds_the_line) {
  Scheduler s(small());
  s.submit(1, prompt(12), wants(2));
  s.submit(2, prompt(1), wants(2));
  StepPtr step = s.next_step();
  CHECK(step->num_seqs == 1 && step->num_logit_rows == 0 && lens(step) == Ints{8});
  CHECK(s.num_running() == 1 && s.num_waiting() == 1);
  CHECK(commit(s, step).empty());
  step = s.next_step();
  CHECK((lens(step) == Ints{12, 1} && step->num_logit_rows == 2));
}

TEST(pages_come_chunk_by_chunk) {
  Scheduler s(small());
  s.submit(1, prompt(12), wants(2));
  StepPtr step = s.next_step();
  CHECK(s.num_free_pages() == 14 && (head(step->page_table, 2) == Ints{0, 1}));
  s.warm();  // reads, and changes nothing: with a step in flight, without one, and when nothing is known
  commit(s, step);
  s.warm();
  step = s.next_step();
  CHECK(s.num_free_pages() == 13 && (head(step->page_table, 3) == Ints{0, 1, 2}));
  CHECK((head(step->slot_mapping, 4) == std::vector<int64_t>{8, 9, 10, 11}));
  commit(s, step);
  step = s.next_step();
  CHECK(s.num_free_pages() == 12 && step->is_decode_only && step->slot_mapping[0] == 12);
  commit(s, step);
  s.warm();
  CHECK(s.is_idle() && s.num_free_pages() == 16);
}

TEST(prompt_rows_are_limited_by_the_logit_rows_left) {
  Scheduler s(small());
  RequestParams params = wants(2);
  params.num_prompt_logprobs = 5;
  s.submit(1, prompt(1), wants(4));
  commit(s, s.next_step());
  s.submit(2, prompt(7), params);
  StepPtr step = s.next_step();  // 6 rows: one for the decode, five for the chunk
  CHECK((lens(step) == Ints{2, 5} && step->num_logit_rows == 6));
  CHECK((head(step->logit_target, 6) == Ints{-1, 101, 102, 103, 104, 105}));
  CHECK((head(step->state_slot, 6) == Ints{0, -1, -1, -1, -1, -1} && head(step->num_logprobs, 2) == Ints{-1, 5}));
  CHECK(step->rows[1].is_prompt_row && step->rows[1].position == 1 && step->rows[5].position == 5);
  commit(s, step);
  step = s.next_step();
  CHECK((head(step->logit_target, 3) == Ints{-1, 106, -1} && step->num_logit_rows == 3));
  CHECK((head(step->logit_rows, 3) == Ints{0, 1, 2}));
}

TEST(stop_and_length_end_a_request) {
  Scheduler s(small());
  RequestParams params = wants(3);
  params.stop_token_ids = {9, 5};
  s.submit(1, prompt(2), params);
  s.submit(2, prompt(2), params);
  StepPtr step = s.next_step();
  auto drawn = s.commit(step->id, Ints{5, 4});
  CHECK(drawn.size() == 2 && drawn[0].finish == FinishReason::Stop && drawn[1].finish == FinishReason::None);
  CHECK(commit(s, s.next_step(), 4)[0].finish == FinishReason::None);
  CHECK(commit(s, s.next_step(), 4)[0].finish == FinishReason::Length);
  CHECK(s.is_idle() && s.next_step() == nullptr && s.num_free_pages() == 16);
}

TEST(the_youngest_is_preempted_and_recomputed_without_emitting_again) {
  SchedulerConfig config = small();
  config.num_pages = 5;
  Scheduler s(config);
  RequestParams params = wants(9);
  params.num_prompt_logprobs = 0;
  s.submit(1, prompt(4), wants(16));
  s.submit(2, prompt(4), params);
  StepPtr step = s.next_step();
  CHECK((lens(step) == Ints{4, 4} && step->num_logit_rows == 5));
  for (int32_t i = 1; i <= 9; ++i, step = s.next_step()) {
    CHECK(step->num_seqs == (i <= 5 ? 2 : 1));  // then 1 takes the fifth page, and 2 waits for one
    commit(s, step, i);
  }
  CHECK(s.num_preemptions() == 1 && (lens(step) == Ints{13}));  // 1 took a page of 2
  CHECK(s.num_waiting() == 1 && s.num_running() == 1 && s.num_free_pages() == 1);
  for (int32_t i = 10; i <= 16; ++i, step = s.next_step()) CHECK(commit(s, step, i).size() == 1);
  // 1 has ended. 2 starts anew with all it knows, and asks no prompt row again.
  CHECK((tokens(step) == Ints{100, 101, 102, 103, 1, 2, 3, 4} && step->num_logit_rows == 0));
  CHECK(commit(s, step).empty());
  step = s.next_step();
  CHECK((tokens(step) == Ints{5} && step->num_logit_rows == 1 && step->draw_position[0] == 9));
  CHECK(commit(s, step, 6)[0].finish == FinishReason::None);
}

TEST(the_youngest_keeps_its_pages_when_it_is_the_one_in_need) {
  SchedulerConfig config = small();
  config.num_pages = 4;
  Scheduler s(config);
  s.submit(1, prompt(5), wants(4));
  s.submit(2, prompt(3), wants(6));
  StepPtr step = s.next_step();
  CHECK(step->num_seqs == 2 && s.num_free_pages() == 1);
  commit(s, step);
  commit(s, s.next_step());
  step = s.next_step();  // the second takes the last page
  CHECK(s.num_free_pages() == 0 && step->num_seqs == 2);
  commit(s, step);
  commit(s, s.next_step());  // the first ends by length
  CHECK(s.num_preemptions() == 0 && s.num_running() == 1 && s.num_free_pages() == 2);
}

TEST(with_two_steps_in_flight_inputs_come_from_the_last_token_table) {
  SchedulerConfig config = small();
  config.max_in_flight = 2;
  Scheduler s(config);
  RequestParams params = wants(3);
  params.stop_token_ids = {9};
  s.submit(1, prompt(2), params);
  s.submit(2, prompt(3), params);
  const StepPtr one = s.next_step();
  const StepPtr two = s.next_step();
  CHECK(s.next_step() == nullptr && s.num_in_flight() == 2);
  CHECK((tokens(two) == Ints{-1, -2} && head(two->positions, 2) == Ints{2, 3}));
  const auto drawn = s.commit(one->id, Ints{9, 4});
  CHECK(drawn.size() == 2 && drawn[0].finish == FinishReason::Stop);
  CHECK(s.num_running() == 1 && s.num_free_pages() == 14);  // the second step still writes to the first's page
  const StepPtr three = s.next_step();
  CHECK((tokens(three) == Ints{-2}));
  const auto later = commit(s, two, 8);
  CHECK(later.size() == 1 && later[0].request_id == 2);  // the draw of an ended request is discarded
  CHECK(s.num_free_pages() == 14);                       // page of 1 back, a second one for 2
  CHECK(s.next_step() == nullptr);                       // the last draw of 2 is in flight already
  CHECK(commit(s, three, 8)[0].finish == FinishReason::Length);
  CHECK(s.is_idle() && s.num_free_pages() == 16);
}

TEST(a_decode_waits_for_a_page_that_is_in_flight) {
  SchedulerConfig config = small();
  config.num_pages = 4;
  config.max_in_flight = 2;
  Scheduler s(config);
  s.submit(1, prompt(4), wants(12));
  s.submit(2, prompt(3), wants(8));
  std::deque<StepPtr> flying;
  std::map<int64_t, int> num_drawn;
  for (int i = 0; i < 100 && !s.is_idle(); ++i) {
    if (StepPtr step = s.next_step()) flying.push_back(step);
    if (flying.size() == 2 || i % 3 == 0) {
      if (flying.empty()) continue;
      for (const DrawnToken& d : commit(s, flying.front())) ++num_drawn[d.request_id];
      flying.pop_front();
    }
  }
  CHECK(s.is_idle() && s.num_preemptions() > 0 && num_drawn[1] == 12 && num_drawn[2] == 8);
}

TEST(abort_frees_at_once_or_when_the_last_step_is_over) {
  SchedulerConfig config = small();
  config.max_in_flight = 2;
  Scheduler s(config);
  s.submit(1, prompt(12), wants(4));
  s.submit(2, prompt(1), wants(4));
  CHECK(s.abort(2) && !s.abort(2) && s.num_waiting() == 1);  // waiting
  const StepPtr one = s.next_step();
  const StepPtr two = s.next_step();
  CHECK(s.abort(1) && !s.abort(1) && s.num_running() == 0 && s.num_free_pages() == 13);
  CHECK(contains(error_of([&] { s.submit(1, prompt(1), wants(1)); }), "one that is in use"));
  CHECK(commit(s, one).empty() && s.num_free_pages() == 13 && !s.is_idle());
  CHECK(commit(s, two).empty() && s.num_free_pages() == 16 && s.is_idle());
  s.submit(1, prompt(12), wants(4));
  commit(s, s.next_step());
  CHECK(s.num_free_pages() == 14 && s.abort(1) && s.is_idle());  // between two chunks
  s.submit(1, prompt(2), wants(4));
  commit(s, s.next_step());
  CHECK(s.abort(1) && s.num_free_pages() == 16 && s.is_idle());  // between two decodes
  CHECK(!s.abort(77));
}

TEST(a_failed_step_ends_its_requests_and_no_others) {
  SchedulerConfig config = small();
  config.max_in_flight = 2;
  Scheduler s(config);
  s.submit(1, prompt(2), wants(4));
  const StepPtr one = s.next_step();
  s.submit(2, prompt(2), wants(4));
  const StepPtr two = s.next_step();
  CHECK(two->num_seqs == 2);
  const auto failed = s.fail_step(one->id);
  CHECK(failed.size() == 1 && failed[0] == 1 && s.num_free_pages() == 14);
  const auto drawn = commit(s, two);
  CHECK(drawn.size() == 1 && drawn[0].request_id == 2 && s.num_free_pages() == 15 && s.num_running() == 1);
  const StepPtr three = s.next_step();
  CHECK(s.abort(2) && s.fail_step(three->id).empty() && s.is_idle() && s.num_free_pages() == 16);
}

TEST(a_step_that_is_held_is_not_written_again) {
  Scheduler s(small());
  s.submit(1, prompt(2), wants(10));
  const StepPtr held = s.next_step();
  const Ints before = tokens(held);
  commit(s, held);
  for (int i = 0; i < 8; ++i) {
    const StepPtr step = s.next_step();
    CHECK(step != held);
    commit(s, step);
  }
  CHECK(tokens(held) == before && held->num_tokens == 2);
}

TEST(a_step_allocates_nothing) {
  for (const int32_t depth : {1, 2}) {
    SchedulerConfig config{.max_num_seqs = 16, .max_prefill_tokens = 64, .max_logit_rows = 16, .max_model_len = 512,
                           .page_size = 4, .num_pages = 2048, .max_waiting = 64, .max_in_flight = depth};
    Scheduler s(config);
    for (int i = 0; i < 16; ++i) s.submit(i, prompt(10), wants(400));
    const std::array<int32_t, 16> drawn{};
    std::array<std::pair<int64_t, int32_t>, 2> flying;  // step, rows
    size_t num_flying = 0;
    const auto turn = [&] {
      while (const StepPtr step = s.next_step()) flying[num_flying++] = {step->id, step->num_logit_rows};
      s.commit(flying[0].first, std::span(drawn).first(static_cast<size_t>(flying[0].second)));
      flying[0] = flying[1];
      --num_flying;
    };
    for (int i = 0; i < 20; ++i) turn();  // prefill, and a few decodes
    CHECK(s.num_running() == 16 && s.num_waiting() == 0);
    const int64_t before = num_allocations;
    for (int i = 0; i < 300; ++i) turn();
    CHECK(num_allocations == before && s.num_running() == 16);
  }
}

TEST(refusals_say_what_is_needed_and_what_is_there) {
  Scheduler s(small());
  const auto submit = [&s](int64_t id, Ints tokens, RequestParams p) {
    return error_of([&] { s.submit(id, std::move(tokens), std::move(p)); });
  };
  CHECK(submit(1, {}, wants(1)) == "request 1: need a prompt of 1 token or more, have 0");
  CHECK(submit(1, {4, -2}, wants(1)) == "request 1: need token ids 0 or more, have -2");
  CHECK(submit(1, {4}, wants(0)) == "request 1: need max_new_tokens 1 or more, have 0");
  CHECK(submit(1, prompt(30), wants(3)) == "request 1: need 30 prompt + 3 new tokens, have max_model_len 32");
  SchedulerConfig tight = small();
  tight.num_pages = 2;
  Scheduler t(tight);
  CHECK(error_of([&] { t.submit(1, prompt(6), wants(3)); }) ==
        "request 1: need 3 pages of 4 positions for 6 prompt + 3 new tokens, have 2");
  for (int64_t id = 1; id <= 4; ++id) CHECK(submit(id, {1}, wants(1)) == "no error");
  CHECK(submit(4, {1}, wants(1)) == "request 4: need a new request_id, have one that is in use");
  CHECK(submit(5, {1}, wants(1)) == "request 5: need a place in the queue, have max_waiting 4 waiting already");
  CHECK(error_of([&] { s.commit(1, {}); }) == "commit of step 1: need a step in flight, have none");
  const StepPtr step = s.next_step();
  CHECK(error_of([&] { s.commit(2, {}); }) == "commit of step 2: need the oldest step in flight, 1");
  CHECK(error_of([&] { s.fail_step(2); }) == "fail_step of step 2: need the oldest step in flight, 1");
  CHECK(error_of([&] { s.commit(1, Ints{1}); }) == "commit of step 1: need 3 tokens, have 1");
  CHECK(error_of([&] { s.commit(1, Ints{1, -5, 1}); }) ==
        "commit of step 1: need token ids 0 or more, have -5 in row 1");
  CHECK(commit(s, step).size() == 3);  // a refused commit changed nothing
}

TEST(adjustments_stand_beside_the_rows_that_draw) {
  SchedulerConfig config = small();
  config.vocab_size = 40;
  Scheduler s(config);
  RequestParams counted = wants(4), biased = wants(4);
  counted.repetition_penalty = 1.5f;
  biased.bias_ids = {3, 39};
  biased.bias_values = {1.0f, -2.0f};
  biased.token_mask = {-1, 5};
  s.submit(1, prompt(10), counted);
  s.submit(2, prompt(2), biased);
  s.submit(3, prompt(1), wants(4));
  StepPtr step = s.next_step();  // 8 of 10 tokens: they are counted, though nothing draws
  CHECK((step->adjust_seq == Ints{0} && step->adjust_row == Ints{-1} && step->prompt_lens == Ints{10}));
  CHECK(step->count_slot.size() == 1 && step->bias_ids.empty() && step->cu_biases == (Ints{0, 0}));
  const int32_t slot = step->count_slot[0];
  commit(s, step);
  step = s.next_step();
  CHECK((head(step->adjustment, step->num_logit_rows) == Ints{0, 1, -1}));
  CHECK((step->adjust_seq == Ints{0, 1} && step->adjust_row == Ints{0, 1} && step->count_slot == Ints{slot, -1}));
  CHECK((step->cu_biases == Ints{0, 0, 2} && step->bias_ids == biased.bias_ids && step->bias_values == biased.bias_values));
  CHECK((step->mask_row == Ints{-1, 0} && step->token_masks == biased.token_mask));
  CHECK((step->repetition_penalty == std::vector<float>{1.5f, 1.0f}));
  commit(s, step);
  step = s.next_step();
  commit(s, step);
  const int64_t before = num_allocations;
  CHECK(s.next_step()->adjust_seq.size() == 2 && num_allocations == before);

  const auto refused = [&](Ints ids, std::vector<float> values, Ints mask) {
    RequestParams params = wants(1);
    params.bias_ids = std::move(ids);
    params.bias_values = std::move(values);
    params.token_mask = std::move(mask);
    return error_of([&] { s.submit(9, {1}, params); });
  };
  CHECK(refused({4, 4}, {1, 1}, {}) == "request 9: need bias_ids ascending and within a vocabulary of 40");
  CHECK(refused({40}, {1}, {}) == "request 9: need bias_ids ascending and within a vocabulary of 40");
  CHECK(refused({1}, {}, {}) == "request 9: need a value per bias, have 0 for 1 ids");
  CHECK(refused(Ints(1025), std::vector<float>(1025), {}) == "request 9: need at most 1024 logit biases, have 1025");
  CHECK(refused({}, {}, {1}) == "request 9: need a token mask of 2 words, have 1");
}

TEST(a_config_that_could_starve_is_refused) {
  const auto refused = [](auto change) {
    SchedulerConfig config = small();
    change(config);
    return error_of([&] { Scheduler s(config); });
  };
  CHECK(refused([](auto&) {}) == "no error");
  CHECK(refused([](auto& c) { c.max_prefill_tokens = 2; }) ==
        "scheduler config: max_prefill_tokens needs max_num_seqs (3) or more, have 2");
  CHECK(refused([](auto& c) { c.max_logit_rows = 2; }) ==
        "scheduler config: max_logit_rows needs max_num_seqs (3) or more, have 2");
  CHECK(refused([](auto& c) { c.num_pages = 0; }) == "scheduler config: num_pages needs 1 or more, have 0");
  CHECK(refused([](auto& c) { c.max_in_flight = 3; }) == "scheduler config: max_in_flight needs 1 or 2, have 3");
}

TEST(streams_do_not_depend_on_the_pool_or_the_depth) {
  // Draws depend on (seed, position) alone, as the device's do; every pool must give the same streams.
  std::map<int64_t, Ints> expected;
  for (const int32_t num_pages : {64, 12, 8}) {
    for (const int32_t depth : {1, 2}) {
      SchedulerConfig config = small();
      config.num_pages = num_pages;
      config.max_in_flight = depth;
      config.max_waiting = 100;
      Scheduler s(config);
      std::mt19937 random(11);
      for (int64_t id = 0; id < 40; ++id) {
        RequestParams params = wants(1 + static_cast<int32_t>(random() % 16));
        params.seed = random();
        params.stop_token_ids = {0};
        s.submit(id, prompt(1 + static_cast<int32_t>(random() % 16)), params);
      }
      std::map<int64_t, Ints> streams;
      std::deque<StepPtr> flying;
      int turns = 0;
      for (; !s.is_idle() && turns < 5000; ++turns) {
        if (StepPtr step = s.next_step()) flying.push_back(step);
        if (flying.empty() || (static_cast<int32_t>(flying.size()) < depth && turns % 4 != 0)) continue;
        const Step& step = *flying.front();
        Ints drawn;
        for (int32_t r = 0; r < step.num_logit_rows; ++r) {
          const auto at = static_cast<size_t>(r);
          const uint64_t mixed = step.seed[at] * 2654435761u + static_cast<uint64_t>(step.draw_position[at]) * 40503u;
          drawn.push_back(static_cast<int32_t>(mixed >> 7 & 15));
        }
        for (const DrawnToken& d : s.commit(step.id, drawn)) streams[d.request_id].push_back(d.token);
        flying.pop_front();
      }
      CHECK(s.is_idle() && s.num_free_pages() == num_pages && streams.size() == 40);
      if (num_pages == 64) CHECK(s.num_preemptions() == 0);
      if (num_pages == 8) CHECK(s.num_preemptions() > 0);
      if (expected.empty()) expected = streams;
      CHECK(streams == expected);
    }
  }
}

TEST_MAIN
