// Places on the device: pages, slots and lanes; who gives them up, and what of them is cached.
#include <algorithm>

#include "check/check.h"
#include "scheduler/scheduler.h"

namespace tokenspeed::scheduler {

using fsm::holding;

// Evicts cached pages that no request uses until so many are free. False, nothing evicted: so many are not to be had.
bool Scheduler::make_room(int32_t num_pages) {
  return pages_.num_free() >= num_pages || prefixes_.make_room(num_pages);
}

// Pages that the next decodes need beside those that they have.
int32_t Scheduler::num_pages_due() const noexcept {
  int32_t num_due = 0;
  for (const DecodeLane& lane : lanes_) num_due += lane.position == lane.covered && lane.position < lane.end;
  return num_due;
}

// The running requests, who is first when pages are short at the front.
void Scheduler::find_running_by_rank() {
  by_rank_.clear();
  for (const DecodeLane& lane : lanes_) by_rank_.push_back(lane.request);
  if (prefilling_ != nullptr) by_rank_.push_back(prefilling_);
  std::sort(by_rank_.begin(), by_rank_.end(), [](const Request* a, const Request* b) { return a->rank() < b->rank(); });
}

// Preempts the last in rank, of those behind `needy`, that can be. Not one that a step in flight uses: its pages are in
// use until that step commits. Nor one that has drawn nothing since it was preempted: it would lose the same work again
// and again. (It has all pages that it needs to draw; see Scheduler::measure.)
bool Scheduler::free_a_page(const Request& needy) {
  for (auto last = by_rank_.rbegin(); last != by_rank_.rend() && (*last)->rank() > needy.rank(); ++last) {
    if (preempt((*last)->id)) return true;
  }
  return false;
}

bool Scheduler::preempt(int64_t request_id, bool always) {
  publish_noted();
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) return false;
  Request& request = *found->second;
  const bool has_place = fsm::is<fsm::Prefilling>(request.state) || fsm::is<fsm::Decoding>(request.state);
  if (!has_place || fsm::num_steps_in_flight(request.state) > 0) return false;
  if (!always && !request.has_progressed()) return false;
  leave_place(request);
  recent_.flush(request);
  fsm::follow(request.state, fsm::Preempt{});
  request.num_positions = 0;
  request.num_tokens_preempted = request.num_tokens;
  request.slot = -1;
  request.waits_since_ns = now_ns_;
  preempted_.push_back(request_id);
  waiting_.push_preempted(request);
  ++counters_.preemptions;
  return true;
}

// `num_pages` free ones, behind the `num_held` of the slot's request.
cache::PageLease Scheduler::acquire_pages(int32_t slot, int32_t num_held, int32_t num_pages) {
  std::optional<cache::PageLease> more = pages_.acquire(num_pages);
  TS_ASSERT(more.has_value(), "pages are made free before they are acquired");
  auto at = page_rows_.begin() + int64_t{slot} * config_.pages_per_sequence() + num_held;
  for (const int32_t page : *more) *at++ = page;
  return std::move(*more);
}

std::span<int32_t> Scheduler::page_row(int32_t slot, int32_t num_pages) noexcept {
  const auto first = static_cast<size_t>(slot) * static_cast<size_t>(config_.pages_per_sequence());
  return std::span(page_rows_).subspan(first, static_cast<size_t>(num_pages));
}

// The request's prompt is planned: from here on it decodes.
void Scheduler::enter_lane(Request& request) {
  const fsm::Holding& held = *holding(request.state);
  const int32_t num_pages = held.prefix.num_pages() + held.pages.num_pages();
  request.lane = static_cast<int32_t>(lanes_.size());
  lanes_.push_back({.request = &request,
                    .tag = ++last_tag_,
                    .slot = held.slot.slot(),
                    .position = request.num_positions,
                    .covered = num_pages * config_.page_size,
                    .end = request.decode_end(),
                    .num_pages = num_pages,
                    .page = page_row(held.slot.slot(), num_pages).back(),
                    .adjusts = request.params.adjusts_draws()});
}

void Scheduler::leave_lane(Request& request) noexcept {
  const auto lane = static_cast<size_t>(request.lane);
  lanes_[lane] = lanes_.back();
  lanes_[lane].request->lane = request.lane;
  lanes_.pop_back();
  request.lane = -1;
}

// The request runs no more.
void Scheduler::leave_place(Request& request) noexcept {
  if (request.lane >= 0) leave_lane(request);
  if (prefilling_ == &request) prefilling_ = nullptr;
}

// Publishes the pages that decodes have filled. Each is far away in memory from the others, so all of it is asked for at
// first, in as many rounds as one thing leads to the next. Not while a step is planned that has decodes already: it would
// read a page that is found to be cached under another number.
void Scheduler::publish_noted() {
  for (const FullPage& full : full_pages_) __builtin_prefetch(holding(full.request->state));
  for (const FullPage& full : full_pages_) {
    prefixes_.prefetch_ref(holding(full.request->state)->prefix);
    __builtin_prefetch(next_page_to_publish(*full.request).data());
  }
  for (const FullPage& full : full_pages_) {
    prefixes_.prefetch_publish(holding(full.request->state)->prefix, next_page_to_publish(*full.request));
  }
  for (const FullPage& full : full_pages_) publish_full_pages(*full.request, full.num_positions);
  full_pages_.clear();
  free_retired();
}

// The tokens of the page behind its cached path, which must be there.
std::span<const int32_t> Scheduler::next_page_to_publish(const Request& request) const noexcept {
  const auto size = static_cast<size_t>(config_.page_size);
  const auto page = static_cast<size_t>(holding(request.state)->prefix.num_pages());
  return std::span(request.tokens).subspan(page * size, size);
}

// Puts the pages of the first `num_positions` positions, which committed steps have written, into the prefix index.
// Where it has one already, as two requests with one prompt run side by side, the request goes on with that one.
void Scheduler::publish_full_pages(Request& request, int32_t num_positions) {
  fsm::Holding& held = *holding(request.state);
  while (num_positions >= (held.prefix.num_pages() + 1) * config_.page_size) {
    if (!request.publishes || held.prefix.is_stale()) {
      request.publishes = false;
      return;
    }
    const auto page = static_cast<size_t>(held.prefix.num_pages());
    cache::PrefixIndex::Published published =
        prefixes_.publish(held.prefix, next_page_to_publish(request), held.pages.take_front());
    if (!published.duplicate) continue;
    page_row(held.slot.slot(), held.prefix.num_pages())[page] = published.page;
    if (request.lane >= 0) {  // what steps have of it is not right any more
      DecodeLane& lane = lanes_[static_cast<size_t>(request.lane)];
      lane.tag = ++last_tag_;
      lane.page = page_row(lane.slot, lane.num_pages).back();
    }
    retired_.push_back({oldest_id_ + num_in_flight_ - 1, std::move(*published.duplicate)});
  }
}

void Scheduler::free_retired() {
  const auto is_read = [&](const Retired& retired) { return retired.last_step >= oldest_id_; };
  retired_.erase(retired_.begin(), std::find_if(retired_.begin(), retired_.end(), is_read));
}

}  // namespace tokenspeed::scheduler
