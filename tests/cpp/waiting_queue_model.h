// A plain model of the waiting queue, and the queue beside it under random use.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <tuple>
#include <utility>

#include "scheduler/waiting_queue.h"

namespace tokenspeed::scheduler::testing {

using Random = std::mt19937_64;

inline int64_t draw(Random& random, int64_t low, int64_t high) {  // both ends included; the same on every platform
  return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
}

// The rules once more, in the plainest words: one list, walked over for each question. What a tenant owes is never
// forgotten here but when nobody is active: that the queue forgets what lies under the floor must not show.
struct Model {
  enum Place { kWaiting, kPreempted, kRunning };
  struct Request {
    Arrival arrival;
    Place place;
  };
  int64_t aging_ns;
  std::map<int64_t, Request> requests;  // by number
  std::map<int32_t, int64_t> counters;
  int64_t floor = 0;
  int32_t last_waiting = -1;

  bool waits(int32_t tenant) const { return any(tenant, [](Place p) { return p == kWaiting; }); }
  bool active(int32_t tenant) const { return any(tenant, [](Place) { return true; }); }
  template <class Which>
  bool any(int32_t tenant, Which which) const {
    return std::any_of(requests.begin(), requests.end(), [&](const auto& r) {
      return r.second.arrival.tenant == tenant && which(r.second.place);
    });
  }
  int64_t count(Place place, int32_t priority = -1) const {
    return std::count_if(requests.begin(), requests.end(), [&](const auto& r) {
      return r.second.place == place && (priority < 0 || r.second.arrival.priority == priority);
    });
  }
  // After each change.
  void update_floor() {
    int64_t least = INT64_MAX;
    for (const auto& [number, r] : requests) {
      if (r.place == kWaiting) least = std::min(least, counters.at(r.arrival.tenant));
    }
    if (least != INT64_MAX) floor = least;
    else if (last_waiting >= 0) floor = counters.at(last_waiting);
    if (last_waiting >= 0 && !active(last_waiting)) last_waiting = -1;
    if (requests.empty()) *this = {.aging_ns = aging_ns, .requests = {}, .counters = {}};
  }
  void push(const Arrival& arrival) {
    int64_t& counter = counters[arrival.tenant];
    if (!waits(arrival.tenant)) counter = std::max(counter, floor);
    requests.emplace(arrival.number, Request{arrival, kWaiting});
    last_waiting = -1;
    update_floor();
  }
  void set(int64_t number, Place place) {
    Request& r = requests.at(number);
    const bool was_waiting = r.place == kWaiting;
    r.place = place;
    if (was_waiting && count(kWaiting) == 0) last_waiting = r.arrival.tenant;
    update_floor();
  }
  void remove(int64_t number) {
    set(number, kRunning);
    requests.erase(number);
    update_floor();
  }
  void charge(int64_t number, int64_t num_tokens) {
    counters.at(requests.at(number).arrival.tenant) += num_tokens;
    update_floor();
  }
  int64_t oldest_wait(int64_t now_ns) const {
    int64_t longest = 0;
    for (const auto& [number, r] : requests) {
      if (r.place == kWaiting) longest = std::max(longest, now_ns - r.arrival.time_ns);
    }
    return longest;
  }
  std::pair<int64_t, ChoiceReason> front(int64_t now_ns) const {
    using Rank = std::tuple<int64_t, int64_t, int64_t>;
    Rank preempted{INT64_MAX, 0, -1}, oldest{INT64_MAX, 0, -1}, fair{INT64_MAX, 0, -1};
    for (const auto& [number, r] : requests) {
      const int64_t gained = aging_ns > 0 ? (now_ns - r.arrival.time_ns) / aging_ns : 0;
      if (r.place == kPreempted) preempted = std::min(preempted, Rank{r.arrival.priority, number, number});
      if (r.place == kWaiting) oldest = std::min(oldest, Rank{r.arrival.priority - gained, r.arrival.priority, number});
    }
    if (std::get<2>(preempted) >= 0) return {std::get<2>(preempted), ChoiceReason::Preempted};
    const auto [effective, priority, number] = oldest;
    if (number < 0) return {-1, ChoiceReason::None};
    if (effective < priority) return {number, ChoiceReason::Aged};
    for (const auto& [n, r] : requests) {
      if (r.place != kWaiting || r.arrival.priority != priority) continue;
      fair = std::min(fair, Rank{counters.at(r.arrival.tenant), n, n});
    }
    return {std::get<2>(fair), ChoiceReason::FairShare};
  }
};

// Queue and model side by side.
class Pair {
 public:
  Pair(uint64_t seed, int64_t aging_ns, int64_t num_tenants, size_t crowd)
      : random_(seed), num_tenants_(num_tenants), crowd_(crowd), queue_(aging_ns), model_{aging_ns, {}, {}} {}

