// A plain model of the scheduler, which checks each of its answers, and the device behind it. What a request must
// stream follows from its prompt and parameters alone: neither preemption, company, cached pages nor faults of other
// requests may change it.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "scheduler_device.h"

namespace tokenspeed::scheduler::testing {

inline void require(bool holds, const char* rule) {
  if (!holds) throw std::logic_error(rule);
}

// What the model knows of a request until the scheduler has forgotten it.
struct ModelRequest {
  enum class State { Waiting, Running, Preempted, Draining };

  int64_t id = 0;
  std::vector<int32_t> known;  // the prompt and what was drawn
  int32_t num_prompt = 0;
  RequestParams params;
  int32_t key = 0;
  int64_t since_ns = 0;
  State state = State::Waiting;

  bool is_prefilling = false;    // runs, and its last chunk is not planned yet
  int32_t slot = -1;             // once it is known
  int32_t planned = 0;           // positions
  int32_t drawing = 0;           // draws in flight
  int32_t flying = 0;            // steps
  int32_t rows_planned = 0;      // position of the prompt row that comes next
  int32_t rows_done = 0;         // and of the one that has not run
  int32_t known_at_preemption = -1;
  int64_t oldest_weights = 0;

  uint64_t asked = 0;
  std::vector<uint64_t> contexts;  // of the first n known tokens
  Counts counts;

  int32_t num_known() const { return static_cast<int32_t>(known.size()); }
  int32_t most() const { return num_prompt + params.max_new_tokens; }
  // A decode of it could be planned now, if there are pages.
  // The next known token that must be computed, for its logits.
  int32_t next_row() const {
    const bool has_rows = params.num_prompt_logprobs >= 0 && rows_planned < num_prompt - 1;
    return has_rows ? rows_planned : num_known() - 1;
  }
  bool can_decode() const { return state == State::Running && !is_prefilling && planned < most() - 1; }
  void learn(int32_t token) {
    contexts.push_back(absorb(contexts.empty() ? 0 : contexts.back(), token, key));
    if (params.has_penalties()) counts.add(token, num_known() < num_prompt);
    known.push_back(token);
  }
  int32_t next_token() const { return draw_token(asked, contexts.back(), counts); }
};

struct ModelStats {
  int64_t operations = 0, steps = 0, tokens = 0, ends = 0, preemptions = 0, hits = 0, restored = 0, failures = 0,
          expired = 0, flushes = 0, hits_with_rows = 0, drops = 0, refusals = 0, moves = 0, broken = 0, evictions = 0, retired = 0;
};

class SchedulerModel {
 public:
  using State = ModelRequest::State;

  explicit SchedulerModel(const SchedulerConfig& config) : config_(config), scheduler_(config), device_(config) {}

  void submit(std::vector<int32_t> prompt, RequestParams params, int32_t key) {
    params.cache_key = key == 0 ? "" : "adapter " + std::to_string(key);
    const int32_t total = static_cast<int32_t>(prompt.size()) + params.max_new_tokens;
    const bool servable = total <= config_.max_model_len && config_.pages_for(total) <= config_.num_pages &&
                          params.logprob_start_len <= static_cast<int32_t>(prompt.size());
    const bool has_place = count(State::Waiting) < config_.max_waiting;
    const int64_t id = next_id_++;
    bool refused = false;
    try {
      scheduler_.submit(id, prompt, params, now_ns_);
    } catch (const QueueFull&) {
      require(servable && !has_place, "the queue refuses when as many wait as may");
      refused = true;
    } catch (const std::invalid_argument&) {
      require(!servable, "what could be served is not refused");
      refused = true;
    }
    stats.refusals += refused;
    if (!refused) {
      require(servable && has_place, "what could never be served, or has no place in the queue, is refused");
      ModelRequest& r = requests_[id];
      r = {.id = id, .known = {}, .num_prompt = static_cast<int32_t>(prompt.size()), .params = std::move(params),
           .key = key, .since_ns = now_ns_, .contexts = {}, .counts = {}};
      r.asked = asked_by(r.params).hash();
      for (const int32_t token : prompt) r.learn(token);
      r.rows_planned = r.rows_done = std::min(std::max(0, r.params.logprob_start_len - 1), r.num_prompt - 1);
      last_prompt_ = std::move(prompt);
    }
    check();
  }

  // Whether there was a step.
  bool plan() {
    const Step* step = scheduler_.next_step(now_ns_);
    const std::vector<RequestStatus> after = scheduler_.requests();
    if (step == nullptr) {
      require(num_live() == 0 || !flying_.empty(), "with no step in flight, some request can run");
      for (const RequestStatus& s : after) {
        ModelRequest& r = at(s.request_id);
        if (std::string(s.state) == "preempted" && r.state == State::Running) preempted(r);
      }
    } else {
      require(static_cast<int32_t>(flying_.size()) < config_.max_in_flight, "so many steps may be in flight");
      flying_.push_back({});
      check_step(*step, flying_.back(), after);
      ++stats.steps;
    }
    check(after);
    return step != nullptr;
  }

