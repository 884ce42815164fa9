// One replica: a scheduler and a device that takes its time, in virtual time.
//
// It does what the engine's loop does (tokenspeed/runtime/stepper.py): it plans when a step commits, as far ahead as
// max_in_flight says, and while nothing is in flight whenever a request arrives. A step starts when it is planned and
// the one before has ended, and commits when it ends. Of things at the same time the end of a step comes first.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "scheduler/scheduler.h"
#include "simulate/request.h"
#include "simulate/step_costs.h"
#include "simulate/tokens.h"

namespace tokenspeed::simulate {

struct ReplicaConfig {
  scheduler::SchedulerConfig scheduler;
  int32_t block_tokens;
  bool waits_when_full;  // a request that finds the queue full comes again when there is room; else it is refused
};

// Sums since the start.
struct ReplicaTotals {
  int64_t steps = 0;
  int64_t busy_ns = 0;    // in which the device ran a step
  int64_t step_tokens = 0;
  int64_t bucket_tokens = 0;  // with padding
  std::vector<int64_t> steps_by_bucket;

  void add(const ReplicaTotals& other);
};

// What a replica holds at one time.
struct Load {
  int64_t running = 0;
  int64_t waiting = 0;       // in its queue, or in front of it
  int64_t used_pages = 0;    // of requests
  int64_t cached_pages = 0;  // of nobody, and found by who comes next
};

struct Ended {
  int64_t end_ns;
  int64_t index;
};

// Not thread-safe; different replicas may run at the same time. Records of its own requests are its to write.
class Replica {
 public:
  Replica(const ReplicaConfig& config, const StepCosts& costs, Records& records);

  // A request that arrives at records.arrival[index]. Its blocks stay where they are until it has ended. Calls come in
  // order of (arrival, index), none before a time that `advance` has passed.
  void send(const TraceRequest& request, int64_t index);

  // Runs until just before `until_ns`.
  void advance(int64_t until_ns);

  // Requests that ended since the last call, in order.
  const std::vector<Ended>& ended() const noexcept { return ended_; }
  void clear_ended() noexcept { ended_.clear(); }

  bool is_idle() const noexcept { return num_open_ == 0 && in_flight_.empty(); }
  Load load() const noexcept;
  const ReplicaTotals& totals() const noexcept { return totals_; }
  const scheduler::SchedulerCounters& counters() const noexcept { return scheduler_.counters(); }

 private:
  struct Open {
    int64_t index = kNone;
    TokenStream stream;
  };
  struct Arrival {
    const TraceRequest* request;
    int64_t index;
  };
  struct Running {
    const scheduler::Step* step;
    int64_t end_ns;
  };
  // A scheduler's request id is a number that is used once, and the place of the request in `open_`.
  static constexpr int32_t kPlaceBits = 24;
  static constexpr int64_t kPlaceMask = (int64_t{1} << kPlaceBits) - 1;

  void take_arrivals(int64_t now_ns);
  void enter_from_the_door(int64_t now_ns);
  bool submit(const Arrival& arrival, int64_t now_ns);  // false: the queue is full
  void plan(int64_t now_ns);
  void start(const scheduler::Step& step, int64_t now_ns);
  void finish_step();
  void end(size_t place, Status status, int64_t now_ns);
  void end_unserved(int64_t index, Status status, int64_t now_ns);
  int64_t deadline_of(const Arrival& arrival) const noexcept;
  Open& open(int64_t request_id) noexcept { return open_[static_cast<size_t>(request_id & kPlaceMask)]; }

  const ReplicaConfig config_;
  const StepCosts& costs_;
  Records& records_;
  scheduler::Scheduler scheduler_;

  std::deque<Arrival> inbox_;  // in order of arrival, of which none has come
  std::deque<Arrival> door_;   // has come, and found the queue full
  std::vector<Open> open_;     // by place
  std::vector<size_t> free_places_;
  int64_t num_submitted_ = 0;
  int64_t num_open_ = 0;

  std::deque<Running> in_flight_;
  int64_t device_free_ns_ = 0;
  std::vector<int32_t> drawn_;
  std::vector<Ended> ended_;
  ReplicaTotals totals_;
};

}  // namespace tokenspeed::simulate
