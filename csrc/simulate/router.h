// The router: which replica a request goes to.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "simulate/block_map.h"
#include "simulate/request.h"

namespace tokenspeed::simulate {

enum class Routing : uint8_t {
  Random,       // by a hash of the seed and the request's number
  RoundRobin,   // one after another
  LeastLoaded,  // the one with the fewest requests that have not ended
  PrefixAware,  // the one with the least to do: prompt tokens that it is believed to lack, and requests that it has
};

// Throws std::invalid_argument for a name that is none of random, round-robin, least-loaded, prefix-aware.
Routing routing_named(std::string_view name);

struct RouterConfig {
  Routing routing = Routing::RoundRobin;
  int32_t num_replicas = 1;
  uint64_t seed = 0;
  int32_t load_tokens = 1024;      // prefix-aware: a request that has not ended weighs as much as so many prompt tokens
  int32_t block_tokens = 512;      // of the trace's blocks
  int64_t blocks_per_replica = 1;  // that it is believed to hold
};

// Load is the number of requests that were sent and of whose end the router has not heard. Ties go to the lower load,
// then to the lower number. Deterministic: it answers by what it was told, in the order in which it was told.
class Router {
 public:
  explicit Router(const RouterConfig& config);  // throws std::invalid_argument

  // Where this request goes, which then counts as sent.
  int32_t route(const TraceRequest& request, int64_t index);

  // A request that went to `replica` has ended; if `answered`, the replica also has the blocks that it drew.
  void ended(int32_t replica, const TraceRequest& request, bool answered);

  int64_t load(int32_t replica) const noexcept { return load_[static_cast<size_t>(replica)]; }

 private:
  int32_t least_loaded() const noexcept;
  int32_t least_to_do(const TraceRequest& request, std::span<const uint64_t> prompt);

  const RouterConfig config_;
  std::vector<int64_t> load_;
  int64_t num_routed_ = 0;
  std::optional<BlockMap> blocks_;  // of prefix-aware routing
  std::vector<int32_t> matched_;
};

}  // namespace tokenspeed::simulate