  void commit() {
    const Flying flying = std::move(flying_.front());
    flying_.pop_front();
    if (flying.must_fail) return fail(flying);
    const Step& step = *flying.step;
    const Device::Output& output = device_.run(step, flying.sequences, flying.weights);
    require(device_.num_wrong_writes() == 0, "keys and values are written where the page table says");
    const std::vector<RowInfo> rows(step.rows.begin(), step.rows.begin() + step.num_logit_rows);
    const auto drawn = scheduler_.commit(step.id, output.tokens);
    size_t next = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      ModelRequest& r = at(rows[i].request_id);
      if (r.state == State::Draining) continue;
      if (rows[i].is_prompt_row) {
        require(output.contexts[i] == r.contexts[static_cast<size_t>(r.rows_done++)], "prompt rows read the prompt");
        continue;
      }
      const int32_t token = r.next_token();
      require(next < drawn.size() && drawn[next].request_id == r.id, "draws come in the order of rows, each once");
      require(output.contexts[i] == r.contexts.back(), "a draw reads its request's tokens, and no page that is stale");
      require(drawn[next].token == token, "a request's stream follows from its prompt and parameters alone");
      r.learn(token);
      r.drawing -= 1;
      ++stats.tokens;
      const auto& stops = r.params.stop_token_ids;
      const bool stops_here = std::find(stops.begin(), stops.end(), token) != stops.end();
      const FinishReason finish = stops_here                    ? FinishReason::Stop
                                  : r.num_known() == r.most() ? FinishReason::Length
                                                                : FinishReason::None;
      require(drawn[next++].finish == finish, "a request ends at a stop token or its length, and nowhere else");
      if (finish != FinishReason::None) {
        remember(r);
        end(r);
      }
    }
    require(next == drawn.size(), "requests that have ended draw nothing");
    release(flying);
    check();
  }

  void fail() {
    const Flying flying = std::move(flying_.front());
    flying_.pop_front();
    fail(flying);
  }

  void abort(int64_t id) {
    const auto found = requests_.find(id);
    const bool is_live = found != requests_.end() && found->second.state != State::Draining;
    require(scheduler_.abort(id) == is_live, "who is alive can be aborted, once");
    if (is_live) end(found->second);
    check();
  }

  void preempt(int64_t id) {
    const auto found = requests_.find(id);
    const ModelRequest* r = found != requests_.end() ? &found->second : nullptr;
    const bool can = r != nullptr && r->state == State::Running && r->flying == 0 &&
                     r->num_known() > r->known_at_preemption;
    require(scheduler_.preempt(id) == can, "who runs, in no step in flight, with progress made, can be preempted");
    if (can) preempted(found->second);
    check();
  }

  void pass(int64_t ns) {
    now_ns_ += ns;
    std::vector<std::pair<int64_t, int64_t>> due;
    for (const auto& [id, r] : requests_) {
      if (r.state != State::Draining && r.params.deadline_ns <= now_ns_) due.emplace_back(r.params.deadline_ns, id);
    }
    std::sort(due.begin(), due.end());
    const auto ended = scheduler_.expire(now_ns_);
    require(ended.size() == due.size(), "who has reached a deadline ends, and nobody else");
    for (size_t i = 0; i < due.size(); ++i) {
      require(ended[i] == due[i].second, "deadlines come in order");
      end(at(due[i].second));
      ++stats.expired;
    }
    check();
  }

  void flush() {
    ++weights_;
    ++stats.flushes;
    scheduler_.flush_prefixes();
    require(scheduler_.num_cached_pages() == 0, "nothing is cached after a flush");
    check();
  }

  // The host's memory fails, and the steps that were to read it.
  void drop_host() {
    ++stats.drops;
    scheduler_.drop_host_tier();
    device_.spoil_host();
    for (Flying& flying : flying_) flying.must_fail |= !flying.step->moves_in.empty();
    require(scheduler_.num_host_pages_used() == 0, "a host tier that was dropped holds nothing");
    check();
  }

  void warm() { scheduler_.warm(); }

  // Runs until idle, within a bound that holds only if no request waits without end.
  void drain() {
    int64_t bound = 16;
    for (const auto& [id, r] : requests_) bound += 4 * r.most();
    while (!scheduler_.is_idle()) {
      require(bound-- > 0, "everything comes to an end");
      while (plan()) {}
      commit();
    }
    require(requests_.empty() && flying_.empty(), "the scheduler is idle when all requests have ended");
    const PageCounts pages = scheduler_.count_pages();
    require(pages.free + pages.cached == config_.num_pages, "an idle scheduler holds no page");
  }

