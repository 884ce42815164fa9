// The simulator: token streams, the router's map of blocks, routing, virtual time by hand, threads and cuts.
#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "simulate/simulator.h"
#include "test.h"

using namespace tokenspeed::simulate;
using tokenspeed::scheduler::SchedulerConfig;

namespace {

constexpr int64_t kMs = 1'000'000;

template <class Action>
std::string refusal(Action action) {
  try {
    action();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

// Decode steps of 1, 2, 4, 8 sequences take 1 ms, mixed ones of 16 tokens 2 ms and of 64 tokens 5 ms.
StepCosts costs(double per_context_token = 0, double per_pair = 0) {
  std::vector<BucketCost> buckets{{false, 64, 8, 8, 0.005}, {false, 16, 8, 8, 0.002}};
  for (const int32_t n : {1, 2, 4, 8}) buckets.push_back({true, n, n, n, 0.001});
  return {buckets, per_context_token, per_pair, 0};
}

SimulatorConfig config(int32_t num_replicas = 1, Routing routing = Routing::RoundRobin) {
  SchedulerConfig scheduler{.max_num_seqs = 8,
                            .max_prefill_tokens = 64,
                            .max_logit_rows = 8,
                            .max_model_len = 512,
                            .page_size = 16,
                            .num_pages = 64,
                            .max_waiting = 4};
  SimulatorConfig all{};
  all.replica = {.scheduler = scheduler, .block_tokens = 16, .waits_when_full = true};
  all.router = {.routing = routing, .num_replicas = num_replicas, .seed = 3, .load_tokens = 40};
  all.interval_ns = 10 * kMs;
  return all;
}

TraceRequest request(int64_t ms, int32_t num_input, int32_t num_output, std::vector<uint64_t> blocks = {}) {
  TraceRequest r;
  r.timestamp_ns = ms * kMs;
  r.num_input = num_input;
  r.num_output = num_output;
  r.num_prompt_blocks = static_cast<int32_t>(blocks.size());
  r.blocks = std::move(blocks);
  return r;
}

std::vector<uint64_t> numbers(uint64_t first, int count) {
  std::vector<uint64_t> all;
  for (int i = 0; i < count; ++i) all.push_back(first + static_cast<uint64_t>(i));
  return all;
}

Status status(const Simulator& s, size_t i) { return static_cast<Status>(s.records().status[i]); }

// A mixture of shared prompts, sessions, deadlines and bursts.
std::vector<TraceRequest> traffic(int count) {
  std::vector<TraceRequest> all;
  for (int i = 0; i < count; ++i) {
    const uint64_t drawn = mix(static_cast<uint64_t>(i));
    const auto num_output = static_cast<int32_t>((drawn >> 8) % 30);
    TraceRequest r = request(i / 3, 20 + static_cast<int32_t>(drawn % 150), 1 + num_output);
    const int32_t num_blocks = r.num_input / 16;
    r.blocks = numbers(1000 * (drawn >> 20) % 7, num_blocks);
    r.num_prompt_blocks = num_blocks;
    if (drawn >> 30 & 1) {
      r.session = static_cast<int64_t>(drawn >> 40) % 50;
      r.delay_ns = static_cast<int64_t>(drawn >> 50) * 1000;
    }
    if ((drawn >> 33) % 5 == 0) r.deadline_ns = 200 * kMs;
    r.priority = static_cast<int32_t>(drawn >> 45) % 3;
    r.tenant = static_cast<int32_t>(drawn >> 55) % 4;
    all.push_back(std::move(r));
  }
  return all;
}

}  // namespace

TEST(equal_blocks_are_equal_tokens) {
  const std::vector<uint64_t> a{7, 8, 9}, b{7, 8, 10};
  const TokenStream first(a, 16, 0), second(b, 16, 1);
  const auto x = first.first(60), y = second.first(60);
  CHECK(std::equal(x.begin(), x.begin() + 32, y.begin()));
  CHECK(!std::equal(x.begin() + 32, x.begin() + 48, y.begin() + 32));
  CHECK(!std::equal(x.begin() + 48, x.end(), y.begin() + 48));  // behind all blocks each has its own
  for (int32_t i = 0; i < 60; ++i) CHECK(first.at(i) == x[static_cast<size_t>(i)] && x[static_cast<size_t>(i)] >= 0);
  CHECK((std::set(x.begin(), x.end()).size() == 60));
}

TEST(a_block_map_is_what_plain_lists_are) {
  constexpr int32_t kReplicas = 70;
  constexpr size_t kCapacity = 5;
  BlockMap map(kReplicas, kCapacity);
  std::map<int32_t, std::vector<uint64_t>> model;  // the last used first
  uint64_t random = 1;
  std::vector<int32_t> matched;
  for (int turn = 0; turn < 4000; ++turn) {
    random = mix(random);
    const auto replica = static_cast<int32_t>(random % kReplicas);
    const auto blocks = numbers(random >> 20 & 7, static_cast<int>(random >> 30 & 7));
    map.match(blocks, matched);
    for (int32_t r = 0; r < kReplicas; ++r) {
      const auto& known = model[r];
      int32_t expected = 0;
      while (expected < static_cast<int32_t>(blocks.size()) &&
             std::find(known.begin(), known.end(), blocks[static_cast<size_t>(expected)]) != known.end()) {
        ++expected;
      }
      CHECK(matched[static_cast<size_t>(r)] == expected);
    }
    map.add(replica, blocks);
    auto& own = model[replica];
    for (size_t i = std::min(blocks.size(), kCapacity); i-- > 0;) {
      std::erase(own, blocks[i]);
      own.insert(own.begin(), blocks[i]);
    }
    if (own.size() > kCapacity) own.resize(kCapacity);
    CHECK(map.num_blocks(replica) == static_cast<int64_t>(own.size()));
  }
}

TEST(a_request_alone_takes_the_time_of_its_steps) {
  Simulator s(config(), costs());
  s.add(request(3, 100, 5));
  CHECK(s.run(kNever, 1000));
  // Chunks of 64 and 36 tokens, of 5 ms and 20/48 of the way from 2 ms to 5 ms, then four decodes.
  CHECK(s.records().arrival[0] == 3 * kMs && s.records().admitted[0] == 3 * kMs);
  CHECK(s.records().first_token[0] == 11 * kMs + kMs / 4 && s.records().end[0] == 15 * kMs + kMs / 4);
  CHECK(status(s, 0) == Status::Finished && s.records().num_cached[0] == 0);
  const ReplicaTotals& totals = s.replicas()[0]->totals();
  CHECK(totals.steps == 6 && totals.busy_ns == 12 * kMs + kMs / 4);
  CHECK(totals.step_tokens == 104 && totals.bucket_tokens == 132);
}

TEST(attention_takes_its_time) {
  Simulator s(config(), costs(1e-6, 1e-7));
  s.add(request(0, 100, 2));
  CHECK(s.run(kNever, 1000));
  // Pairs: 64 x 32, then 36 x (64 + 18). The decode reads 101 positions.
  const auto expected = std::vector<int64_t>{8'250'000 + 204'800 + 295'200, 9'250'000 + 500'000 + 101'000};
  CHECK(s.records().first_token[0] == expected[0] && s.records().end[0] == expected[1]);
}

TEST(the_second_turn_finds_prompt_and_answer) {
  Simulator s(config(), costs());
  TraceRequest first = request(0, 40, 30, numbers(100, 3));
  first.blocks.push_back(103);  // positions 48 to 63: drawn
  first.blocks.push_back(104);
  first.session = 5;
  TraceRequest second = request(1, 120, 3, numbers(100, 8));
  second.session = 5;
  second.delay_ns = 20 * kMs;
  s.add(std::move(first));
  s.add(std::move(second));
  CHECK(s.run(kNever, 1000));
  CHECK(s.records().arrival[1] == s.records().end[0] + 20 * kMs);
  CHECK(s.records().num_cached[1] == 64);  // 69 of the 70 tokens were in pages
}

TEST(without_delays_requests_arrive_at_their_timestamps) {
  SimulatorConfig open = config();
  open.keeps_delays = false;
  Simulator s(open, costs());
  for (int i = 0; i < 2; ++i) {
    TraceRequest r = request(i, 40, 30);
    r.session = 5;
    r.delay_ns = 20 * kMs;
    s.add(std::move(r));
  }
  CHECK(s.run(kNever, 1000));
  CHECK(s.records().arrival[1] == kMs);
}

TEST(a_full_queue_refuses_or_makes_wait) {
  for (const bool waits : {true, false}) {
    SimulatorConfig c = config();
    c.replica.waits_when_full = waits;
    Simulator s(c, costs());
    for (int i = 0; i < 30; ++i) s.add(request(0, 30, 4));
    CHECK(s.run(kNever, 1000));
    int64_t refused = 0;
    for (size_t i = 0; i < 30; ++i) {
      refused += status(s, i) == Status::Refused;
      if (i > 0 && status(s, i) == Status::Finished) CHECK(s.records().admitted[i] >= s.records().admitted[i - 1]);
    }
    CHECK(refused == (waits ? 0 : 26));
    CHECK(s.num_ended() == 30);
  }
}

TEST(what_cannot_be_served_ends_at_once) {
  Simulator s(config(), costs());
  s.add(request(0, 510, 3));
  s.add(request(0, 10, 3));
  TraceRequest late = request(0, 400, 100);
  late.deadline_ns = 20 * kMs;
  s.add(std::move(late));
  CHECK(s.run(kNever, 1000));
  CHECK(status(s, 0) == Status::TooLong && s.records().end[0] == 0 && s.records().admitted[0] == kNone);
  CHECK(status(s, 1) == Status::Finished);
  CHECK(status(s, 2) == Status::Expired && s.records().end[2] >= 20 * kMs && s.records().end[2] <= 25 * kMs);
}

TEST(preempted_requests_come_to_their_end) {
  SimulatorConfig c = config();
  c.replica.scheduler.num_pages = 12;
  c.replica.scheduler.prefix_index = false;
  Simulator s(c, costs());
  for (int i = 0; i < 12; ++i) s.add(request(0, 30, 60));
  CHECK(s.run(kNever, 10000));
  int64_t preemptions = 0;
  for (size_t i = 0; i < 12; ++i) {
    CHECK(status(s, i) == Status::Finished);
    preemptions += s.records().num_preemptions[i];
  }
  CHECK(preemptions > 0 && preemptions == s.replicas()[0]->counters().preemptions);
}

TEST(routing) {
  RouterConfig c{.num_replicas = 3, .load_tokens = 20, .block_tokens = 16, .blocks_per_replica = 100};
  Router robin(c);
  for (int i = 0; i < 6; ++i) CHECK(robin.route(request(0, 10, 1), i) == i % 3);

  c.routing = Routing::LeastLoaded;
  Router least(c);
  for (int i = 0; i < 5; ++i) CHECK(least.route(request(0, 10, 1), i) == i % 3);
  least.ended(0, request(0, 10, 1), true);
  least.ended(0, request(0, 10, 1), true);
  CHECK(least.route(request(0, 10, 1), 5) == 0 && least.load(0) == 1 && least.load(2) == 1);

  c.routing = Routing::PrefixAware;
  Router aware(c);
  const TraceRequest talk = request(0, 64, 1, numbers(10, 4)), other = request(0, 64, 1, numbers(90, 4));
  CHECK(aware.route(talk, 0) == 0);
  CHECK(aware.route(other, 1) == 1);
  CHECK(aware.route(talk, 2) == 0);
  CHECK(aware.route(talk, 3) == 0);
  CHECK(aware.route(talk, 4) == 0);  // 3 requests of 20 to do: less than 64 tokens
  CHECK(aware.route(talk, 5) == 2);  // 4 requests: more
  for (int i = 0; i < 4; ++i) aware.ended(0, talk, true);
  CHECK(aware.route(talk, 6) == 0);
  TraceRequest answered = request(0, 16, 20, {500, 501});
  answered.num_prompt_blocks = 1;
  aware.ended(1, answered, true);
  CHECK(aware.route(request(0, 16, 1, {501}), 7) == 1);

  c.routing = Routing::Random;
  Router random(c), again(c);
  std::set<int32_t> seen;
  for (int i = 0; i < 50; ++i) {
    const int32_t chosen = random.route(talk, i);
    CHECK(chosen == again.route(talk, i));
    seen.insert(chosen);
  }
  CHECK(seen.size() == 3);
  CHECK(refusal([] { routing_named("nearest"); }).find("have nearest") != std::string::npos);
}

TEST(threads_and_cuts_change_nothing) {
  const auto all = traffic(2000);
  for (const Routing routing : {Routing::Random, Routing::LeastLoaded, Routing::PrefixAware}) {
    std::vector<std::vector<int64_t>> ends, firsts;
    std::vector<std::vector<int32_t>> cached;
    std::vector<size_t> samples;
    for (const int variant : {0, 1, 2}) {
      SimulatorConfig c = config(5, routing);
      c.num_threads = variant + 1;
      Simulator s(c, costs(1e-7, 1e-8));
      size_t added = 0;
      for (const TraceRequest& r : all) {
        s.add(r);
        if (variant > 0 && ++added % (variant == 1 ? 7 : 100) == 0) {
          while (!s.run(r.timestamp_ns, 3)) {
          }
        }
      }
      while (!s.run(kNever, 50)) {
      }
      CHECK(s.num_ended() == 2000);
      ends.push_back(s.records().end);
      firsts.push_back(s.records().first_token);
      cached.push_back(s.records().num_cached);
      samples.push_back(s.timeline().size());
    }
    for (size_t i : {1, 2}) {
      CHECK(ends[i] == ends[0] && firsts[i] == firsts[0] && cached[i] == cached[0] && samples[i] == samples[0]);
    }
  }
}

TEST(every_request_ends_once_and_pages_come_back) {
  Simulator s(config(3, Routing::PrefixAware), costs());
  for (TraceRequest& r : traffic(1500)) s.add(std::move(r));
  while (!s.run(kNever, 1000)) {
  }
  for (size_t i = 0; i < 1500; ++i) {
    const Status ended = status(s, i);
    CHECK(ended != Status::Open);
    if (ended != Status::Finished) continue;
    const Records& r = s.records();
    CHECK(r.arrival[i] <= r.admitted[i] && r.admitted[i] < r.first_token[i] && r.first_token[i] <= r.end[i]);
    CHECK(r.num_cached[i] < r.num_input[i]);
  }
  for (const auto& replica : s.replicas()) CHECK(replica->is_idle() && replica->load().used_pages == 0);
  for (size_t i = 1; i < s.timeline().size(); ++i) CHECK(s.timeline()[i - 1].time_ns < s.timeline()[i].time_ns);
}

TEST(senseless_requests_and_costs_are_refused) {
  Simulator s(config(), costs());
  s.add(request(50, 10, 1));
  const std::string early = refusal([&] { s.add(request(49, 10, 1)); });
  CHECK(early.find("need a timestamp of 50000000 ns or later") != std::string::npos);
  CHECK(refusal([&] { s.add(request(50, 0, 1)); }).find("need 1 token or more") != std::string::npos);
  TraceRequest bad = request(50, 10, 1);
  bad.delay_ns = 5;
  CHECK(refusal([&] { s.add(bad); }).find("need a session beside a delay") != std::string::npos);
  bad = request(50, 10, 1);
  bad.num_prompt_blocks = 2;
  CHECK(refusal([&] { s.add(bad); }).find("among all, have 2") != std::string::npos);
  bad = request(50, 10, 1);
  bad.priority = 10;
  CHECK(refusal([&] { s.add(bad); }).find("have 10 and 0") != std::string::npos);
  CHECK(refusal([] { StepCosts({{true, 4, 4, 4, 1.0}, {true, 4, 4, 4, 1.0}}, 0, 0, 0); }).find("grow together") !=
        std::string::npos);
  CHECK(refusal([] { StepCosts({{true, 4, 4, 4, -1.0}}, 0, 0, 0); }).find("a time for decode-4") != std::string::npos);
  CHECK(refusal([] { StepCosts({}, 0, 0, 0).bucket_of({}); }).find("have none") != std::string::npos);
}

TEST_MAIN
