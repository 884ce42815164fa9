// What the scheduler plans, step by step, and what it refuses. How requests end, with steps in flight, is in
// test_scheduler_ends.cpp, cached pages in test_scheduler_cache.cpp, who comes first in test_scheduler_order.cpp.
#include "scheduler/scheduler.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <deque>
#include <map>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "scheduler_fixture.h"
#include "test.h"

using namespace tokenspeed::scheduler;
using namespace tokenspeed::scheduler::testing;

static_assert(!std::is_copy_constructible_v<Scheduler> && !std::is_move_constructible_v<Scheduler>);
static_assert(!std::is_copy_constructible_v<Step> && !std::is_move_constructible_v<Step>);

// Counts allocations, to show that a step makes none.
static int64_t num_allocations = 0;
[[gnu::noinline]] void* operator new(size_t size) {
  ++num_allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

TEST(decodes_come_first_then_chunks_in_arrival_order) {
  Scheduler s(small());
  s.submit(1, prompt(3), wants(4));
  commit(s, s.next_step());
  s.submit(2, prompt(2), wants(4));
  s.submit(3, prompt(6), wants(4));
  const Step* step = s.next_step();
  CHECK((tokens(step) == Ints{-1, 100, 101, 100, 101, 102, 103, 104}));  // 1 decodes; 2 whole; 3 cut to the budget
  CHECK((head(step->positions, 8) == Ints{3, 0, 1, 0, 1, 2, 3, 4}));
  CHECK((lens(step) == Ints{4, 2, 5} && bounds(step) == Ints{0, 1, 3, 8}));
  CHECK((head(step->logit_rows, step->num_logit_rows) == Ints{0, 2}));
  CHECK((head(step->state_slot, 2) == Ints{0, 1} && head(step->draw_position, 2) == Ints{4, 2}));
  CHECK(!step->is_decode_only() && step->rows[1].request_id == 2 && !step->rows[1].is_prompt_row);
}

TEST(an_incomplete_prefill_holds_the_line) {
  Scheduler s(small());
  s.submit(1, prompt(12), wants(2));
  s.submit(2, prompt(1), wants(2));
  const Step* step = s.next_step();
  CHECK(step->num_seqs == 1 && step->num_logit_rows == 0 && lens(step) == Ints{8});
  CHECK(s.num_running() == 1 && s.num_waiting() == 1);
  CHECK(commit(s, step).empty());
  step = s.next_step();
  CHECK((lens(step) == Ints{12, 1} && step->num_logit_rows == 2));
}

TEST(pages_come_chunk_by_chunk) {
  Scheduler s(small());
  s.submit(1, prompt(12), wants(2));
  const Step* step = s.next_step();
  CHECK(to_be_had(s) == 14 && (head(step->page_table, 2) == Ints{0, 1}));
  s.warm();  // reads, and changes nothing: with a step in flight, without one, and when nothing is known
  commit(s, step);
  s.warm();
  step = s.next_step();
  CHECK(to_be_had(s) == 12 && (pages(step, 0, 3) == Ints{0, 1, 2}));  // and a page for the first decode
  CHECK((head(step->slot_mapping, 4) == std::vector<int64_t>{8, 9, 10, 11}));
  commit(s, step);
  step = s.next_step();
  CHECK(to_be_had(s) == 12 && step->is_decode_only() && step->slot_mapping[0] == 12);
  commit(s, step);
  s.warm();
  CHECK(s.is_idle() && to_be_had(s) == 16);
}

TEST(prompt_rows_are_limited_by_the_logit_rows_left) {
  Scheduler s(small());
  RequestParams params = wants(2);
  params.num_prompt_logprobs = 5;
  s.submit(1, prompt(1), wants(4));
  commit(s, s.next_step());
  s.submit(2, prompt(7), params);
  const Step* step = s.next_step();  // 6 rows: one for the decode, five for the chunk
  CHECK((lens(step) == Ints{2, 5} && step->num_logit_rows == 6));
  CHECK((head(step->logit_target, 6) == Ints{-1, 101, 102, 103, 104, 105}));
  CHECK((head(step->state_slot, 6) == Ints{0, -1, -1, -1, -1, -1} && head(step->num_logprobs, 2) == Ints{-1, 5}));
  CHECK(step->rows[1].is_prompt_row && step->draw_position[1] == 1 && step->draw_position[5] == 5);
  commit(s, step);
  step = s.next_step();
  CHECK((head(step->logit_target, 3) == Ints{-1, 106, -1} && step->num_logit_rows == 3));
  CHECK((head(step->logit_rows, 3) == Ints{0, 1, 2}));
}

TEST(chunks_before_the_first_prompt_row_need_no_logit_rows) {
  SchedulerConfig config = small();
  config.max_prefill_tokens = 7;
  Scheduler s(config);
  RequestParams params = wants(2);
  params.num_prompt_logprobs = 0;
  params.logprob_start_len = 9;
  s.submit(1, prompt(12), params);
  const Step* step = s.next_step();
  CHECK((lens(step) == Ints{7} && step->num_logit_rows == 0));
  commit(s, step);
  step = s.next_step();
  CHECK((lens(step) == Ints{12} && head(step->logit_rows, 4) == Ints{1, 2, 3, 4}));
  CHECK((head(step->logit_target, 4) == Ints{109, 110, 111, -1}) && step->num_logit_rows == 4);
  commit(s, step, 1);
  for (const int32_t start : {13, -1}) {
    params.logprob_start_len = start;
    const std::string need = "request 2: need logprob_start_len 0 to 12, the length of the prompt, have ";
    CHECK(error_of([&] { s.submit(2, prompt(12), params); }) == need + std::to_string(start));
  }
}

TEST(the_youngest_is_preempted_and_recomputed_without_emitting_again) {
  SchedulerConfig config = small();
  config.num_pages = 5;
  Scheduler s(config);
  RequestParams params = wants(9);
  params.num_prompt_logprobs = 0;
  s.submit(1, prompt(4), wants(16));
  s.submit(2, prompt(4), params);
  const Step* step = s.next_step();
  CHECK((lens(step) == Ints{4, 4} && step->num_logit_rows == 5));
  for (int32_t i = 1; i <= 9; ++i, step = s.next_step()) {
    CHECK(step->num_seqs == (i <= 5 ? 2 : 1));  // then 1 takes the fifth page, and 2 waits for one
    commit(s, step, i);
  }
  CHECK(s.counters().preemptions == 1 && (lens(step) == Ints{13}));  // 1 took a page of 2
  CHECK(s.num_waiting() == 1 && s.num_running() == 1 && to_be_had(s) == 1);
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
  const Step* step = s.next_step();
  CHECK(step->num_seqs == 2 && to_be_had(s) == 1);
  commit(s, step);
  commit(s, s.next_step());
  step = s.next_step();  // the second takes the last page
  CHECK(to_be_had(s) == 0 && step->num_seqs == 2);
  commit(s, step);
  commit(s, s.next_step());  // the first ends by length
  CHECK(s.counters().preemptions == 0 && s.num_running() == 1 && to_be_had(s) == 2);
}

TEST(a_step_allocates_nothing) {
  for (const int32_t depth : {1, 2, 3}) {
    for (const bool same : {false, true}) {  // the same prompts and draws: each page but the first one's is a duplicate
      SchedulerConfig config{.max_num_seqs = 16, .max_prefill_tokens = 64, .max_logit_rows = 16, .max_model_len = 512,
                             .page_size = 4, .num_pages = 2048, .max_waiting = 64, .max_in_flight = depth};
      Scheduler s(config);
      for (int i = 0; i < 16; ++i) s.submit(i, prompt(10, same ? 1 : 100 * i), wants(400));
      const std::array<int32_t, 16> drawn{};
      std::array<const Step*, 4> flying{};
      size_t num_flying = 0;
      const auto turn_around = [&] {
        while (const Step* step = s.next_step()) flying[num_flying++] = step;
        s.commit(flying[0]->id, std::span(drawn).first(static_cast<size_t>(flying[0]->num_logit_rows)));
        std::copy_n(flying.begin() + 1, --num_flying, flying.begin());
      };
      for (int i = 0; i < 40; ++i) turn_around();  // prefill, and a few decodes
      CHECK(s.num_running() == 16 && s.num_waiting() == 0);
      const int64_t before = num_allocations;
      for (int i = 0; i < 300; ++i) turn_around();
      CHECK(num_allocations == before && s.num_running() == 16);
    }
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
  const Step* step = s.next_step();
  CHECK(error_of([&] { s.commit(2, {}); }) == "commit of step 2: need the oldest step in flight, 1");
  CHECK(error_of([&] { s.fail_step(2); }) == "fail_step of step 2: need the oldest step in flight, 1");
  CHECK(error_of([&] { s.commit(1, Ints{1}); }) == "commit of step 1: need 3 tokens, have 1");
  CHECK(error_of([&] { s.commit(1, Ints{1, -5, 1}); }) ==
        "commit of step 1: need token ids 0 or more, have -5 in row 1");
  CHECK(commit(s, step).size() == 3);  // a refused commit changed nothing
}

TEST(several_short_prompts_complete_in_one_step) {
  Scheduler s(small());
  for (int64_t id = 1; id <= 4; ++id) s.submit(id, prompt(2), wants(3));
  const Step* step = s.next_step();
  CHECK((lens(step) == Ints{2, 2, 2} && ids(step) == Ids{1, 2, 3}));
  CHECK(step->decision.held == Held::Slots && s.num_running() == 3 && s.num_waiting() == 1);
  CHECK(step->decision.num_chunks == 3 && step->decision.num_prefill_tokens == 6);
  CHECK(step->decision.admitted.size() == 3 && step->decision.admitted[2].request_id == 3);
  commit(s, step);
  step = s.next_step();
  CHECK(step->is_decode_only() && (bounds(step) == Ints{0, 1, 2, 3}));
}

TEST(a_request_is_admitted_for_its_chunk_and_the_decode_that_it_completes) {
  SchedulerConfig config = small();
  config.num_pages = 3;
  Scheduler s(config);
  s.submit(1, prompt(8), wants(4));  // two pages, and one more for its first decode
  CHECK((lens(s.next_step()) == Ints{8}) && to_be_had(s) == 0);
  Scheduler t(config);
  t.submit(1, prompt(1), wants(11));
  CHECK(turn(t) && to_be_had(t) == 2);
  t.submit(2, prompt(4), wants(4));
  const Step* step = t.next_step();  // two pages, and one that the decode may need: there are two
  CHECK(step->decision.held == Held::Pages && (lens(step) == Ints{2}) && step->decision.num_waiting == 1);
  commit(t, step);
  t.submit(3, prompt(1), wants(1));
  CHECK(t.next_step()->num_seqs == 1);  // who is first in the queue keeps the others out, even where they would fit
  CHECK(t.abort(2) && t.num_in_flight() == 1 && t.num_waiting() == 1);
}

TEST(a_prompt_that_fits_in_no_step_is_admitted_for_its_first_chunk_alone) {
  SchedulerConfig config = small();
  config.num_pages = 8;
  Scheduler s(config);
  s.submit(1, prompt(3), wants(20));
  CHECK(turn(s) && to_be_had(s) == 7);
  s.submit(2, prompt(24), wants(4));  // 7 pages in the end
  const Step* step = s.next_step();
  CHECK((lens(step) == Ints{4, 7}) && to_be_had(s) == 5 && step->decision.held == Held::ChunkFirst);
}

TEST(a_chunk_is_cut_to_the_pages_that_are_to_be_had) {
  SchedulerConfig config = small();
  config.num_pages = 5;
  Scheduler s(config);
  s.submit(1, prompt(4), wants(4));
  CHECK(turn(s) && to_be_had(s) == 3);
  s.submit(2, prompt(14), wants(2));
  const Step* step = s.next_step();
  CHECK((lens(step) == Ints{5, 7}) && to_be_had(s) == 1);
  commit(s, step);
  step = s.next_step();
  CHECK((lens(step) == Ints{6, 12}) && to_be_had(s) == 0);  // of 14
  commit(s, step);
  step = s.next_step();
  CHECK((lens(step) == Ints{7}) && step->decision.held == Held::ChunkFirst);  // 2 waits for the pages of 1, which ends
  CHECK(commit(s, step)[0].finish == FinishReason::Length);
  CHECK((lens(s.next_step()) == Ints{14}));
}

// The bounds of docs/scheduler.md. A decode: one token in every step. A prefill: whatever the decodes leave, which is
// max_prefill_tokens - max_num_seqs + 1 at least.
TEST(neither_decodes_nor_a_prefill_starve) {
  for (const int32_t depth : {1, 2, 3}) {
    SchedulerConfig config = small();
    config.max_in_flight = depth;
    config.max_model_len = 512;
    config.num_pages = 512;
    config.max_waiting = 100;
    Scheduler s(config);
    s.submit(1, prompt(1), wants(200));
    s.submit(2, prompt(1), wants(200));
    turn(s);
    for (int64_t id = 3; id <= 5; ++id) s.submit(id, prompt(120), wants(1));
    std::deque<const Step*> flying;
    int num_chunks = 0;
    for (int i = 0; i < 60; ++i) {
      while (const Step* step = s.next_step()) {
        flying.push_back(step);
        CHECK(step->num_decodes == 2 && step->num_tokens <= 8);
        if (step->decision.held != Held::ChunkFirst) continue;
        ++num_chunks;
        CHECK(step->decision.num_prefill_tokens == config.max_prefill_tokens - config.max_num_seqs + 1);
      }
      commit(s, flying.front());
      flying.pop_front();
    }
    CHECK(num_chunks > 50);
  }
}

// Rows are written in full only when another request comes to them: nothing of one may be left for the next.
TEST(a_row_holds_nothing_of_the_request_before) {
  SchedulerConfig config = small();
  config.vocab_size = 40;
  Scheduler s(config);
  const auto params = [](int32_t n, bool adjusts) {
    RequestParams p = wants(n);
    const auto f = static_cast<float>(n);
    p.temperature = f, p.top_p = f + 0.25f, p.min_p = f + 0.5f, p.top_k = n, p.num_logprobs = n, p.seed = 1000 + n;
    if (adjusts) p.bias_ids = {n}, p.bias_values = {f};
    return p;
  };
  std::map<int64_t, RequestParams> asked;
  std::map<int64_t, int32_t> num_known;
  const auto submit = [&](int64_t id, int32_t n, bool adjusts) {
    asked[id] = params(n, adjusts);
    num_known[id] = 3;
    s.submit(id, prompt(3), asked[id]);
  };
  submit(1, 5, true), submit(2, 9, false), submit(3, 7, true);
  int64_t next = 4;
  for (int i = 0; i < 40; ++i) {
    const Step* step = s.next_step();
    for (int32_t row = 0; row < step->num_logit_rows; ++row) {
      const int64_t id = step->rows[static_cast<size_t>(row)].request_id;
      const RequestParams& p = asked[id];
      CHECK(step->temperature[row] == p.temperature && step->top_p[row] == p.top_p && step->min_p[row] == p.min_p);
      CHECK(step->top_k[row] == p.top_k && step->seed[row] == p.seed && step->num_logprobs[row] == p.num_logprobs);
      CHECK(step->logit_target[row] == -1 && step->draw_position[row] == num_known[id]);
      const int32_t a = step->adjustment[row];
      CHECK((a >= 0) == !p.bias_ids.empty());
      CHECK(a < 0 || (step->adjust_row[a] == row && step->bias_ids[step->cu_biases[a]] == p.bias_ids[0]));
    }
    for (const DrawnToken& drawn : commit(s, step)) {
      num_known[drawn.request_id] += 1;
      if (drawn.finish != FinishReason::None) {
        submit(next, 3 + static_cast<int32_t>(next % 5), next % 2 == 0);
        ++next;
      }
    }
    if (i % 7 == 3) {
      const int64_t id = s.requests()[static_cast<size_t>(i) % 3].request_id;
      s.preempt(id);  // it comes back in another row, and others move to its own
    }
  }
  CHECK(next > 15 && s.counters().preemptions > 3);
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
  const Step* step = s.next_step();  // 8 of 10 tokens: they are counted, though nothing draws
  CHECK(step->num_adjustments == 1 && step->adjust_seq[0] == 0 && step->adjust_row[0] == -1);
  CHECK(step->prompt_lens[0] == 10 && step->num_biases == 0 && step->num_masks == 0 && step->cu_biases[1] == 0);
  const int32_t slot = step->count_slot[0];
  commit(s, step);
  for (int i = 0; i < 2; ++i) {  // chunks, then decodes
    step = s.next_step();
    CHECK((head(step->adjustment, step->num_logit_rows) == Ints{0, 1, -1}) && step->num_adjustments == 2);
    CHECK((head(step->adjust_seq, 2) == Ints{0, 1} && head(step->adjust_row, 2) == Ints{0, 1}));
    CHECK((head(step->count_slot, 2) == Ints{slot, -1} && head(step->cu_biases, 3) == Ints{0, 0, 2}));
    CHECK(head(step->bias_ids, 2) == biased.bias_ids && head(step->bias_values, 2) == biased.bias_values);
    CHECK((head(step->mask_row, 2) == Ints{-1, 0} && head(step->token_masks, 2) == biased.token_mask));
    CHECK(step->repetition_penalty[0] == 1.5f && step->repetition_penalty[1] == 1.0f);
    CHECK((head(step->step_sizes, 6) == Ints{step->num_tokens, 3, 3, 2, 2, 1}));
    commit(s, step);
  }
  const int64_t before = num_allocations;
  CHECK(s.next_step()->num_adjustments == 2 && num_allocations == before);

  const auto refused = [&](Ints bias_ids, std::vector<float> values, Ints mask) {
    RequestParams params = wants(1);
    params.bias_ids = std::move(bias_ids);
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

TEST(steps_are_written_to_the_memory_that_is_given) {
  SchedulerConfig config = small();
  config.max_in_flight = 2;
  std::vector<std::vector<std::byte>> buffers(2, std::vector<std::byte>(1 << 14));
  std::vector<uint64_t> offsets;
  for (size_t i = 0; i < StepMemory::kNumTensors; ++i) offsets.push_back(512 * i);
  const std::vector<StepMemory> io = {{buffers[0], offsets}, {buffers[1], offsets}};
  Scheduler s(config, io);
  s.submit(1, prompt(3), wants(4));
  const Step* one = s.next_step();
  const Step* two = s.next_step();
  const auto at = [&](const Step* step, size_t tensor) {
    return reinterpret_cast<const int32_t*>(buffers[static_cast<size_t>(step->id % 2)].data() + offsets[tensor]);
  };
  CHECK(one->step_sizes == at(one, 0) && one->token_ids == at(one, 1) && one->token_masks == at(one, 29));
  CHECK((head(at(one, 1), 3) == Ints{100, 101, 102}) && at(two, 1)[0] == -1 && at(two, 2)[0] == 3);

  CHECK(error_of([&] { Scheduler t(config, {io[0]}); }) ==
        "scheduler: need memory for each of max_in_flight 2 steps, have it for 1");
  CHECK(error_of([&] { Scheduler t(config, {{buffers[0], {0}}, io[1]}); }) == "step inputs: need 30 offsets, have 1");
  offsets[2] = (1 << 14) - 16;
  CHECK(error_of([&] { Scheduler t(config, {io[0], {buffers[1], offsets}}); }) ==
        "step inputs: tensor 2 needs 32 bytes at byte 16368 of 16384");
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
  CHECK(refused([](auto& c) { c.max_in_flight = 4; }) == "scheduler config: max_in_flight needs 1 to 3, have 4");
}

TEST_MAIN
