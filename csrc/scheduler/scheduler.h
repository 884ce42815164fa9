// The scheduler: decides which tokens of which requests make up the next step. It never waits, never sees
// the device, and costs microseconds: O(running requests + tokens of the step), no allocation in steady state.
// docs/scheduler.md has the rules and why they always make progress.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/request_state.h"
#include "scheduler/config.h"
#include "scheduler/step.h"

namespace tokenspeed::scheduler {

// The waiting queue is at its limit; the client should come back later.
class QueueFull : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class FinishReason : uint8_t { None, Stop, Length };

struct DrawnToken {
  int64_t request_id;
  int32_t token;
  FinishReason finish;
};

// One line about a request that is known to the scheduler, for logs and tests.
struct RequestStatus {
  int64_t request_id;
  const char* state;
  int32_t num_steps_in_flight;
  int32_t num_pages;
  int32_t num_positions;
};

// Not thread-safe: the engine's thread owns it.
class Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);  // throws std::invalid_argument
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Queues a request. Throws std::invalid_argument for one that could never be served, QueueFull.
  void submit(int64_t request_id, std::vector<int32_t> prompt, RequestParams params);

  // Plans a step, or null when nothing can run now (then commit first, if a step is in flight). The step's
  // arrays stay as they are for as long as the pointer is held.
  std::shared_ptr<const Step> next_step();

  // The oldest step in flight has run; `tokens` has one entry per logit row. Returns what was drawn, in row
  // order, without rows of ended requests; valid until the next call. Throws std::invalid_argument, changing
  // nothing, when the step is not the oldest or a drawn token is negative.
  std::span<const DrawnToken> commit(int64_t step_id, std::span<const int32_t> tokens);

  // The oldest step in flight failed. Its requests end here; returns them. Throws as commit does.
  std::span<const int64_t> fail_step(int64_t step_id);

  // Ends a request. False when it is not known or has ended. No event of it follows.
  bool abort(int64_t request_id);

  // Reads what the next commit and the next plan will read, and changes nothing: for whoever waits for a step and
  // wants the caches as they are after one that took microseconds.
  void warm() const noexcept;

  const SchedulerConfig& config() const noexcept { return config_; }
  int32_t num_waiting() const noexcept { return static_cast<int32_t>(waiting_.size()); }
  int32_t num_running() const noexcept { return static_cast<int32_t>(running_.size()); }
  int32_t num_in_flight() const noexcept { return num_in_flight_; }  // steps
  int32_t num_pages() const noexcept { return pages_.num_pages(); }
  int32_t num_free_pages() const noexcept { return pages_.num_free(); }
  int64_t num_preemptions() const noexcept { return num_preemptions_; }  // since the start
  // No request is known and no step is in flight.
  bool is_idle() const noexcept { return requests_.empty() && num_in_flight_ == 0; }
  std::vector<RequestStatus> requests() const;  // in order of id

 private:
  struct Request {
    int64_t id;
    RequestParams params;
    std::vector<int32_t> tokens;  // the prompt, then what was drawn and committed
    int32_t num_prompt;
    int32_t num_prompt_rows = 0;  // prompt rows planned so far; they are never asked again
    int32_t num_drawing = 0;      // draws of planned steps that have not committed
    fsm::RequestState state;

    int32_t num_tokens() const noexcept { return static_cast<int32_t>(tokens.size()); }
    int32_t num_new() const noexcept { return num_tokens() - num_prompt + num_drawing; }

    // Asks for the object's cache lines, or for what it points to (which reads the object). Between two steps lie
    // milliseconds, in which others use the caches: who walks over requests asks for those to come, so that their
    // misses pass at the same time.
    void prefetch() const noexcept {
      const auto* bytes = reinterpret_cast<const char*>(this);
      for (size_t at = 0; at < sizeof(Request); at += 64) __builtin_prefetch(bytes + at, 1);
    }
    void prefetch_tokens() const noexcept {
      __builtin_prefetch(tokens.data() + tokens.size(), 1);
      __builtin_prefetch(params.stop_token_ids.data());
    }
  };
  struct Entry {
    Request* request;
    int32_t draw_row;  // or -1: a chunk that leaves some of the prompt
  };
  struct PlannedStep {
    std::shared_ptr<Step> step;
    std::vector<Entry> entries;  // one per sequence
  };
  static constexpr int32_t kMaxInFlight = 2;
  static constexpr size_t kPrefetchObject = 8, kPrefetchContents = 4;  // requests ahead of the one at hand

  // Planning (plan.cpp). True: younger requests may follow in the step.
  bool plan_decodes(PlannedStep& plan);
  bool plan_decode(PlannedStep& plan, Request& request);
  bool plan_chunk(PlannedStep& plan, Request& request);
  void plan_prefills(PlannedStep& plan);
  bool admit(const PlannedStep& plan);  // whether the oldest waiting request now runs
  int32_t chunk_end(const PlannedStep& plan, const Request& request) const noexcept;
  void add_chunk(PlannedStep& plan, Request& request, int32_t begin, int32_t end);
  bool free_a_page(const Request& needy);
  cache::PageLease acquire_pages(const fsm::Holding& held, int32_t num_positions);
  void enter_pages(int32_t slot, int32_t num_held, const cache::PageLease& more) noexcept;
  std::span<const int32_t> page_row(const fsm::Holding& held) const noexcept;
  void prefetch_decode(size_t index, const Step& step) const noexcept;
  std::shared_ptr<Step> blank_step();

  PlannedStep& oldest(int64_t step_id, const char* verb);
  void retire_oldest();
  FinishReason accept(Request& request, int32_t token);
  void check_request(int64_t request_id, const std::vector<int32_t>& prompt, const RequestParams& params) const;

  const SchedulerConfig config_;
  cache::PagePool pages_;
  cache::SlotPool slots_;
  std::vector<int32_t> page_rows_;  // [slot][pages_per_sequence]: the pages of a slot's request, ready to copy

  // Arrival order: every running request is older than every waiting one, and the youngest is at the back.
  std::unordered_map<int64_t, std::unique_ptr<Request>> requests_;
  std::deque<Request*> waiting_;
  std::vector<Request*> running_;

  // A ring of steps in flight; spent Steps are used again once nobody else holds them.
  std::array<PlannedStep, kMaxInFlight> in_flight_;
  int32_t oldest_ = 0;
  int32_t num_in_flight_ = 0;
  std::array<std::shared_ptr<Step>, kMaxInFlight + 1> spare_steps_;
  size_t next_spare_ = 0;

  std::vector<DrawnToken> drawn_;
  std::vector<int64_t> failed_;
  int64_t next_step_id_ = 1;
  int64_t num_preemptions_ = 0;
};

}  // namespace tokenspeed::scheduler
