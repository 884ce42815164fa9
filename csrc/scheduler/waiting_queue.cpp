#include "scheduler/waiting_queue.h"

#include <algorithm>

#include "check/check.h"

namespace tokenspeed::scheduler {

template <queue_detail::Links QueueEntry::*links>
void queue_detail::Fifo<links>::push(QueueEntry& entry) noexcept {
  entry.*links = {youngest_, nullptr};
  (youngest_ != nullptr ? (youngest_->*links).next : oldest_) = &entry;
  youngest_ = &entry;
}

template <queue_detail::Links QueueEntry::*links>
void queue_detail::Fifo<links>::erase(QueueEntry& entry) noexcept {
  const Links at = std::exchange(entry.*links, Links{});
  (at.previous != nullptr ? (at.previous->*links).next : oldest_) = at.next;
  (at.next != nullptr ? (at.next->*links).previous : youngest_) = at.previous;
}

QueueEntry::~QueueEntry() {
  if (queue_ != nullptr) queue_->remove(*this);
}

WaitingQueue::WaitingQueue(int64_t aging_ns) : aging_ns_(aging_ns) {
  TS_ASSERT(aging_ns >= 0, "the time in which a request gains a class cannot be negative");
}

WaitingQueue::~WaitingQueue() { TS_ASSERT(num_entries_ == 0, "a waiting queue must outlive its entries"); }

void WaitingQueue::push(QueueEntry& entry, const Arrival& arrival) {
  TS_ASSERT(entry.place_ == QueueEntry::Place::Out, "a request is queued once");
  TS_ASSERT(arrival.priority >= 0 && arrival.priority < kNumPriorities, "no such priority class");
  TS_ASSERT(arrival.tenant >= 0, "a tenant is 0 or more");
  TS_ASSERT(arrival.number > last_number_, "arrival numbers rise");
  PriorityClass& of = classes_[static_cast<size_t>(arrival.priority)];

  // Room for all that this entry will ever need, so that nothing else can fail.
  of.lanes.make_room(of.lanes.size() + 1);
  preempted_.make_room(num_entries_ + 1);
  waiting_tenants_.make_room(waiting_tenants_.size() + 1);
  debtors_.make_room(std::min(tenants_.size(), kMaxDebtors) + 1);
  const auto [known, is_new] = tenants_.try_emplace(arrival.tenant);

  Tenant& tenant = known->second;
  if (is_new) {
    tenant.id = arrival.tenant;
    for (Lane& lane : tenant.lanes) lane.tenant = &tenant;
  }
  if (tenant.num_entries++ == 0) {
    ++num_active_;
    if (!is_new) debtors_.erase(tenant);
  }
  if (tenant.num_waiting++ == 0) start_waiting(tenant);

  last_number_ = arrival.number;
  last_time_ns_ = std::max(last_time_ns_, arrival.time_ns);
  entry.arrival_ = arrival;
  entry.arrival_.time_ns = last_time_ns_;
  entry.queue_ = this;
  entry.tenant_ = &tenant;
  entry.place_ = QueueEntry::Place::Waiting;
  Lane& lane = tenant.lanes[static_cast<size_t>(arrival.priority)];
  if (lane.entries.oldest() == nullptr) of.lanes.push(lane, {tenant.counter, arrival.number});
  lane.entries.push(entry);
  of.entries.push(entry);
  ++of.size;
  ++num_waiting_;
  ++num_entries_;
}

QueueChoice WaitingQueue::front(int64_t now_ns) noexcept {
  if (!preempted_.empty()) return {&preempted_.top(), ChoiceReason::Preempted};
  PriorityClass* best = nullptr;
  int64_t best_class = 0;
  bool has_aged = false;
  for (int32_t priority = 0; priority < kNumPriorities; ++priority) {
    PriorityClass& of = classes_[static_cast<size_t>(priority)];
    if (of.size == 0) continue;
    const int64_t waited = now_ns - of.entries.oldest()->arrival_.time_ns;
    const int64_t gained = aging_ns_ > 0 && waited >= aging_ns_ ? waited / aging_ns_ : 0;
    if (best != nullptr && priority - gained >= best_class) continue;
    best = &of;
    best_class = priority - gained;
    has_aged = gained > 0;
  }
  if (best == nullptr) return {nullptr, ChoiceReason::None};
  if (has_aged) return {best->entries.oldest(), ChoiceReason::Aged};
  return {least_served(*best).entries.oldest(), ChoiceReason::FairShare};
}

WaitingQueue::Lane& WaitingQueue::least_served(PriorityClass& of) noexcept {
  // Keys that are behind are too small, never too great: a top whose key holds is the least.
  for (;;) {
    Lane& lane = of.lanes.top();
    const std::pair<int64_t, int64_t> key{lane.tenant->counter, lane.entries.oldest()->arrival_.number};
    if (key == of.lanes.top_key()) return lane;
    of.lanes.raise_top(key);
  }
}

void WaitingQueue::admit(QueueEntry& entry) noexcept {
  TS_ASSERT(entry.queue_ == this && entry.is_waiting(), "only what waits here is admitted");
  leave(entry);
  entry.place_ = QueueEntry::Place::Running;
}

void WaitingQueue::push_preempted(QueueEntry& entry) noexcept {
  TS_ASSERT(entry.queue_ == this && entry.is_running(), "only what runs is preempted");
  preempted_.push(entry, {entry.arrival_.priority, entry.arrival_.number});
  entry.place_ = QueueEntry::Place::Preempted;
}

void WaitingQueue::remove(QueueEntry& entry) noexcept {
  TS_ASSERT(entry.queue_ == this, "only what was queued here is removed");
  if (entry.is_waiting()) leave(entry);
  Tenant& tenant = *std::exchange(entry.tenant_, nullptr);
  entry.queue_ = nullptr;
  entry.place_ = QueueEntry::Place::Out;
  --num_entries_;
  if (--tenant.num_entries == 0) deactivate(tenant);
}

void WaitingQueue::charge(QueueEntry& entry, int64_t num_tokens) noexcept {
  TS_ASSERT(entry.queue_ == this, "tokens are charged to a request that waits or runs");
  TS_ASSERT(num_tokens >= 0, "what was served is not taken back");
  entry.tenant_->counter += num_tokens;
}

// Takes a waiting entry out of where it stands.
void WaitingQueue::leave(QueueEntry& entry) noexcept {
  if (entry.place_ == QueueEntry::Place::Preempted) {
    preempted_.erase(entry);
    return;
  }
  const auto priority = static_cast<size_t>(entry.arrival_.priority);
  PriorityClass& of = classes_[priority];
  Lane& lane = entry.tenant_->lanes[priority];
  of.entries.erase(entry);
  lane.entries.erase(entry);
  if (lane.entries.oldest() == nullptr) of.lanes.erase(lane);
  --of.size;
  --num_waiting_;
  if (--entry.tenant_->num_waiting == 0) stop_waiting(*entry.tenant_);
}

// No lane of the tenant has entries here, so no key of them depends on the counter.
void WaitingQueue::start_waiting(Tenant& tenant) noexcept {
  raise_floor();
  tenant.counter = std::max(tenant.counter, floor_);
  waiting_tenants_.push(tenant, {tenant.counter, tenant.id});
}

void WaitingQueue::stop_waiting(Tenant& tenant) noexcept {
  waiting_tenants_.erase(tenant);
  if (waiting_tenants_.empty()) last_waiting_ = &tenant;
}

void WaitingQueue::deactivate(Tenant& tenant) noexcept {
  if (--num_active_ == 0) {
    forget(tenant);
    while (!debtors_.empty()) forget(debtors_.top());
    last_waiting_ = nullptr;
    floor_ = 0;
    return;
  }
  raise_floor();
  if (last_waiting_ == &tenant) last_waiting_ = nullptr;
  if (tenant.counter <= floor_) {
    forget(tenant);
    return;
  }
  debtors_.push(tenant, {tenant.counter, tenant.id});
  if (debtors_.size() > kMaxDebtors) forget(debtors_.top());
}

void WaitingQueue::raise_floor() noexcept {
  if (!waiting_tenants_.empty()) {
    for (;;) {
      const Tenant& least = waiting_tenants_.top();
      if (waiting_tenants_.top_key().first == least.counter) break;
      waiting_tenants_.raise_top({least.counter, least.id});
    }
    floor_ = waiting_tenants_.top_key().first;
  } else if (last_waiting_ != nullptr) {
    floor_ = last_waiting_->counter;
  }
  while (!debtors_.empty() && debtors_.top_key().first <= floor_) forget(debtors_.top());
}

// A debtor, or a tenant that has just ceased to be active.
void WaitingQueue::forget(Tenant& tenant) noexcept {
  if (tenant.position >= 0) debtors_.erase(tenant);
  const int32_t id = tenant.id;  // erase ends the life of what it is in
  tenants_.erase(id);
}

size_t WaitingQueue::class_size(int32_t priority) const noexcept {
  TS_ASSERT(priority >= 0 && priority < kNumPriorities, "no such priority class");
  return classes_[static_cast<size_t>(priority)].size;
}

std::optional<int64_t> WaitingQueue::counter(int32_t tenant) const noexcept {
  const auto known = tenants_.find(tenant);
  if (known == tenants_.end()) return std::nullopt;
  return known->second.counter;
}

int64_t WaitingQueue::oldest_wait(int64_t now_ns) const noexcept {
  int64_t longest = 0;
  for (const PriorityClass& of : classes_) {
    if (of.size > 0) longest = std::max(longest, now_ns - of.entries.oldest()->arrival_.time_ns);
  }
  return longest;
}

}  // namespace tokenspeed::scheduler
