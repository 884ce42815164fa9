// The scheduler: decides which tokens of which requests make up the next step. It never waits, never sees the device,
// and costs microseconds: O(running requests + tokens of the step). docs/scheduler.md has the rules and why they always
// make progress.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/page_pool.h"
#include "cache/prefix_index.h"
#include "cache/slot_pool.h"
#include "scheduler/config.h"
#include "scheduler/deadlines.h"
#include "scheduler/request.h"
#include "scheduler/step.h"
#include "scheduler/waiting_queue.h"

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
  int32_t num_pages;  // on its cached path and its own
  int32_t num_positions;
};

// Where the pages of the device are. The sum is all of them.
struct PageCounts {
  int32_t free = 0;
  int32_t cached = 0;   // in the prefix index, used by no request: as good as free
  int32_t shared = 0;   // in the prefix index, used by one request or more
  int32_t own = 0;      // of one request alone
  int32_t retired = 0;  // of nobody: a step in flight may still read them
};

// Since the start.
struct SchedulerCounters {
  int64_t preemptions = 0;
  int64_t admissions = 0;            // also of requests that had been preempted
  int64_t prompt_tokens = 0;         // of requests admitted for the first time
  int64_t cached_tokens = 0;         // of these, found in the prefix index
  int64_t restored_tokens = 0;       // of these, whose pages came back from the host tier
  int64_t computed_tokens = 0;       // planned in chunks
  int64_t expired = 0;
};

// Not thread-safe: the engine's thread owns it. Times are nanoseconds since any fixed start and never fall.
class Scheduler {
 public:
  // `io`: memory for each of max_in_flight steps; step i is written to io[i % max_in_flight]. Without it steps have
  // memory of their own. Throws std::invalid_argument.
  explicit Scheduler(const SchedulerConfig& config, const std::vector<StepMemory>& io = {});
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Queues a request. Throws std::invalid_argument for one that could never be served, QueueFull.
  void submit(int64_t request_id, std::vector<int32_t> prompt, RequestParams params, int64_t now_ns = 0);

  // Plans a step, or null when nothing can run now (then commit first, if a step is in flight). The step is the
  // scheduler's, and valid until it commits or fails.
  const Step* next_step(int64_t now_ns = 0);

  // The oldest step in flight has run; `tokens` has one entry per logit row. Returns what was drawn, in row
  // order, without rows of ended requests; valid until the next call. Throws std::invalid_argument, changing
  // nothing, when the step is not the oldest or a drawn token is negative.
  std::span<const DrawnToken> commit(int64_t step_id, std::span<const int32_t> tokens);

  // The oldest step in flight failed. Its requests end here, and those that use pages which it was to move; returns
  // them. Throws as commit does.
  std::span<const int64_t> fail_step(int64_t step_id);

  // Ends a request. False when it is not known or has ended. No event of it follows.
  bool abort(int64_t request_id);

  // Ends the requests whose deadline has come; returns them.
  std::span<const int64_t> expire(int64_t now_ns);

  // Has a request give its place up, which then waits before all new ones. False where it cannot: it has no place, a
  // step in flight uses it, or, unless `always`, it has drawn nothing since the last time.
  bool preempt(int64_t request_id, bool always = false);

  // The weights have changed: nothing that is cached is used by requests admitted from here on.
  void flush_prefixes();

  // The host's memory of pages has failed: it is not used any more.
  void drop_host_tier();

  // What happened to cached pages since the last call, if config.record_kv_events.
  void take_events(std::vector<cache::PrefixEvent>& events) { prefixes_.take_events(events); }

  // Does what can wait until the device is busy: puts the pages that the last commit filled into the prefix index, and
  // frees those that the next decodes will need. Who never calls it has it done where it is needed: before requests are
  // admitted, and by the next commit.
  void settle();

  // Settles, and reads what the next commit and the next plan will read: for whoever waits for a step and wants the
  // caches as they are after one that took microseconds.
  void warm();

  const SchedulerConfig& config() const noexcept { return config_; }
  int32_t num_waiting() const noexcept { return static_cast<int32_t>(waiting_.size()); }
  int32_t num_preempted() const noexcept { return static_cast<int32_t>(waiting_.num_preempted()); }  // that wait
  int32_t num_running() const noexcept { return static_cast<int32_t>(lanes_.size()) + (prefilling_ != nullptr); }
  int32_t num_in_flight() const noexcept { return num_in_flight_; }  // steps
  int32_t num_pages() const noexcept { return pages_.num_pages(); }
  int32_t num_free_pages() const noexcept { return pages_.num_free(); }
  int32_t num_cached_pages() const noexcept { return prefixes_.num_evictable(); }  // that no request uses
  PageCounts count_pages() const noexcept;  // O(requests)
  int32_t num_host_pages_used() const noexcept { return prefixes_.num_host_pages_used(); }
  int64_t num_evictions() const noexcept { return prefixes_.num_evictions(); }  // of pages, since the start
  int64_t oldest_wait(int64_t now_ns) const noexcept { return waiting_.oldest_wait(now_ns); }
  const SchedulerCounters& counters() const noexcept { return counters_; }
  // No request is known and no step is in flight.
  bool is_idle() const noexcept { return requests_.empty() && num_in_flight_ == 0; }
  std::vector<RequestStatus> requests() const;  // in order of id

