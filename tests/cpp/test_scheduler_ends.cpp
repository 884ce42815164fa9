// How requests end: by stop and length, abort and faults, with one to three steps in flight.
#include <cstdlib>
#include <deque>
#include <map>
#include <random>
#include <string>

#include "scheduler_fixture.h"
#include "test.h"

using namespace tokenspeed::scheduler;
using namespace tokenspeed::scheduler::testing;

TEST(stop_and_length_end_a_request) {
  Scheduler s(small());
  RequestParams params = wants(3);
  params.stop_token_ids = {9, 5};
  s.submit(1, prompt(2), params);
  s.submit(2, prompt(2), params);
  const Step* step = s.next_step();
  auto drawn = s.commit(step->id, Ints{5, 4});
  CHECK(drawn.size() == 2 && drawn[0].finish == FinishReason::Stop && drawn[1].finish == FinishReason::None);
  CHECK(commit(s, s.next_step(), 4)[0].finish == FinishReason::None);
  CHECK(commit(s, s.next_step(), 4)[0].finish == FinishReason::Length);
  CHECK(s.is_idle() && s.next_step() == nullptr && to_be_had(s) == 16);
}

TEST(with_two_steps_in_flight_inputs_come_from_the_last_token_table) {
  SchedulerConfig config = small();
  config.max_in_flight = 2;
  Scheduler s(config);
  RequestParams params = wants(3);
  params.stop_token_ids = {9};
  s.submit(1, prompt(2), params);
  s.submit(2, prompt(3), params);
  const Step* one = s.next_step();
  const Step* two = s.next_step();
  CHECK(s.next_step() == nullptr && s.num_in_flight() == 2);
  CHECK((tokens(two) == Ints{-1, -2} && head(two->positions, 2) == Ints{2, 3}));
  const auto drawn = s.commit(one->id, Ints{9, 4});
  CHECK(drawn.size() == 2 && drawn[0].finish == FinishReason::Stop);
  CHECK(s.num_running() == 1 && to_be_had(s) == 14);  // the second step still writes to the first's page
  const Step* three = s.next_step();
  CHECK((tokens(three) == Ints{-2}));
  const auto later = commit(s, two, 8);
  CHECK(later.size() == 1 && later[0].request_id == 2);  // the draw of an ended request is discarded
  CHECK(to_be_had(s) == 14);                       // page of 1 back, a second one for 2
  CHECK(s.next_step() == nullptr);                       // the last draw of 2 is in flight already
  CHECK(commit(s, three, 8)[0].finish == FinishReason::Length);
  CHECK(s.is_idle() && to_be_had(s) == 16);
}

TEST(abort_frees_at_once_or_when_the_last_step_is_over) {
  SchedulerConfig config = small();
  config.max_in_flight = 2;
  Scheduler s(config);
  s.submit(1, prompt(12), wants(4));
  s.submit(2, prompt(1), wants(4));
  CHECK(s.abort(2) && !s.abort(2) && s.num_waiting() == 1);  // waiting
  const Step* one = s.next_step();
  const Step* two = s.next_step();
  CHECK(s.abort(1) && !s.abort(1) && s.num_running() == 0 && to_be_had(s) == 12);
  CHECK(error_of([&] { s.submit(1, prompt(1), wants(1)); }) ==
        "request 1: need a new request_id, have one that is in use");
  CHECK(commit(s, one).empty() && to_be_had(s) == 12 && !s.is_idle());
  CHECK(commit(s, two).empty() && to_be_had(s) == 16 && s.is_idle());
  s.submit(1, prompt(12), wants(4));
  commit(s, s.next_step());
  CHECK(to_be_had(s) == 14 && s.abort(1) && s.is_idle());  // between two chunks
  s.submit(1, prompt(2), wants(4));
  commit(s, s.next_step());
  CHECK(s.abort(1) && to_be_had(s) == 16 && s.is_idle());  // between two decodes
  CHECK(!s.abort(77));
}

TEST(a_failed_step_ends_its_requests_and_no_others) {
  SchedulerConfig config = small();
  config.max_in_flight = 2;
  Scheduler s(config);
  s.submit(1, prompt(2), wants(4));
  const Step* one = s.next_step();
  s.submit(2, prompt(2), wants(4));
  const Step* two = s.next_step();
  CHECK(two->num_seqs == 2);
  const auto failed = s.fail_step(one->id);
  CHECK(failed.size() == 1 && failed[0] == 1 && to_be_had(s) == 14);
  const auto drawn = commit(s, two);
  CHECK(drawn.size() == 1 && drawn[0].request_id == 2 && to_be_had(s) == 15 && s.num_running() == 1);
  const Step* three = s.next_step();
  CHECK(s.abort(2) && s.fail_step(three->id).empty() && s.is_idle() && to_be_had(s) == 16);
}

