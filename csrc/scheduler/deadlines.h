// Deadlines of requests, waiting and running alike. Deterministic: time is an argument, and those that expire at once
// come by (deadline, id).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "check/check.h"

namespace tokenspeed::scheduler {

// Not thread-safe. Times are nanoseconds since any fixed start. O(log deadlines) each, and for each one that expires.
class Deadlines {
 public:
  // One deadline per id. Throws std::bad_alloc, changing nothing.
  void add(int64_t id, int64_t deadline_ns) {
    const auto known = by_id_.try_emplace(id, deadline_ns);
    TS_ASSERT(known.second, "a request has one deadline");
    try {
      by_time_.emplace(deadline_ns, id);
    } catch (...) {
      by_id_.erase(known.first);
      throw;
    }
  }

  // False: the id has no deadline, or it has expired.
  bool remove(int64_t id) noexcept {
    const auto known = by_id_.find(id);
    if (known == by_id_.end()) return false;
    by_time_.erase({known->second, id});
    by_id_.erase(known);
    return true;
  }

  // Appends the ids whose deadline is at `now_ns` or before, and forgets them.
  void expired(int64_t now_ns, std::vector<int64_t>& out) {
    while (!by_time_.empty() && by_time_.begin()->first <= now_ns) {
      const int64_t id = by_time_.begin()->second;
      out.push_back(id);
      by_id_.erase(id);
      by_time_.erase(by_time_.begin());
    }
  }

  // The earliest deadline: nothing expires before.
  std::optional<int64_t> next() const noexcept {
    if (by_time_.empty()) return std::nullopt;
    return by_time_.begin()->first;
  }

  size_t size() const noexcept { return by_id_.size(); }

 private:
  std::set<std::pair<int64_t, int64_t>> by_time_;  // (deadline, id)
  std::unordered_map<int64_t, int64_t> by_id_;    // found by id, never walked over
};

}  // namespace tokenspeed::scheduler
