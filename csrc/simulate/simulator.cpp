#include "simulate/simulator.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tokenspeed::simulate {

namespace {

SimulatorConfig validated(SimulatorConfig config) {
  if (config.interval_ns < 1) {
    throw std::invalid_argument("simulator: need an interval of 1 ns or more, have " +
                                std::to_string(config.interval_ns));
  }
  if (config.replica.block_tokens < 1) {
    throw std::invalid_argument("simulator: need blocks of 1 token or more, have " +
                                std::to_string(config.replica.block_tokens));
  }
  config.replica.scheduler.validate();
  config.router.block_tokens = config.replica.block_tokens;
  const int64_t num_tokens = int64_t{config.replica.scheduler.num_pages} * config.replica.scheduler.page_size;
  config.router.blocks_per_replica = std::max<int64_t>(1, num_tokens / config.replica.block_tokens);
  return config;
}

}  // namespace

Simulator::Simulator(const SimulatorConfig& config, StepCosts costs)
    : config_(validated(config)), costs_(std::move(costs)), router_(config_.router), workers_(config_.num_threads) {
  for (int32_t i = 0; i < config_.router.num_replicas; ++i) {
    replicas_.push_back(std::make_unique<Replica>(config_.replica, costs_, records_));
  }
  advance_ = [this](int32_t i) { replicas_[static_cast<size_t>(i)]->advance(round_end_ns_); };
}

void Simulator::add(TraceRequest request) {
  const auto refuse = [this](const std::string& text) {
    throw std::invalid_argument("request " + std::to_string(num_added()) + " of the trace: " + text);
  };
  const int64_t before = std::max(now_ns_, trace_.empty() ? 0 : this->request(trace_.back()).timestamp_ns);
  if (request.timestamp_ns < before || request.timestamp_ns > kNever / 4) {
    refuse("need a timestamp of " + std::to_string(before) + " ns or later, have " +
           std::to_string(request.timestamp_ns));
  }
  if (request.num_input < 1 || request.num_output < 1) {
    refuse("need 1 token or more each way, have " + std::to_string(request.num_input) + " and " +
           std::to_string(request.num_output));
  }
  if (request.num_prompt_blocks < 0 || static_cast<size_t>(request.num_prompt_blocks) > request.blocks.size()) {
    refuse("need blocks of a prompt among all, have " + std::to_string(request.num_prompt_blocks));
  }
  for (const int64_t ns : {request.delay_ns, request.deadline_ns}) {
    if (ns < kNone || ns > kNever / 4) refuse("need a delay and a deadline of 0 or more, have " + std::to_string(ns));
  }
  if (request.delay_ns != kNone && request.session == kNone) refuse("need a session beside a delay, have none");
  if (request.priority < 0 || request.priority >= scheduler::kNumPriorities || request.tenant < 0) {
    refuse("need a known priority and tenant, have " + std::to_string(request.priority) + " and " +
           std::to_string(request.tenant));
  }
  records_.add(request);
  session_of_.push_back(request.session);
  follower_.push_back(kNone);
  trace_.push_back(static_cast<int64_t>(requests_.size()));
  requests_.push_back(std::make_unique<TraceRequest>(std::move(request)));
}

int64_t Simulator::next_arrival() const noexcept {
  const int64_t in_trace =
      trace_.empty() ? kNever : requests_[static_cast<size_t>(trace_.front())]->timestamp_ns;
  return due_.empty() ? in_trace : std::min(in_trace, due_.top().first);
}

bool Simulator::run(int64_t until_ns, int64_t max_rounds) {
  for (int64_t round = 0;; ++round) {
    if (num_open_ == 0) {  // nothing happens before the next request comes
      const int64_t next = next_arrival();
      if (next == kNever) return true;
      now_ns_ = std::max(now_ns_, std::min(next, until_ns) / config_.interval_ns * config_.interval_ns);
    }
    if (until_ns != kNever && now_ns_ + config_.interval_ns > until_ns) return true;
    if (round == max_rounds) return false;
    run_round();
  }
}

void Simulator::run_round() {
  round_end_ns_ = now_ns_ + config_.interval_ns;
  take_from_trace(round_end_ns_);
  send_arrivals(round_end_ns_);
  workers_.run(static_cast<int32_t>(replicas_.size()), advance_);
  now_ns_ = round_end_ns_;
  hear_of_ends();
  take_sample();
}

// Requests whose timestamp has come are due, or wait for the end of the one before them.
void Simulator::take_from_trace(int64_t end_ns) {
  while (!trace_.empty() && request(trace_.front()).timestamp_ns < end_ns) {
    const int64_t index = trace_.front();
    const TraceRequest& next = request(index);
    trace_.pop_front();
    int64_t at = next.timestamp_ns;
    if (next.session != kNone && config_.keeps_delays) {
      Session& session = sessions_[next.session];
      const Session before = std::exchange(session, {index, kNone});
      if (next.delay_ns != kNone && before.last != kNone) {
        if (before.ended_ns == kNone) {
          follower_[static_cast<size_t>(before.last)] = index;
          continue;
        }
        at = std::max(at, before.ended_ns + next.delay_ns);
      }
    }
    due_.emplace(at, index);
  }
}

void Simulator::send_arrivals(int64_t end_ns) {
  while (!due_.empty() && due_.top().first < end_ns) {
    const auto [at, index] = due_.top();
    due_.pop();
    const int32_t chosen = router_.route(request(index), index);
    records_.arrival[static_cast<size_t>(index)] = at;
    records_.replica[static_cast<size_t>(index)] = chosen;
    replicas_[static_cast<size_t>(chosen)]->send(request(index), index);
    ++num_open_;
  }
}

void Simulator::hear_of_ends() {
  for (size_t r = 0; r < replicas_.size(); ++r) {
    for (const Ended& ended : replicas_[r]->ended()) {
      const auto at = static_cast<size_t>(ended.index);
      const bool answered = records_.status[at] == static_cast<uint8_t>(Status::Finished);
      router_.ended(static_cast<int32_t>(r), *requests_[at], answered);
      requests_[at].reset();
      --num_open_;
      ++num_ended_;
      if (session_of_[at] == kNone || !config_.keeps_delays) continue;
      if (const int64_t next = follower_[at]; next != kNone) {
        // It cannot arrive in a round that is over.
        due_.emplace(std::max({now_ns_, request(next).timestamp_ns, ended.end_ns + request(next).delay_ns}), next);
      } else if (Session& session = sessions_[session_of_[at]]; session.last == ended.index) {
        session.ended_ns = ended.end_ns;
      }
    }
    replicas_[r]->clear_ended();
  }
}

void Simulator::take_sample() {
  if (num_rounds_++ % sample_every_ != 0) return;
  Sample sample{now_ns_, {}};
  for (const auto& replica : replicas_) {
    const Load load = replica->load();
    sample.load.running += load.running;
    sample.load.waiting += load.waiting;
    sample.load.used_pages += load.used_pages;
    sample.load.cached_pages += load.cached_pages;
  }
  timeline_.push_back(sample);
  if (timeline_.size() < kMostSamples) return;
  for (size_t i = 0; i < kMostSamples / 2; ++i) timeline_[i] = timeline_[2 * i];
  timeline_.resize(kMostSamples / 2);
  sample_every_ *= 2;
}

}  // namespace tokenspeed::simulate
