// Measures what the scheduler costs the host, operation by operation, with everything around it as in a busy server.
//
//   bench_scheduler [--json] [--pages N] [--waiting N] [--rounds N] [--seqs N]
//
// The prefix index is full (a million pages of 16 tokens, of prompts that were served before), 10,000 requests wait,
// and 1 to 2048 decode. So every page that a decode needs is evicted from the index, and every full one is published.
// Depth is how many steps are planned before the oldest commits, less one. Between two calls the caches are either
// left alone (warm) or written over (cold), as by a step's other work. Figures are microseconds: what 5%, half and 99%
// of the calls stay under; where others use the machine, the first is nearest to what a quiet one takes. `sum` is one
// next_step and the commit behind it; `settle` is what they leave for when the device is busy.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "scheduler/scheduler.h"

namespace {

using namespace tokenspeed::scheduler;
using Clock = std::chrono::steady_clock;

struct Options {
  bool json = false;
  int32_t num_pages = 1'000'000;
  int32_t num_waiting = 10'000;
  int32_t num_rounds = 300;
  int32_t num_seqs = 0;  // 0: all sizes
};

class Samples {
 public:
  template <class Body>
  double time(const Body& body) {
    const auto begin = Clock::now();
    body();
    const double took = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    each_.push_back(took);
    return took;
  }
  void add(double took) { each_.push_back(took); }
  double at(double share) {
    if (each_.empty()) return 0;
    std::sort(each_.begin(), each_.end());
    return each_[std::min(each_.size() - 1, static_cast<size_t>(static_cast<double>(each_.size()) * share))];
  }
  double median() { return at(0.5); }