 private:
  struct Entry {
    Request* request;
    int32_t draw_row;  // or -1: a chunk that leaves some of the prompt
    int32_t end;       // positions of the request once the step has run
  };
  struct PlannedStep {
    std::unique_ptr<Step> step;
    std::vector<Entry> entries;  // one per sequence
    std::vector<cache::PageCopy> copies_out, copies_in;
  };
  // Decodes have filled a page: the one that ends at `num_positions`.
  struct FullPage {
    Request* request;
    int32_t num_positions;
  };
  // A page that is cached already under another number, until the steps that may read it here are over.
  struct Retired {
    int64_t last_step;
    cache::PageLease page;
  };
  // A prompt's place in the prefix index, and the positions that it needs pages for when it is admitted.
  struct Candidate {
    cache::PrefixIndex::Found found;
    int32_t num_positions = 0;
  };
  static constexpr size_t kPrefetchObject = 24, kPrefetchContents = 12;  // requests ahead of the one at hand

  // Planning (plan.cpp).
  bool plan_decodes(PlannedStep& plan);
  bool plan_scarce_decodes(PlannedStep& plan);
  void plan_decode(PlannedStep& plan, DecodeLane& lane);
  void plan_prefills(PlannedStep& plan, bool may_admit);
  Held admit(PlannedStep& plan);
  Held measure(const PlannedStep& plan, const Request& request, Candidate& candidate);
  bool plan_chunk(PlannedStep& plan, Request& request);
  int32_t chunk_end(const PlannedStep& plan, const Request& request, int32_t begin) const noexcept;
  void add_chunk(PlannedStep& plan, Request& request, int32_t begin, int32_t end);
  void describe(PlannedStep& plan, Held held);

  // Pages and places (places.cpp).
  bool make_room(int32_t num_pages);
  int32_t num_pages_due() const noexcept;
  bool free_a_page(const Request& needy);
  void find_running_by_rank();
  cache::PageLease acquire_pages(int32_t slot, int32_t num_held, int32_t num_pages);
  std::span<int32_t> page_row(int32_t slot, int32_t num_pages) noexcept;
  void enter_lane(Request& request);
  void leave_lane(Request& request) noexcept;
  void leave_place(Request& request) noexcept;
  void publish_noted();
  void publish_full_pages(Request& request, int32_t num_positions);
  std::span<const int32_t> next_page_to_publish(const Request& request) const noexcept;
  void free_retired();

  PlannedStep& oldest(int64_t step_id, const char* verb);
  void retire_oldest();
  void check_tokens(const PlannedStep& plan, std::span<const int32_t> tokens) const;
  FinishReason accept(Request& request, int32_t token);
  void leave_everything(Request& request) noexcept;
  void end(Request& request);
  void drain(Request& request);
  void forget_if_finished(const Request& request);
  void end_users_of_moves(const PlannedStep& plan);
  void check_request(int64_t request_id, const std::vector<int32_t>& prompt, const RequestParams& params) const;

  const SchedulerConfig config_;
  cache::PagePool pages_;
  cache::PrefixIndex prefixes_;
  cache::SlotPool slots_;
  fsm::PlaceStore places_;
  RecentTokens recent_;
  std::vector<int32_t> page_rows_;  // [slot][pages_per_sequence]: the pages of a slot's request, ready to copy

  WaitingQueue waiting_;
  Deadlines deadlines_;
  check::HugePool<Request> request_pool_;
  std::unordered_map<int64_t, check::HugePool<Request>::Owner> requests_;  // found by id, never walked over but for requests()
  std::vector<DecodeLane> lanes_;
  Request* prefilling_ = nullptr;  // the one prefill that is not complete
  std::vector<Request*> by_rank_;  // of one plan
  std::vector<FullPage> full_pages_;  // that commits noted, and the prefix index does not have yet
  int64_t num_evictions_told_ = 0;    // in the decisions of steps
  std::vector<Retired> retired_;   // in order of last_step

  // The waiting request that lacked pages last, and how many were to be had: until there are more it is not asked
  // again.
  const Request* short_of_pages_ = nullptr;
  int32_t pages_had_ = 0;

  // A ring of steps in flight.
  std::array<PlannedStep, fsm::kMaxInFlight> in_flight_;
  int32_t num_in_flight_ = 0;
  int64_t oldest_id_ = 1;  // of the steps in flight, or of the next one
  uint64_t last_tag_ = 0;

  std::vector<int64_t> preempted_;  // since the last step
  int64_t now_ns_ = 0;              // the latest time told
  std::vector<DrawnToken> drawn_;
  std::vector<int64_t> ended_;
  int64_t num_arrivals_ = 0;
  SchedulerCounters counters_;
};

}  // namespace tokenspeed::scheduler