  void step() {
    now_ += draw(random_, 0, 3);
    if (entries_.size() >= crowd_) filling_ = false;
    if (entries_.size() <= calm_) filling_ = true, calm_ = static_cast<size_t>(draw(random_, 0, 3)) * crowd_ / 4;
    const int64_t dice = draw(random_, 0, 99);
    if (dice < (filling_ ? 48 : 14)) push();
    else if (dice < (filling_ ? 57 : 46)) admit_front();
    else if (dice < (filling_ ? 59 : 47)) change(Model::kWaiting, [&](auto& e, int64_t n) { admit(e, n); });
    else if (dice < (filling_ ? 63 : 50)) change(Model::kRunning, [&](auto& e, int64_t n) { preempt(e, n); });
    else if (dice < (filling_ ? 72 : 58)) change(Model::kRunning, [&](auto& e, int64_t n) { charge(e, n, 7); });
    else if (dice < (filling_ ? 97 : 98)) change(Model::kRunning, [&](auto&, int64_t n) { end(n); });
    else change(dice < 99 ? Model::kWaiting : Model::kPreempted, [&](auto&, int64_t n) { end(n); });
  }

  bool agree() {
    const auto [number, reason] = model_.front(now_);
    const QueueChoice choice = queue_.front(now_);
    const int64_t chosen = choice.entry == nullptr ? -1 : choice.entry->arrival().number;
    if (chosen != number || choice.reason != reason) return false;
    const auto waiting = static_cast<size_t>(model_.count(Model::kWaiting));
    const auto preempted = static_cast<size_t>(model_.count(Model::kPreempted));
    if (queue_.size() != waiting + preempted || queue_.num_preempted() != preempted) return false;
    if (queue_.num_running() != model_.requests.size() - queue_.size()) return false;
    if (queue_.oldest_wait(now_) != model_.oldest_wait(now_)) return false;
    const auto priority = static_cast<int32_t>(draw(random_, 0, kNumPriorities - 1));
    if (queue_.class_size(priority) != static_cast<size_t>(model_.count(Model::kWaiting, priority))) return false;
    for (const auto& [tenant, counter] : model_.counters) {
      const auto known = queue_.counter(tenant);
      const bool must_know = model_.active(tenant) || counter > model_.floor;
      if (known ? *known != counter : must_know) return false;
    }
    return queue_.num_tenants() <= model_.counters.size();
  }
  int64_t num_chosen(ChoiceReason reason) const { return num_chosen_[static_cast<size_t>(reason)]; }
  int64_t num_idle = 0;

 private:
  void push() {
    const int64_t priority = draw(random_, 0, 3) == 0 ? draw(random_, 0, kNumPriorities - 1) : draw(random_, 0, 1);
    const Arrival arrival{static_cast<int32_t>(priority), static_cast<int32_t>(draw(random_, 0, num_tenants_ - 1)),
                          next_number_, now_};
    next_number_ += draw(random_, 1, 3);
    queue_.push(*entries_.emplace(arrival.number, std::make_unique<QueueEntry>()).first->second, arrival);
    model_.push(arrival);
  }
  void admit_front() {
    const QueueChoice choice = queue_.front(now_);
    ++num_chosen_[static_cast<size_t>(choice.reason)];
    if (choice.entry == nullptr) return;
    admit(*choice.entry, choice.entry->arrival().number);
    charge(*choice.entry, choice.entry->arrival().number, draw(random_, 0, 100));
  }
  void admit(QueueEntry& entry, int64_t number) {
    queue_.admit(entry);
    model_.set(number, Model::kRunning);
  }
  void charge(QueueEntry& entry, int64_t number, int64_t num_tokens) {
    queue_.charge(entry, num_tokens);
    model_.charge(number, num_tokens);
  }
  void preempt(QueueEntry& entry, int64_t number) {
    queue_.push_preempted(entry);
    model_.set(number, Model::kPreempted);
  }
  void end(int64_t number) {
    if (draw(random_, 0, 1) == 0) queue_.remove(*entries_.at(number));
    entries_.erase(number);
    model_.remove(number);
    num_idle += entries_.empty();
  }
  template <class Change>
  void change(Model::Place place, Change apply) {
    const int64_t of_place = model_.count(place);
    if (of_place == 0) return;
    int64_t skip = draw(random_, 0, of_place - 1);
    for (const auto& [number, request] : model_.requests) {
      if (request.place != place || skip-- > 0) continue;
      apply(*entries_.at(number), number);
      return;
    }
  }

  Random random_;
  int64_t num_tenants_;
  size_t crowd_, calm_ = 0;  // the number of requests goes up and down between these
  WaitingQueue queue_;
  Model model_;
  std::map<int64_t, std::unique_ptr<QueueEntry>> entries_;
  int64_t now_ = 1000, next_number_ = 0;
  bool filling_ = true;
  std::array<int64_t, 4> num_chosen_{};
};

}  // namespace tokenspeed::scheduler::testing
