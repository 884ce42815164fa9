// Who comes first: priorities, fair share, deadlines and preemption, as the scheduler has them of its queue.
#include <set>
#include <string>

#include "scheduler_fixture.h"
#include "test.h"

using namespace tokenspeed::scheduler;
using namespace tokenspeed::scheduler::testing;

namespace {

RequestParams of(int32_t max_new_tokens, int32_t priority, int32_t tenant = 0) {
  RequestParams params = wants(max_new_tokens);
  params.priority = priority;
  params.tenant = tenant;
  return params;
}

// One place, so that admissions come one by one. Returns them in order.
Ids admissions(Scheduler& s, int64_t now_ns = 0) {
  Ids order;
  while (const Step* step = s.next_step(now_ns)) {
    for (const Admission& a : step->decision.admitted) order.push_back(a.request_id);
    commit(s, step);
  }
  return order;
}

SchedulerConfig one_place() {
  SchedulerConfig config = small();
  config.max_num_seqs = 1;
  config.max_waiting = 100;
  return config;
}

}  // namespace

TEST(a_lower_class_comes_first_and_then_who_arrived_first) {
  Scheduler s(one_place());
  s.submit(1, prompt(2), of(1, 5)), s.submit(2, prompt(2), of(1, 9)), s.submit(3, prompt(2), of(1, 0));
  s.submit(4, prompt(2), of(1, 5));
  CHECK((admissions(s) == Ids{3, 1, 4, 2}));
  CHECK(error_of([&] { s.submit(5, {1}, of(1, 10)); }) == "request 5: need a priority of 0 to 9, have 10");
  CHECK(error_of([&] { s.submit(5, {1}, of(1, 0, -1)); }) == "request 5: need a tenant of 0 or more, have -1");
}

TEST(who_waits_long_gains_a_class) {
  SchedulerConfig config = one_place();
  config.aging_ns = 100;
  Scheduler s(config);
  s.submit(1, prompt(2), of(1, 2), 0);
  s.submit(2, prompt(2), of(1, 0), 250);
  CHECK(s.oldest_wait(300) == 300);
  const Step* step = s.next_step(300);  // it has gained three classes
  CHECK(step->decision.admitted[0].request_id == 1 && step->decision.admitted[0].waited_ns == 300);
  commit(s, step);
  CHECK((admissions(s, 300) == Ids{2}));
}

TEST(tenants_share_by_the_tokens_they_are_served) {
  Scheduler s(one_place());
  for (int64_t id = 1; id <= 4; ++id) s.submit(id, prompt(8), of(1, 0, 1));
  for (int64_t id = 5; id <= 12; ++id) s.submit(id, prompt(2), of(1, 0, 2));
  const Ids order = admissions(s);
  CHECK(order.size() == 12 && order[0] == 1);
  // While the first tenant is served 8 tokens, the second is served 4 requests of 2.
  CHECK((Ids(order.begin(), order.begin() + 6) == Ids{1, 5, 6, 7, 8, 2}));
}

TEST(a_deadline_ends_a_request_wherever_it_is) {
  SchedulerConfig config = small();
  config.max_in_flight = 2;
  config.max_num_seqs = 2;
  Scheduler s(config);
  const auto until = [](int32_t n, int64_t deadline_ns) {
    RequestParams params = wants(n);
    params.deadline_ns = deadline_ns;
    return params;
  };
  const auto expire = [&s](int64_t now_ns) {
    const auto ended = s.expire(now_ns);
    return Ids(ended.begin(), ended.end());
  };
  s.submit(1, prompt(2), until(9, 100));
  s.submit(2, prompt(2), until(9, 50));
  s.submit(3, prompt(2), until(9, 100));
  s.submit(4, prompt(2), wants(2));
  const Step* one = s.next_step();
  const Step* two = s.next_step();
  CHECK(expire(49).empty() && (expire(50) == Ids{2}) && s.num_running() == 1);
  CHECK((expire(1000) == Ids{1, 3}) && expire(2000).empty() && s.counters().expired == 3);  // in flight, and waiting
  CHECK(commit(s, one).empty() && commit(s, two).empty() && !s.abort(1));
  s.submit(5, prompt(2), until(1, 5000));
  run_dry(s);
  CHECK(s.is_idle() && expire(9000).empty() && to_be_had(s) == 16);  // who ended before has no deadline any more
}

TEST(preempted_requests_wait_before_all_new_ones) {
  Scheduler s(one_place());
  s.submit(1, prompt(3), of(6, 9), 10);
  commit(s, s.next_step(20));
  s.submit(2, prompt(3), of(6, 0), 30);
  CHECK(s.expire(40).empty() && s.preempt(1) && s.num_waiting() == 2 && s.num_preempted() == 1);
  CHECK(std::string(s.requests()[0].state) == "preempted" && s.requests()[0].num_pages == 0);
  const Step* step = s.next_step(70);
  const Admission& back = step->decision.admitted.at(0);
  CHECK(back.request_id == 1 && back.is_resumed && back.waited_ns == 30 && (step->decision.preempted == Ids{1}));
  CHECK((tokens(step) == Ints{100, 101, 102, 1}));
  commit(s, step);
}

TEST(nobody_is_preempted_twice_without_a_token_in_between) {
  Scheduler s(small());
  s.submit(1, prompt(12), wants(6));
  CHECK(!s.preempt(1) && !s.preempt(7));  // waits; is not known
  turn(s);
  CHECK(s.preempt(1) && !s.preempt(1));
  turn(s);
  CHECK(!s.preempt(1));  // half of its prompt is no progress
  const Step* step = s.next_step();
  CHECK(!s.preempt(1));  // in flight
  commit(s, step);
  CHECK(s.preempt(1) && s.counters().preemptions == 2);
}

// One that was preempted comes back with pages for all that it knows and its next token, so that it can draw one.
TEST(a_preempted_request_comes_back_for_good) {
  SchedulerConfig config = small();
  config.num_pages = 6;
  Scheduler s(config);
  s.submit(1, prompt(2), wants(18));
  turn(s);
  s.submit(2, prompt(12), wants(2));
  turn(s);
  CHECK(s.preempt(2) && to_be_had(s) == 5);
  const Step* step = s.next_step();
  CHECK((lens(step) == Ints{4, 7}) && to_be_had(s) == 1);  // four pages, though its chunk needs two
  commit(s, step);
}

// A higher class does not take a running request's place, but its pages when they are short.
TEST(who_is_last_in_rank_gives_its_pages_up) {
  SchedulerConfig config = small();
  config.num_pages = 5;
  Scheduler s(config);
  s.submit(1, prompt(2), of(9, 5));
  s.submit(2, prompt(2), of(9, 0));
  s.submit(3, prompt(2), of(9, 7));
  const Step* step = s.next_step();
  CHECK((ids(step) == Ids{2, 1, 3}) && to_be_had(s) == 2);
  commit(s, step);
  for (int i = 0; i < 2; ++i) turn(s);
  for (int i = 0; i < 4; ++i) {  // each needs a second page: two are there
    step = s.next_step();
    CHECK((ids(step) == Ids{2, 1}) && step->decision.held == Held::Decodes && step->decision.preempted.empty());
    commit(s, step);
  }
  step = s.next_step();  // and a third one: the last gives its page to the first, and nobody is behind the second
  CHECK((ids(step) == Ids{2} && step->decision.preempted == Ids{3}) && step->decision.held == Held::Decodes);
  commit(s, step);
}

TEST_MAIN
