// The waiting queue: who is admitted next. Priority classes with aging, fair share between tenants inside of a class,
// and preempted requests before all others. Deterministic: time is an argument, and the same calls always choose alike.
//
// `front(now)` chooses, by these rules in this order:
//
// 1. Preempted requests, by (priority, arrival number), whatever their tenant.
// 2. The class whose oldest request has the least *effective* class: its class less one for each full `aging_ns` that
//    it has waited, below 0 too. A tie goes to the lower class.
// 3. If that oldest request has waited `aging_ns` or more, it is chosen itself.
// 4. Else fair share: of the tenants with requests in the class, the one with the least counter, a tie going to the one
//    whose oldest request there came first; of this tenant its oldest request in the class.
//
// Bound of waiting. Let e be of class c. *No request that arrives (c + 1) * aging_ns or later after e is chosen before
// e by rules 2 to 4.* Proof: while e has waited less than that, such a request is not there yet. Then, the oldest of
// e's class has waited at least as long as e, w >= (c + 1) * aging_ns, so its effective class is at most
// c - floor(w / aging_ns) <= -1. Whatever class k is chosen, the effective class of its oldest, p, is no greater: it is
// negative, which none has without waiting, so rule 3 chooses p itself, and k - floor(w_p / aging_ns) <=
// c - floor(w / aging_ns). With k >= 0, floor(w_p / aging_ns) >= floor(w / aging_ns) - c, so w_p > w - (c + 1) *
// aging_ns: p came less than (c + 1) * aging_ns after e. Hence e is chosen after at most those requests that wait when
// it comes and those that come in the next (c + 1) * aging_ns, and preempted ones. Without aging (aging_ns = 0) a lower
// class may wait for as long as higher ones have requests.
//
// Fair share is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A
// tenant's counter rises by what `charge` says that it was served. A tenant that starts to wait (it had no request in
// the classes) is lifted to the *floor*: the least counter of those that wait, or, where none waits, that of the last
// one that did. So nobody saves up service by staying away, and nobody pays for service that others did not wait for.
// The floor never falls while any tenant is active. Of two tenants that keep waiting in a class where rule 4 chooses,
// one is ahead of the other by at most what is charged for the requests that ran for it after its last admission: when
// that came, its counter was not the greater one.
//
// A tenant is active while a request of it waits or runs. The counter of one that is not is kept only while it is above
// the floor (afterwards the lift would overwrite it), and only the `kMaxDebtors` greatest of them; once nobody is
// active, all are forgotten. So who comes with one request at a time escapes no debt, and memory stays bounded.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tokenspeed::scheduler {

inline constexpr int32_t kNumPriorities = 10;  // classes 0 (first) to 9

// What a request says of itself when it is queued.
struct Arrival {
  int32_t priority;  // 0 .. kNumPriorities-1
  int32_t tenant;    // 0 or more
  int64_t number;    // greater than that of every request queued before
  int64_t time_ns;   // since any fixed start; a time before that of the last request counts as that one
};

class QueueEntry;

namespace queue_detail {

// A binary heap of items that know their place in it, ordered by a key that is kept beside the item. The least first.
template <class Item, int32_t Item::*position>
class RankedHeap {
 public:
  using Key = std::pair<int64_t, int64_t>;

  bool empty() const noexcept { return nodes_.empty(); }
  size_t size() const noexcept { return nodes_.size(); }
  Item& top() const noexcept { return *nodes_.front().item; }
  const Key& top_key() const noexcept { return nodes_.front().key; }

  // The next `push` calls up to this size do not allocate.
  void make_room(size_t size) {
    if (size > nodes_.capacity()) nodes_.reserve(2 * size + 16);
  }
  void push(Item& item, const Key& key) noexcept {
    nodes_.push_back({key, &item});  // make_room was called
    rise(nodes_.size() - 1);
  }
  void erase(Item& item) noexcept {
    const auto at = static_cast<size_t>(item.*position);
    item.*position = -1;
    const Node last = nodes_.back();
    nodes_.pop_back();
    if (at == nodes_.size()) return;
    nodes_[at] = last;
    sink(at);
    rise(static_cast<size_t>(last.item->*position));
  }
  void raise_top(const Key& key) noexcept {
    nodes_.front().key = key;
    sink(0);
  }

 private:
  struct Node {
    Key key;
    Item* item;
  };

  void put(size_t at, const Node& node) noexcept {
    nodes_[at] = node;
    node.item->*position = static_cast<int32_t>(at);
  }
  void rise(size_t at) noexcept {
    const Node node = nodes_[at];
    for (size_t parent; at > 0 && node.key < nodes_[parent = (at - 1) / 2].key; at = parent) put(at, nodes_[parent]);
    put(at, node);
  }
  void sink(size_t at) noexcept {
    const Node node = nodes_[at];
    for (size_t child; (child = 2 * at + 1) < nodes_.size(); at = child) {
      if (child + 1 < nodes_.size() && nodes_[child + 1].key < nodes_[child].key) ++child;
      if (!(nodes_[child].key < node.key)) break;
      put(at, nodes_[child]);
    }
    put(at, node);
  }

  std::vector<Node> nodes_;
};

struct Links {
  QueueEntry* previous = nullptr;
  QueueEntry* next = nullptr;
};

// A doubly linked list through the entries themselves.
template <Links QueueEntry::*links>
class Fifo {
 public:
  QueueEntry* oldest() const noexcept { return oldest_; }
  void push(QueueEntry& entry) noexcept;
  void erase(QueueEntry& entry) noexcept;

 private:
  QueueEntry* oldest_ = nullptr;
  QueueEntry* youngest_ = nullptr;
};

struct Lane;
struct Tenant;

}  // namespace queue_detail

class WaitingQueue;

