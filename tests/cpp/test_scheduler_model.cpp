// The scheduler against a plain model (scheduler_model.h), under random use: every operation in every state, over many
// configurations so small that all limits are met. TOKENSPEED_MODEL_OPERATIONS sets how many operations there are.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "scheduler_model.h"
#include "test.h"

using namespace tokenspeed::scheduler;
using namespace tokenspeed::scheduler::testing;

namespace {

class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  int32_t roll(int32_t low, int32_t high) {  // both ends included; the same on every platform
    return low + static_cast<int32_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  bool once_in(int32_t n) { return roll(1, n) == 1; }
  uint64_t any() { return random_(); }

 private:
  std::mt19937_64 random_;
};

SchedulerConfig random_config(Dice& dice) {
  SchedulerConfig c{};
  c.max_num_seqs = dice.roll(1, dice.once_in(4) ? 8 : 4);
  c.max_prefill_tokens = dice.roll(c.max_num_seqs, 14);
  c.max_logit_rows = dice.roll(c.max_num_seqs, c.max_prefill_tokens);
  c.max_model_len = dice.roll(20, 40);
  c.page_size = 1 << dice.roll(0, 2);
  c.num_pages = dice.roll(c.pages_for(c.max_model_len / 2), c.pages_for((dice.once_in(2) ? 1 : 3) * c.max_model_len));
  c.max_waiting = dice.roll(1, 8);
  c.max_in_flight = dice.roll(1, 3);
  c.vocab_size = kVocab;
  c.prefix_index = !dice.once_in(6);
  c.num_host_pages = dice.once_in(2) ? 0 : dice.roll(1, c.pages_for(6 * c.max_model_len));
  c.cache_salt = dice.once_in(2) ? "" : "digest";
  c.record_kv_events = dice.once_in(3);
  c.aging_ns = dice.once_in(2) ? 0 : 50;
  return c;
}

// New, or the beginning of one of a few texts, or an old conversation that goes on, or the same as the last one.
std::vector<int32_t> random_prompt(Dice& dice, const SchedulerModel& model) {
  std::vector<int32_t> prompt;
  const int32_t kind = dice.roll(0, 12);
  if (kind > 9 && !model.last_prompt().empty()) return model.last_prompt();
  if (kind < 5 && !model.histories().empty()) {
    const auto& histories = model.histories();
    prompt = histories[static_cast<size_t>(dice.roll(0, static_cast<int32_t>(histories.size()) - 1))];
  } else if (kind < 8) {
    const int32_t text = dice.roll(0, 2), length = dice.roll(1, 16);
    for (int32_t i = 0; i < length; ++i) prompt.push_back((7 * text + i * i) % kVocab);
  }
  const int32_t more = prompt.empty() ? dice.roll(1, 16) : dice.roll(0, 3);
  for (int32_t i = 0; i < more; ++i) prompt.push_back(dice.roll(0, kVocab - 1));
  return prompt;
}

RequestParams random_params(Dice& dice, const SchedulerModel& model, int32_t num_prompt) {
  RequestParams p{};
  p.max_new_tokens = dice.once_in(4) ? dice.roll(1, 2) : dice.roll(1, 20);
  p.temperature = static_cast<float>(dice.roll(0, 3)) / 2;
  p.top_p = dice.once_in(2) ? 1.0f : 0.5f;
  p.top_k = dice.roll(0, 4);
  p.min_p = dice.once_in(2) ? 0.0f : 0.25f;
  p.seed = dice.any();
  p.num_logprobs = dice.once_in(3) ? dice.roll(0, 5) : -1;
  p.num_prompt_logprobs = dice.once_in(6) ? dice.roll(0, 5) : -1;
  if (dice.once_in(2)) p.logprob_start_len = dice.roll(0, num_prompt + dice.once_in(40));
  const int32_t num_stops = dice.once_in(3) ? dice.roll(1, 5) : 0;
  for (int32_t i = 0; i < num_stops; ++i) p.stop_token_ids.push_back(dice.roll(0, kVocab - 1));
  if (dice.once_in(8)) p.repetition_penalty = 1.5f;
  if (dice.once_in(8)) p.presence_penalty = 0.25f;
  if (dice.once_in(8)) p.frequency_penalty = -0.5f;
  if (dice.once_in(8)) {
    for (int32_t id = dice.roll(0, 9); id < kVocab; id += dice.roll(1, 20)) {
      p.bias_ids.push_back(id);
      p.bias_values.push_back(static_cast<float>(dice.roll(-4, 4)));
    }
  }
  if (dice.once_in(8)) p.token_mask = {dice.roll(0, 1 << 30), dice.roll(0, 255)};
  p.priority = dice.once_in(3) ? dice.roll(0, 9) : 0;
  p.tenant = dice.roll(0, 2);
  if (dice.once_in(6)) p.deadline_ns = model.now_ns() + dice.roll(-5, 300);
  return p;
}

int64_t any_id(Dice& dice, const SchedulerModel& model) {
  const std::vector<int64_t> ids = model.ids();
  if (ids.empty() || dice.once_in(20)) return dice.roll(0, static_cast<int32_t>(model.num_ids()));
  return ids[static_cast<size_t>(dice.roll(0, static_cast<int32_t>(ids.size()) - 1))];
}

// How often each operation comes differs between runs, and faults are rare in most.
struct Weights {
  int32_t submit, plan, commit, fail, abort, preempt, pass, flush, drop, warm;
};

Weights random_weights(Dice& dice) {
  const int32_t faults = dice.once_in(4) ? 8 : 1;
  return {.submit = dice.roll(20, 80), .plan = dice.roll(80, 200), .commit = 100, .fail = faults, .abort = 2 * faults,
          .preempt = 2 * faults, .pass = 20, .flush = dice.roll(0, faults), .drop = dice.once_in(6), .warm = 1};
}

void operate(Dice& dice, SchedulerModel& model, const Weights& w) {
  int32_t at = dice.roll(1, w.submit + w.plan + w.commit + w.fail + w.abort + w.preempt + w.pass + w.flush + w.drop +
                                w.warm);
  const auto is = [&at](int32_t weight) { return (at -= weight) <= 0 && at > -weight; };
  if (is(w.submit)) {
    const std::vector<int32_t> prompt = random_prompt(dice, model);
    model.submit(prompt, random_params(dice, model, static_cast<int32_t>(prompt.size())), dice.once_in(4));
  }
  if (is(w.plan)) model.plan();
  if (is(w.commit) && model.has_flying()) {
    w.fail > 1 && model.oldest_moves_pages() && dice.once_in(3) ? model.fail() : model.commit();
  }
  if (is(w.fail) && model.has_flying()) model.fail();
  if (is(w.abort)) model.abort(any_id(dice, model));
  if (is(w.preempt)) model.preempt(any_id(dice, model));
  if (is(w.pass)) model.pass(dice.roll(0, 20));
  if (is(w.flush)) model.flush();
  if (is(w.drop)) model.drop_host();
  if (is(w.warm)) model.warm();
}

// One configuration from its seed to the end. Returns what happened.
ModelStats run(uint64_t seed, int32_t num_operations) {
  Dice dice(seed);
  SchedulerModel model(random_config(dice));
  const Weights weights = random_weights(dice);
  try {
    for (int32_t i = 0; i < num_operations; ++i) operate(dice, model, weights);
    model.drain();
  } catch (const std::exception& e) {
    std::printf("seed %llu, operation %lld: rule broken: %s\n", static_cast<unsigned long long>(seed),
                static_cast<long long>(model.stats.operations), e.what());
    CHECK(false);
  }
  model.finish_stats();
  return model.stats;
}

int64_t num_operations_asked() {
  const char* asked = std::getenv("TOKENSPEED_MODEL_OPERATIONS");
  return asked != nullptr ? std::strtoll(asked, nullptr, 10) : 1'000'000;
}

constexpr int32_t kRunLength = 400;

}  // namespace

