// A request as the scheduler knows it, and its place among those that decode.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "check/huge_pages.h"
#include "fsm/request_state.h"
#include "scheduler/config.h"
#include "scheduler/waiting_queue.h"

namespace tokenspeed::scheduler {

// What every commit of a decode reads and writes: one cache line.
struct alignas(64) HotRequest {
  static constexpr size_t kNearStops = 5;  // as many as most requests have

  fsm::RequestState state{fsm::Waiting{}};
  int64_t id = 0;
  int32_t num_tokens = 0;   // the prompt's, and those that were drawn and committed
  int32_t most_tokens = 0;  // of prompt and drawn ones together
  int32_t slot = -1;        // while it has a place
  std::array<int32_t, kNearStops> near_stops = {-1, -1, -1, -1, -1};
};
static_assert(sizeof(HotRequest) == 64);

struct Request : HotRequest, QueueEntry {
  Request(int64_t request_id, std::vector<int32_t> prompt, RequestParams its_params)
      : params(std::move(its_params)), num_prompt(static_cast<int32_t>(prompt.size())) {
    id = request_id;
    tokens = std::move(prompt);
    num_tokens = num_prompt;
    most_tokens = num_prompt + params.max_new_tokens;
    next_prompt_row = params.first_prompt_row(num_prompt);
    const auto& stops = params.stop_token_ids;
    if (stops.size() <= kNearStops) std::copy(stops.begin(), stops.end(), near_stops.begin());
  }

  RequestParams params;
  std::vector<int32_t> tokens;  // the first of num_tokens; the others are in RecentTokens
  const int32_t num_prompt;
  int32_t lane = -1;                  // its place among the decodes, or -1
  int32_t num_positions = 0;          // of chunks, in pages once every planned step has run; in a lane it is there
  int32_t next_prompt_row = 0;        // where the next one stands, or num_prompt - 1; a row is asked once
  int32_t num_tokens_preempted = -1;  // num_tokens when it was preempted last
  bool publishes = false;             // its full pages go to the prefix index
  int64_t waits_since_ns = 0;

  // The position behind its last decode: that draws its last token.
  int32_t decode_end() const noexcept { return most_tokens - 1; }
  bool stops_at(int32_t token) const noexcept {
    if (std::find(near_stops.begin(), near_stops.end(), token) != near_stops.end()) return true;
    if (near_stops.front() >= 0) return false;
    const auto& stops = params.stop_token_ids;
    return stops.size() > kNearStops && std::find(stops.begin(), stops.end(), token) != stops.end();
  }
  // How many of its first tokens need not be computed where they are cached: all before the next one with a logit row.
  int32_t most_cached() const noexcept {
    if (!params.may_skip_prompt()) return 0;
    return next_prompt_row < num_prompt - 1 ? next_prompt_row : num_tokens - 1;
  }
  bool was_preempted() const noexcept { return num_tokens_preempted >= 0; }
  // It has drawn a token since it was preempted, so it may be preempted again.
  bool has_progressed() const noexcept { return num_tokens > num_tokens_preempted; }
  // Who is first when pages are short.
  std::pair<int32_t, int64_t> rank() const noexcept { return {arrival().priority, arrival().number}; }

  // Asks for the cache line of HotRequest. Between two steps lie milliseconds, in which others use the caches: who walks
  // over requests asks for those to come, so that their misses pass at the same time.
  void prefetch() const noexcept { __builtin_prefetch(static_cast<const HotRequest*>(this), 1); }
};

// The tokens that requests drew last, side by side for all of them: up to the end of a page's worth, when they go to
// the request's own.
class RecentTokens {
 public:
  RecentTokens(int32_t num_slots, int32_t page_size)
      : page_size_(page_size), tokens_(static_cast<size_t>(num_slots) * static_cast<size_t>(page_size)) {}

  void push(Request& request, int32_t token) noexcept {
    const int32_t at = request.num_tokens++ % page_size_;
    tokens_[first(request) + static_cast<size_t>(at)] = token;
    if (at + 1 == page_size_) flush(request);
  }

  // Makes `request.tokens` whole, whose capacity was reserved.
  void flush(Request& request) noexcept {
    const size_t num_new = static_cast<size_t>(request.num_tokens) - request.tokens.size();
    const size_t from = first(request) + request.tokens.size() % static_cast<size_t>(page_size_);
    const auto begin = tokens_.begin() + static_cast<std::ptrdiff_t>(from);
    request.tokens.insert(request.tokens.end(), begin, begin + static_cast<std::ptrdiff_t>(num_new));
  }

  void prefetch(const Request& request) const noexcept { __builtin_prefetch(tokens_.data() + first(request), 1); }

 private:
  size_t first(const Request& request) const noexcept {
    return static_cast<size_t>(request.slot) * static_cast<size_t>(page_size_);
  }

  const int32_t page_size_;
  check::HugeVector<int32_t> tokens_;  // [slot][page_size]: a token at its position modulo page_size
};

// What planning a decode reads and writes, one after another in memory for all requests that decode. In no order: the
// last one moves to where one leaves.
struct DecodeLane {
  Request* request;
  uint64_t tag;       // of the request and of the pages it has; see Step::add_decode
  int32_t slot;
  int32_t position;   // of the newest token
  int32_t covered;    // positions that its pages have room for
  int32_t end;        // Request::decode_end
  int32_t num_pages;
  int32_t page;       // the last one
  bool adjusts;       // its draws have an adjustment
};

}  // namespace tokenspeed::scheduler
