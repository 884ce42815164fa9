#include "simulate/router.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

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
  if (config.load_tokens < 0) {
    throw std::invalid_argument("router: need load_tokens of 0 or more, have " + std::to_string(config.load_tokens));
  }
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
      chosen = least_to_do(request, prompt);
      blocks_->add(chosen, prompt);
      break;
  }
  ++num_routed_;
  ++load_[static_cast<size_t>(chosen)];
  return chosen;
}

void Router::ended(int32_t replica, const TraceRequest& request, bool answered) {
  --load_[static_cast<size_t>(replica)];
  if (!blocks_ || !answered) return;
  blocks_->add(replica, std::span(request.blocks).subspan(static_cast<size_t>(request.num_prompt_blocks)));
}

int32_t Router::least_loaded() const noexcept {
  return static_cast<int32_t>(std::min_element(load_.begin(), load_.end()) - load_.begin());
}

int32_t Router::least_to_do(const TraceRequest& request, std::span<const uint64_t> prompt) {
  blocks_->match(prompt, matched_);
  const auto to_do = [&](int32_t replica) {
    const int64_t known = int64_t{matched_[static_cast<size_t>(replica)]} * config_.block_tokens;
    return std::max<int64_t>(0, request.num_input - known) + load(replica) * config_.load_tokens;
  };
  int32_t best = 0;
  for (int32_t i = 1; i < config_.num_replicas; ++i) {
    if (std::pair(to_do(i), load(i)) < std::pair(to_do(best), load(best))) best = i;
  }
  return best;
}

}  // namespace tokenspeed::simulate