TEST(with_three_steps_in_flight_a_request_is_planned_to_its_end) {
  SchedulerConfig config = small();
  config.max_in_flight = 3;
  Scheduler s(config);
  s.submit(1, prompt(12), wants(3));
  const Step* steps[] = {s.next_step(), s.next_step(), s.next_step()};
  CHECK(s.next_step() == nullptr && s.num_in_flight() == 3);
  CHECK((lens(steps[0]) == Ints{8} && lens(steps[1]) == Ints{12} && tokens(steps[2]) == Ints{-1}));
  const RequestStatus status = s.requests()[0];
  CHECK(std::string(status.state) == "decoding" && status.num_steps_in_flight == 3 && status.num_positions == 13);
  CHECK(commit(s, steps[0]).empty() && commit(s, steps[1], 5)[0].token == 5);
  const Step* last = s.next_step();
  CHECK(s.next_step() == nullptr && (lens(last) == Ints{14}));  // its third token is drawn there
  CHECK(commit(s, steps[2], 6)[0].finish == FinishReason::None);
  CHECK(commit(s, last, 7)[0].finish == FinishReason::Length && s.is_idle() && to_be_had(s) == 16);
}

TEST(abort_with_three_steps_in_flight_waits_for_all) {
  SchedulerConfig config = small();
  config.max_in_flight = 3;
  Scheduler s(config);
  s.submit(1, prompt(2), wants(9));
  const Step* steps[] = {s.next_step(), s.next_step(), s.next_step()};
  CHECK(s.abort(1) && !s.abort(1) && s.num_running() == 0 && to_be_had(s) < 16);
  for (const Step* step : steps) {
    CHECK(to_be_had(s) < 16 && std::string(s.requests()[0].state) == "draining");
    CHECK(step == steps[1] ? fail(s, step).empty() : commit(s, step).empty());
  }
  CHECK(s.is_idle() && to_be_had(s) == 16);
}

TEST(streams_do_not_depend_on_the_pool_or_the_depth) {
  // Draws depend on (seed, position) alone, as the device's do; every pool must give the same streams.
  std::map<int64_t, Ints> expected;
  for (const int32_t num_pages : {64, 12, 8}) {
    for (const int32_t depth : {1, 2, 3, -1, -2, -3}) {  // below 0: with a prefix index
      SchedulerConfig config = depth > 0 ? small() : cached();
      config.num_pages = num_pages;
      config.max_in_flight = std::abs(depth);
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
      std::deque<const Step*> flying;
      int turns = 0;
      for (; !s.is_idle() && turns < 5000; ++turns) {
        if (const Step* step = s.next_step()) flying.push_back(step);
        if (flying.empty() || (static_cast<int32_t>(flying.size()) < std::abs(depth) && turns % 4 != 0)) continue;
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
      CHECK(s.is_idle() && to_be_had(s) == num_pages && streams.size() == 40);
      if (num_pages == 64) CHECK(s.counters().preemptions == 0);
      if (num_pages == 8) CHECK(s.counters().preemptions > 0);
      if (expected.empty()) expected = streams;
      CHECK(streams == expected);
    }
  }
}

TEST(a_decode_waits_for_a_page_that_is_in_flight) {
  SchedulerConfig config = small();
  config.num_pages = 4;
  config.max_in_flight = 2;
  Scheduler s(config);
  s.submit(1, prompt(4), wants(12));
  s.submit(2, prompt(3), wants(8));
  std::deque<const Step*> flying;
  std::map<int64_t, int> num_drawn;
  for (int i = 0; i < 100 && !s.is_idle(); ++i) {
    if (const Step* step = s.next_step()) flying.push_back(step);
    if (flying.size() == 2 || i % 3 == 0) {
      if (flying.empty()) continue;
      for (const DrawnToken& d : commit(s, flying.front())) ++num_drawn[d.request_id];
      flying.pop_front();
    }
  }
  CHECK(s.is_idle() && s.counters().preemptions > 0 && num_drawn[1] == 12 && num_drawn[2] == 8);
}

TEST_MAIN
