// A fleet in virtual time: requests of a trace, a router, and replicas that run the real scheduler.
//
// Time goes in rounds of `interval_ns`. At its beginning the router hears which requests have ended, and sends the
// requests that arrive in the round; then every replica runs to the end of the round by itself, on any thread. So what
// comes out depends neither on the number of threads nor on how a trace is cut into calls.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <unordered_map>
#include <utility>
#include <vector>

#include "simulate/replica.h"
#include "simulate/router.h"
#include "simulate/workers.h"

namespace tokenspeed::simulate {

struct SimulatorConfig {
  ReplicaConfig replica;
  RouterConfig router;
  int64_t interval_ns = 20'000'000;
  bool keeps_delays = true;  // false: every request arrives at its timestamp
  int32_t num_threads = 1;
};

// The whole fleet at one time.
struct Sample {
  int64_t time_ns;
  Load load;
};

class Simulator {
 public:
  Simulator(const SimulatorConfig& config, StepCosts costs);  // throws std::invalid_argument

  // The next request of the trace; its number is that of calls before. Throws std::invalid_argument when it comes
  // before the one added last or a time that `run` has passed, and for senseless lengths.
  void add(TraceRequest request);

  // Runs all rounds that end by `until_ns`, and `max_rounds` at most: every request that arrives before `until_ns` must
  // have been added. False: there are rounds left to run. kNever: until all requests have ended.
  bool run(int64_t until_ns, int64_t max_rounds);

  int64_t num_added() const noexcept { return static_cast<int64_t>(records_.size()); }
  int64_t num_ended() const noexcept { return num_ended_; }
  int64_t now_ns() const noexcept { return now_ns_; }
  const Records& records() const noexcept { return records_; }
  const StepCosts& costs() const noexcept { return costs_; }

  // Every so often since the start: a thousand to two of them, at even distances of rounds.
  const std::vector<Sample>& timeline() const noexcept { return timeline_; }
  const std::vector<std::unique_ptr<Replica>>& replicas() const noexcept { return replicas_; }

 private:
  // The last request of a session that was taken from the trace.
  struct Session {
    int64_t last = kNone;
    int64_t ended_ns = kNone;  // kNone: it has not
  };
  using Due = std::pair<int64_t, int64_t>;  // (time, index)
  static constexpr size_t kMostSamples = 2048;

  void run_round();
  int64_t next_arrival() const noexcept;
  void take_from_trace(int64_t end_ns);
  void send_arrivals(int64_t end_ns);
  void hear_of_ends();
  void take_sample();
  TraceRequest& request(int64_t index) noexcept { return *requests_[static_cast<size_t>(index)]; }

  const SimulatorConfig config_;
  const StepCosts costs_;
  Records records_;
  std::vector<std::unique_ptr<TraceRequest>> requests_;  // by number; null once it has ended
  std::vector<int64_t> follower_;                        // the request that waits for the end of this one, or kNone
  std::vector<int64_t> session_of_;                      // of all requests
  std::unordered_map<int64_t, Session> sessions_;        // found by number, never walked over
  std::deque<int64_t> trace_;                            // added, and not taken yet
  std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;

  Router router_;
  std::vector<std::unique_ptr<Replica>> replicas_;
  std::function<void(int32_t)> advance_;
  int64_t round_end_ns_ = 0;
  int64_t now_ns_ = 0;  // the beginning of the next round
  int64_t num_open_ = 0;  // sent, and not ended
  int64_t num_ended_ = 0;
  std::vector<Sample> timeline_;
  int64_t num_rounds_ = 0;
  int64_t sample_every_ = 1;
  Workers workers_;  // last: its threads end before what they use
};

}  // namespace tokenspeed::simulate