TEST(random_use) {
  ModelStats all;
  const int64_t asked = num_operations_asked();
  for (uint64_t seed = 0; all.operations < asked; ++seed) {
    const ModelStats one = run(seed, kRunLength);
    constexpr int64_t ModelStats::*kFields[] = {
        &ModelStats::operations, &ModelStats::steps,    &ModelStats::tokens,  &ModelStats::ends,
        &ModelStats::preemptions, &ModelStats::hits,    &ModelStats::restored, &ModelStats::failures,
        &ModelStats::expired,    &ModelStats::flushes,  &ModelStats::drops,   &ModelStats::refusals,
        &ModelStats::moves,      &ModelStats::broken,   &ModelStats::evictions, &ModelStats::retired,
        &ModelStats::hits_with_rows};
    for (const auto field : kFields) all.*field += one.*field;
    if (tokenspeed::testing::failures() > 5) break;
  }
  const auto show = [](const char* name, int64_t n) { std::printf("  %-12s %lld\n", name, static_cast<long long>(n)); };
  show("operations", all.operations), show("steps", all.steps), show("tokens", all.tokens), show("ends", all.ends);
  show("preemptions", all.preemptions), show("hits", all.hits), show("restored", all.restored);
  show("failures", all.failures), show("broken", all.broken), show("expired", all.expired);
  show("flushes", all.flushes), show("drops", all.drops), show("refusals", all.refusals);
  show("with rows", all.hits_with_rows), show("moves", all.moves), show("evictions", all.evictions), show("retired", all.retired);
  // All of it must have happened, or nothing was shown.
  const int64_t rarest = std::min({all.ends, all.preemptions, all.hits, all.restored, all.failures, all.expired,
                                   all.flushes, all.drops, all.refusals, all.moves, all.retired,
                                   all.hits_with_rows});
  CHECK(rarest > asked / 20'000);
  CHECK(asked < 1'000'000 || all.broken > 0);  // the rarest by far: see test_scheduler.cpp
}

// Schedulers share nothing: as many as there are replicas may run side by side.
TEST(two_at_a_time) {
  std::thread other([] { run(1'000'001, 2 * kRunLength); });
  run(1'000'002, 2 * kRunLength);
  other.join();
}

TEST_MAIN