// What a request holds (or derives from) to be queued: nothing is allocated for it. One that dies leaves its queue.
class QueueEntry {
 public:
  QueueEntry() noexcept = default;
  ~QueueEntry();
  QueueEntry(const QueueEntry&) = delete;
  QueueEntry& operator=(const QueueEntry&) = delete;

  // Of the last push.
  const Arrival& arrival() const noexcept { return arrival_; }
  // Whether it stands in the queue, preempted or not.
  bool is_waiting() const noexcept { return place_ == Place::Waiting || place_ == Place::Preempted; }
  bool is_running() const noexcept { return place_ == Place::Running; }

 private:
  friend class WaitingQueue;
  friend struct queue_detail::Lane;
  enum class Place : uint8_t { Out, Waiting, Preempted, Running };

  Arrival arrival_{};
  WaitingQueue* queue_ = nullptr;           // unless Out
  queue_detail::Tenant* tenant_ = nullptr;  // unless Out
  queue_detail::Links in_class_, in_lane_;  // while Waiting
  int32_t position_ = -1;                   // among the preempted
  Place place_ = Place::Out;
};

namespace queue_detail {

// The waiting requests of one tenant in one class.
struct Lane {
  Fifo<&QueueEntry::in_lane_> entries;
  Tenant* tenant = nullptr;
  int32_t position = -1;  // among the lanes of its class
};

struct Tenant {
  int32_t id = 0;
  int32_t num_entries = 0;  // that wait or run; the tenant is active while there are any
  int32_t num_waiting = 0;  // in the lanes
  int32_t position = -1;    // among those that wait or, not active, among the debtors
  int64_t counter = 0;
  std::array<Lane, kNumPriorities> lanes;
};

}  // namespace queue_detail

// Why an entry is chosen.
enum class ChoiceReason : uint8_t { None, Preempted, Aged, FairShare };

struct QueueChoice {
  QueueEntry* entry;  // null: nobody waits
  ChoiceReason reason;
};

// Not thread-safe: the scheduler's thread owns it. Must outlive its entries. All operations are O(log entries), `front`
// O(kNumPriorities) besides; `push` alone may allocate (and then throw, changing nothing).
class WaitingQueue {
 public:
  static constexpr size_t kMaxDebtors = 4096;

  explicit WaitingQueue(int64_t aging_ns);  // 0: no aging
  ~WaitingQueue();
  WaitingQueue(const WaitingQueue&) = delete;
  WaitingQueue& operator=(const WaitingQueue&) = delete;

  // A new request waits.
  void push(QueueEntry& entry, const Arrival& arrival);

  // Who is next at the time `now_ns`.
  QueueChoice front(int64_t now_ns) noexcept;

  // A waiting entry, the one that front chose or any other, runs from now on. Charge what it costs before the next
  // front: else the same tenant is chosen again.
  void admit(QueueEntry& entry) noexcept;

  // A running entry lost its place and waits again, before all that never ran.
  void push_preempted(QueueEntry& entry) noexcept;

  // The request has ended, waiting or running.
  void remove(QueueEntry& entry) noexcept;

  // The tenant of an entry that waits or runs was served so many tokens: 0 or more, weighted as the caller likes. O(1)
  void charge(QueueEntry& entry, int64_t num_tokens) noexcept;

  size_t size() const noexcept { return num_waiting_ + preempted_.size(); }
  bool empty() const noexcept { return size() == 0; }
  size_t num_preempted() const noexcept { return preempted_.size(); }  // that wait
  size_t num_running() const noexcept { return num_entries_ - size(); }
  size_t class_size(int32_t priority) const noexcept;                  // that wait and have never run
  size_t num_tenants() const noexcept { return tenants_.size(); }      // with a counter
  std::optional<int64_t> counter(int32_t tenant) const noexcept;

  // How long the oldest request that never ran has waited; 0 when none waits.
  int64_t oldest_wait(int64_t now_ns) const noexcept;

 private:
  using Tenant = queue_detail::Tenant;
  using Lane = queue_detail::Lane;
  struct PriorityClass {
    queue_detail::Fifo<&QueueEntry::in_class_> entries;
    // Lanes with entries by (counter, number of the oldest). Both only rise while the lane has entries, so a key may be
    // behind, and is brought up to date when its lane comes to the top.
    queue_detail::RankedHeap<Lane, &Lane::position> lanes;
    size_t size = 0;
  };

  Lane& least_served(PriorityClass& of) noexcept;
  void leave(QueueEntry& entry) noexcept;
  void start_waiting(Tenant& tenant) noexcept;
  void stop_waiting(Tenant& tenant) noexcept;
  void deactivate(Tenant& tenant) noexcept;
  void raise_floor() noexcept;
  void forget(Tenant& tenant) noexcept;

  const int64_t aging_ns_;
  std::array<PriorityClass, kNumPriorities> classes_;
  queue_detail::RankedHeap<QueueEntry, &QueueEntry::position_> preempted_;  // by (priority, number)
  size_t num_waiting_ = 0;  // in the classes
  size_t num_entries_ = 0;  // waiting, preempted or running
  int64_t last_number_ = INT64_MIN;
  int64_t last_time_ns_ = INT64_MIN;

  using TenantHeap = queue_detail::RankedHeap<Tenant, &Tenant::position>;
  std::unordered_map<int32_t, Tenant> tenants_;  // found by id, never walked over
  TenantHeap waiting_tenants_;                   // by (counter, id); keys may be behind
  TenantHeap debtors_;                           // not active, counter above the floor, by (counter, id)
  size_t num_active_ = 0;
  int64_t floor_ = 0;               // as of the last raise_floor
  Tenant* last_waiting_ = nullptr;  // the last one to stop waiting, if it is active; read while none waits
};

}  // namespace tokenspeed::scheduler