 private:
  std::vector<double> each_;
};

struct Caches {
  std::vector<char> memory = std::vector<char>(96 << 20);
  void spoil() {
    for (size_t i = 0; i < memory.size(); i += 64) ++memory[i];
  }
};

constexpr int32_t kPageSize = 16, kSharedTokens = 600, kPromptTokens = 512;

RequestParams params(int32_t max_new_tokens, int64_t id) {
  RequestParams p{.max_new_tokens = max_new_tokens, .temperature = 1, .top_p = 1, .top_k = 0, .min_p = 0,
                  .seed = static_cast<uint64_t>(id), .stop_token_ids = {2, 3}};
  p.tenant = static_cast<int32_t>(id % 20);
  return p;
}

// A server in full swing: a full index, requests that wait, and `num_seqs` that decode.
class Server {
 public:
  Server(const Options& options, int32_t num_seqs, int32_t depth)
      : num_seqs_(num_seqs),
        scheduler_({.max_num_seqs = num_seqs, .max_prefill_tokens = 16384, .max_logit_rows = std::max(num_seqs, 64),
                    .max_model_len = 16384, .page_size = kPageSize, .num_pages = options.num_pages,
                    .max_waiting = 2 * options.num_waiting + num_seqs + 10 * options.num_rounds, .max_in_flight = depth + 1}),
        drawn_(static_cast<size_t>(std::max(num_seqs, 64)), 7) {
    while (scheduler_.num_free_pages() > 1000) {  // which one prompt takes
      queue(fresh_prompt(15'000), 1);
      run_dry();
    }
    queue(shared_prompt(), 1);
    run_dry();
    const int32_t most = 2 * options.num_rounds + 4 * num_seqs / 16 + 2000;
    for (int32_t i = 0; i < num_seqs; ++i) {  // they fill their pages at different times
      queue(fresh_prompt(kPromptTokens + i % kPageSize), most);
    }
    while (scheduler_.num_waiting() > 0) turn();
    turn();
    for (int32_t i = 0; i < options.num_waiting; ++i) submit();
  }
  ~Server() {
    while (!flying_.empty()) commit();
  }

  int64_t submit() {
    queue(shared_prompt(), 1000);
    return last_id_;
  }
  const Step* plan() {
    const Step* step = scheduler_.next_step();
    if (step != nullptr) flying_.push_back(step);
    return step;
  }
  void commit() {
    const Step* step = flying_.front();
    flying_.pop_front();
    scheduler_.commit(step->id, std::span(drawn_).first(static_cast<size_t>(step->num_logit_rows)));
  }
  void turn() {
    while (plan() != nullptr) {}
    commit();
  }
  bool is_full(const Step* step) const { return step->num_seqs == num_seqs_ && step->is_decode_only(); }
  // Somebody who decodes.
  int64_t running_id(const Step& step, int32_t i) const { return step.rows[static_cast<size_t>(i)].request_id; }

  Scheduler& scheduler() { return scheduler_; }
  std::deque<const Step*>& flying() { return flying_; }
  std::vector<int32_t> shared_prompt() {
    std::vector<int32_t> prompt(kSharedTokens, 11);
    prompt.push_back(static_cast<int32_t>(last_id_ % 100'000));
    return prompt;
  }

 private:
  std::vector<int32_t> fresh_prompt(int32_t n) {
    std::vector<int32_t> prompt(static_cast<size_t>(n));
    for (int32_t& token : prompt) token = static_cast<int32_t>((random_ = random_ * 6364136223846793005u + 1) >> 47);
    return prompt;
  }
  void queue(std::vector<int32_t> prompt, int32_t max_new_tokens) {
    ++last_id_;
    scheduler_.submit(last_id_, std::move(prompt), params(max_new_tokens, last_id_));
  }
  void run_dry() {
    while (plan() != nullptr || !flying_.empty()) commit();
  }

  const int32_t num_seqs_;
  Scheduler scheduler_;
  std::vector<int32_t> drawn_;
  std::deque<const Step*> flying_;
  int64_t last_id_ = 0;
  uint64_t random_ = 1;
};

class Report {
 public:
  explicit Report(bool json) : json_(json) {
    if (json_) {
      std::printf("[");
    } else {
      std::printf("%6s %6s %6s  %-34s %9s %9s %9s\n", "seqs", "depth", "caches", "operation", "5%", "median", "99%");
    }
  }
  ~Report() {
    if (json_) std::printf("\n]\n");
  }
  void line(int32_t num_seqs, int32_t depth, bool cold, const char* name, Samples& samples) {
    const char* caches = cold ? "cold" : "warm";
    if (json_) {
      std::printf("%s\n  {\"seqs\": %d, \"depth\": %d, \"caches\": \"%s\", \"operation\": \"%s\", \"p5_us\": %.3f, "
                  "\"median_us\": %.3f, \"p99_us\": %.3f}",
                  first_ ? "" : ",", num_seqs, depth, caches, name, samples.at(0.05), samples.median(),
                  samples.at(0.99));
    } else {
      std::printf("%6d %6d %6s  %-34s %9.2f %9.2f %9.2f\n", num_seqs, depth, caches, name, samples.at(0.05),
                  samples.median(), samples.at(0.99));
    }
    std::fflush(stdout);
    first_ = false;
  }

 private:
  const bool json_;
  bool first_ = true;
};

void measure(const Options& options, int32_t num_seqs, int32_t depth, Caches& caches, Report& report) {
  Server server(options, num_seqs, depth);
  for (const bool cold : {false, true}) {
    const auto between = [&] { cold ? caches.spoil() : void(); };
    Samples plan, commit, sum, settle, submit, abort, admit;
    const int32_t num_rounds = cold ? options.num_rounds / 3 : options.num_rounds;
    while (static_cast<int32_t>(server.flying().size()) < depth && server.plan() != nullptr) {}
    for (int32_t i = 0; i < num_rounds; ++i) {
      const Step* step = nullptr;
      between();
      const double planned = plan.time([&] { step = server.plan(); });
      settle.time([&] { server.scheduler().settle(); });
      between();
      const double committed = commit.time([&] { server.commit(); });
      if (step != nullptr && server.is_full(step)) sum.add(planned + committed);
    }
    report.line(num_seqs, depth, cold, "next_step", plan);
    report.line(num_seqs, depth, cold, "commit", commit);
    report.line(num_seqs, depth, cold, "sum", sum);
    report.line(num_seqs, depth, cold, "settle, while the device runs", settle);
    if (depth > 0) continue;  // the rest does not depend on it

    std::deque<int64_t> submitted;
    for (int32_t i = 0; i < num_rounds; ++i) {
      between();
      submit.time([&] { submitted.push_back(server.submit()); });
    }
    for (; !submitted.empty(); submitted.pop_front()) {
      between();
      abort.time([&] { server.scheduler().abort(submitted.front()); });
    }
    const double plain = plan.median();
    for (int32_t i = 0; i < num_rounds / 4; ++i) {
      const Step* step = server.plan();
      const int64_t id = server.running_id(*step, i % num_seqs);
      server.commit();
      server.scheduler().abort(id);
      between();
      Samples one;
      const double took = one.time([&] { step = server.plan(); });
      const auto& admitted = step->decision.admitted;
      const bool hits = admitted.size() == 1 && admitted[0].num_cached_tokens > kSharedTokens - kPageSize;
      if (hits) admit.add(took - plain);
      server.commit();
      server.submit();
    }
    report.line(num_seqs, depth, cold, "submit", submit);
    report.line(num_seqs, depth, cold, "abort of one that waits", abort);
    report.line(num_seqs, depth, cold, "admission with a 600-token hit", admit);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const auto number = [&](const char* name, int32_t& into) {
      if (std::strcmp(argv[i], name) != 0 || i + 1 == argc) return false;
      into = std::atoi(argv[++i]);
      return true;
    };
    if (std::strcmp(argv[i], "--json") == 0) {
      options.json = true;
    } else if (!number("--pages", options.num_pages) && !number("--waiting", options.num_waiting) &&
               !number("--rounds", options.num_rounds) && !number("--seqs", options.num_seqs)) {
      std::fprintf(stderr, "usage: %s [--json] [--pages N] [--waiting N] [--rounds N] [--seqs N]\n", argv[0]);
      return 2;
    }
  }
  Caches caches;
  Report report(options.json);
  for (const int32_t num_seqs : {1, 64, 256, 2048}) {
    if (options.num_seqs != 0 && options.num_seqs != num_seqs) continue;
    for (const int32_t depth : {0, 1, 2}) measure(options, num_seqs, depth, caches, report);
  }
}