  bool has_flying() const { return !flying_.empty(); }
  bool oldest_moves_pages() const {
    return !flying_.empty() && flying_.front().step->moves_in.size() + flying_.front().step->moves_out.size() > 0;
  }
  int64_t num_ids() const { return next_id_; }
  int64_t now_ns() const { return now_ns_; }
  const SchedulerConfig& config() const { return config_; }
  const std::vector<int32_t>& last_prompt() const { return last_prompt_; }
  const std::deque<std::vector<int32_t>>& histories() const { return histories_; }
  int64_t num_live() const {
    return static_cast<int64_t>(requests_.size()) - count(State::Draining);
  }
  // Those that the scheduler knows, ended ones too.
  std::vector<int64_t> ids() const {
    std::vector<int64_t> all;
    for (const auto& [id, r] : requests_) all.push_back(id);
    return all;
  }
  void finish_stats() { stats.evictions += scheduler_.num_evictions(); }

  ModelStats stats;

 private:
  struct Flying {
    const Step* step = nullptr;
    int64_t step_id = 0;
    int64_t weights = 0;
    bool must_fail = false;
    std::vector<int64_t> members;
    std::vector<Device::Sequence> sequences;  // of the members
  };

  // Rules of a plan and of what is known between two calls (scheduler_checks.h).
  void check_step(const Step& step, Flying& flying, const std::vector<RequestStatus>& after);
  void check_preemptions(const Decision& decision);
  void check_admission(const Admission& admission);
  void check_sequence(const Step& step, int32_t seq, ModelRequest& r, int32_t& row, int32_t& adjusted);
  void check_row(const Step& step, int32_t row, const ModelRequest& r, bool is_prompt_row, int32_t token_row,
                 int32_t position) const;
  void check_adjustment(const Step& step, int32_t seq, const ModelRequest& r, int32_t draw_row,
                        int32_t& adjusted) const;
  void check_pages(const Step& step) const;
  void check_order(const Step& step, const Flying& flying) const;
  void check_events();
  void check() { check(scheduler_.requests()); }
  void check(const std::vector<RequestStatus>& statuses);

  ModelRequest& at(int64_t id) {
    const auto found = requests_.find(id);
    require(found != requests_.end(), "the scheduler speaks of requests that are known");
    return found->second;
  }
  int64_t count(State state) const {
    return std::count_if(requests_.begin(), requests_.end(), [&](const auto& r) { return r.second.state == state; });
  }

  void preempted(ModelRequest& r) {
    require(r.flying == 0, "a step in flight keeps its requests' pages");
    require(r.num_known() > r.known_at_preemption, "nobody is preempted twice without a token in between");
    r.known_at_preemption = r.num_known();
    r.state = State::Preempted;
    r.is_prefilling = false;
    r.planned = 0;
    r.slot = -1;
    r.since_ns = now_ns_;
    preempted_since_.push_back(r.id);
    ++stats.preemptions;
  }

  void end(ModelRequest& r) {
    require(r.state != State::Draining, "a request ends once");
    ++stats.ends;
    r.state = State::Draining;
    if (r.flying == 0) requests_.erase(r.id);
  }

  void release(const Flying& flying) {
    for (const int64_t id : flying.members) {
      ModelRequest& r = at(id);
      r.flying -= 1;
      if (r.flying == 0 && r.state == State::Draining) requests_.erase(id);
    }
  }

  void fail(const Flying& flying) {
    device_.fail(*flying.step);
    const bool moved = !flying.step->moves_in.empty() || !flying.step->moves_out.empty();
    const auto ended = scheduler_.fail_step(flying.step_id);
    std::set<int64_t> expected;
    for (const int64_t id : flying.members) {
      if (at(id).state != State::Draining) expected.insert(id);
    }
    require(ended.size() == expected.size() || moved, "a failed step ends its requests and no others");
    for (const int64_t id : ended) {
      stats.broken += expected.erase(id) == 0;
      end(at(id));
    }
    require(expected.empty(), "a failed step ends all its requests");
    ++stats.failures;
    release(flying);
    check();
  }

  // For later prompts to continue.
  void remember(const ModelRequest& r) {
    histories_.push_back(r.known);
    if (histories_.size() > 8) histories_.pop_front();
  }

  const SchedulerConfig config_;
  Scheduler scheduler_;
  Device device_;
  std::map<int64_t, ModelRequest> requests_;
  std::deque<Flying> flying_;
  std::deque<std::vector<int32_t>> histories_;
  std::vector<int32_t> last_prompt_;
  std::set<uint64_t> cached_hashes_;  // as the events tell
  std::vector<cache::PrefixEvent> events_;
  std::vector<int64_t> preempted_since_;  // the last step
  int64_t next_id_ = 1, now_ns_ = 0, weights_ = 0, last_step_ = 0;
};

}  // namespace tokenspeed::scheduler::testing

#include "scheduler_checks.h"
