#include "simulate/router.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "simulate/tokens.h"

namespace tokenspeed::simulate {

Routing routing_named(std::string_view name) {
  if (name == "random") return Routing::Random;
  if (name == "round-robin") return Routing::RoundRobin;
  if (name == "least-loaded") return Routing::LeastLoaded;
  if (name == "prefix-aware") return Routing::PrefixAware;
  throw std::invalid_argument("routing: need random, round-robin, least-loaded or prefix-aware, have " +
                              std::string(name));
}

Router::Router(const RouterConfig& config) : config_(config) {
  if (config.num_replicas < 1 || config.num_replicas > 4096) {
    throw std::invalid_argument("router: need 1 to 4096 replicas, have " + std::to_string(config.num_replicas));
  }
  if (!(config.balance >= 1 && config.balance <= 1e6)) {
    throw std::invalid_argument("router: need a balance of 1 to 1000000, have " + std::to_string(config.balance));
  }
  if (config.slack < 1) throw std::invalid_argument("router: need a slack of 1 or more, have " + std::to_string(config.slack));
  load_.resize(static_cast<size_t>(config.num_replicas));
  if (config.routing == Routing::PrefixAware) blocks_.emplace(config.num_replicas, config.blocks_per_replica);
}

int32_t Router::route(const TraceRequest& request, int64_t index) {
  const auto prompt = std::span(request.blocks).first(static_cast<size_t>(request.num_prompt_blocks));
  int32_t chosen = 0;
  switch (config_.routing) {
    case Routing::Random:
      chosen = static_cast<int32_t>(mix(mix(config_.seed) ^ static_cast<uint64_t>(index)) %
                                    static_cast<uint64_t>(config_.num_replicas));
      break;
    case Routing::RoundRobin:
      chosen = static_cast<int32_t>(num_routed_ % config_.num_replicas);
      break;
    case Routing::LeastLoaded:
      chosen = least_loaded();
      break;
    case Routing::PrefixAware:
      chosen = best_prefix(prompt);
      blocks_->add(chosen, prompt);
      break;
  }
  ++num_routed_;
  ++load_[static_cast<size_t>(chosen)];
  ++total_load_;
  return chosen;
}

void Router::ended(int32_t replica, const TraceRequest& request, bool answered) {
  --load_[static_cast<size_t>(replica)];
  --total_load_;
  if (!blocks_ || !answered) return;
  blocks_->add(replica, std::span(request.blocks).subspan(static_cast<size_t>(request.num_prompt_blocks)));
}

int32_t Router::least_loaded() const noexcept {
  return static_cast<int32_t>(std::min_element(load_.begin(), load_.end()) - load_.begin());
}

// The bound is that of consistent hashing with bounded loads, `balance` times a replica's share, and some slack: where
// the whole fleet has little to do, what a prefix saves is more than what a few requests beside it cost. The least loaded
// replica is always within the bound.
int32_t Router::best_prefix(std::span<const uint64_t> blocks) {
  blocks_->match(blocks, matched_);
  const double bound = config_.balance * static_cast<double>(total_load_ + 1) / config_.num_replicas + config_.slack;
  int32_t best = least_loaded();
  for (int32_t i = 0; i < config_.num_replicas; ++i) {
    const auto at = static_cast<size_t>(i), at_best = static_cast<size_t>(best);
    if (static_cast<double>(load_[at] + 1) > bound) continue;
    const bool better = matched_[at] != matched_[at_best] ? matched_[at] > matched_[at_best] : load_[at] < load_[at_best];
    if (better) best = i;
  }
  return best;
}

}  // namespace tokenspeed::simulate
