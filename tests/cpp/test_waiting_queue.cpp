// Who is admitted next, against the rules at the top of waiting_queue.h and against a plain model.
#include "scheduler/waiting_queue.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <list>
#include <map>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "death.h"
#include "test.h"
#include "waiting_queue_model.h"

using namespace tokenspeed::scheduler;
using namespace tokenspeed::scheduler::testing;
using tokenspeed::testing::aborts_with;

static_assert(!std::is_copy_constructible_v<QueueEntry> && !std::is_move_constructible_v<QueueEntry>);
static_assert(!std::is_copy_constructible_v<WaitingQueue> && !std::is_move_constructible_v<WaitingQueue>);
static_assert(noexcept(std::declval<WaitingQueue&>().push_preempted(std::declval<QueueEntry&>())));

// Counts allocations, and fails them once `num_left` more were made.
static int64_t num_allocations = 0;
static int64_t num_left = INT64_MAX;
[[gnu::noinline]] void* operator new(size_t size) {
  if (num_left-- <= 0) throw std::bad_alloc();
  ++num_allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

// A queue with requests that count up by themselves. They live until the end, or until `end`.
struct Bench {
  explicit Bench(int64_t aging_ns = 0) : queue(aging_ns) {}
  WaitingQueue queue;
  std::list<QueueEntry> entries;
  int64_t next_number = 0;

  QueueEntry& push(int32_t priority, int32_t tenant, int64_t time_ns = 0) {
    QueueEntry& entry = entries.emplace_back();
    queue.push(entry, {priority, tenant, next_number++, time_ns});
    return entry;
  }
  QueueEntry& run(int32_t priority, int32_t tenant, int64_t num_tokens) {
    QueueEntry& entry = push(priority, tenant);
    queue.admit(entry);
    queue.charge(entry, num_tokens);
    return entry;
  }
  // Admits the next one and charges it; returns its arrival number.
  int64_t serve(int64_t num_tokens = 0, int64_t now_ns = 0) {
    const QueueChoice choice = queue.front(now_ns);
    if (choice.entry == nullptr) return -1;
    queue.admit(*choice.entry);
    queue.charge(*choice.entry, num_tokens);
    return choice.entry->arrival().number;
  }
};

bool chooses(WaitingQueue& queue, int64_t now_ns, const QueueEntry& entry, ChoiceReason reason) {
  const QueueChoice choice = queue.front(now_ns);
  return choice.entry == &entry && choice.reason == reason;
}

}  // namespace

TEST(an_empty_queue_chooses_nobody) {
  WaitingQueue queue(10);
  CHECK(queue.front(5).entry == nullptr && queue.front(5).reason == ChoiceReason::None);
  CHECK(queue.empty() && queue.oldest_wait(5) == 0 && queue.num_tenants() == 0 && !queue.counter(0));
}

TEST(classes_come_in_order_and_a_class_in_order_of_arrival) {
  Bench b;
  for (const int32_t priority : {5, 9, 0, 5, 0}) b.push(priority, 1);
  CHECK(b.queue.size() == 5 && b.queue.class_size(5) == 2 && b.queue.class_size(0) == 2 && b.queue.class_size(1) == 0);
  for (const int64_t number : {2, 4, 0, 3, 1, -1}) CHECK(b.serve() == number);
  CHECK(b.queue.empty() && b.queue.num_running() == 5 && b.queue.class_size(5) == 0);
}

TEST(preempted_requests_stand_before_all_others) {
  Bench b(10);
  QueueEntry& late = b.push(3, 1);
  QueueEntry& low = b.push(4, 1);
  QueueEntry& early = b.push(3, 2);
  for (QueueEntry* entry : {&late, &low, &early}) b.queue.admit(*entry);
  QueueEntry& fresh = b.push(0, 3);
  b.queue.charge(late, 1000);  // a counter is nothing to the preempted
  for (QueueEntry* entry : {&early, &low, &late}) b.queue.push_preempted(*entry);
  CHECK(b.queue.size() == 4 && b.queue.num_preempted() == 3 && b.queue.num_running() == 0);
  CHECK(b.queue.class_size(3) == 0 && b.queue.class_size(0) == 1);
  CHECK(early.is_waiting() && !early.is_running());
  for (QueueEntry* entry : {&late, &early, &low}) {
    CHECK(chooses(b.queue, 10000, *entry, ChoiceReason::Preempted));
    b.queue.admit(*entry);
  }
  CHECK(chooses(b.queue, 0, fresh, ChoiceReason::FairShare));
  b.queue.push_preempted(low);
  b.queue.remove(low);  // may end while it waits
  CHECK(b.queue.num_preempted() == 0 && chooses(b.queue, 0, fresh, ChoiceReason::FairShare));
}

TEST(a_request_gains_a_class_for_each_full_aging_time) {
  Bench b(100);
  QueueEntry& low = b.push(2, 1, 0);
  QueueEntry& high = b.push(1, 1, 50);
  CHECK(chooses(b.queue, 99, high, ChoiceReason::FairShare));
  CHECK(chooses(b.queue, 100, high, ChoiceReason::FairShare));  // both of class 1 now: the lower class number wins
  CHECK(chooses(b.queue, 150, high, ChoiceReason::Aged));       // 1 against 0
  CHECK(chooses(b.queue, 200, high, ChoiceReason::Aged));       // 0 against 0
  b.queue.admit(high);
  QueueEntry& newest = b.push(0, 1, 299);
  CHECK(chooses(b.queue, 299, newest, ChoiceReason::FairShare));  // 0 against 0
  CHECK(chooses(b.queue, 300, low, ChoiceReason::Aged));          // -1 against 0
  CHECK(b.queue.oldest_wait(300) == 300);
  b.queue.admit(low);
  CHECK(b.queue.oldest_wait(300) == 1);
}

TEST(an_aged_request_is_chosen_whatever_its_tenant_had) {
  Bench b(100);
  b.run(0, 1, 5000);
  QueueEntry& greedy = b.push(0, 1, 10);
  QueueEntry& modest = b.push(0, 2, 11);
  b.run(0, 1, 5000);  // above the counter to which the second tenant was lifted
  CHECK(chooses(b.queue, 109, modest, ChoiceReason::FairShare));
  CHECK(chooses(b.queue, 110, greedy, ChoiceReason::Aged));
}

TEST(without_aging_lower_classes_wait) {
  Bench b(0);
  b.push(9, 1, 0);
  QueueEntry& high = b.push(0, 1, 1000000);
  CHECK(chooses(b.queue, std::numeric_limits<int64_t>::max(), high, ChoiceReason::FairShare));
}

TEST(time_that_runs_backwards_makes_nobody_older) {
  Bench b(100);
  b.push(0, 1, 500);
  QueueEntry& second = b.push(1, 1, 20);
  CHECK(second.arrival().time_ns == 500);
  CHECK(b.queue.oldest_wait(100) == 0);
  CHECK(b.queue.front(100).reason == ChoiceReason::FairShare);
}

TEST(two_tenants_alternate) {
  Bench b;
  for (const int32_t tenant : {7, 7, 7, 3, 3, 3}) b.push(0, tenant);
  for (const int64_t number : {0, 3, 1, 4, 2, 5}) CHECK(b.serve(10) == number);
}

TEST(one_request_passes_a_flood) {
  Bench b;
  for (int i = 0; i < 1000; ++i) b.push(0, 1);
  CHECK(b.serve(10) == 0);
  QueueEntry& only = b.push(0, 2);
  CHECK(b.serve(10) == 1);  // both at 10: the older request
  CHECK(chooses(b.queue, 0, only, ChoiceReason::FairShare));
}

TEST(staying_away_saves_nothing_up) {
  Bench b;
  QueueEntry& slow = b.run(0, 2, 1);  // goes on running, served little
  for (int i = 0; i < 4; ++i) b.push(0, 1);
  for (int i = 0; i < 3; ++i) b.serve(1000);
  CHECK(b.queue.counter(1) == 3001 && b.queue.counter(2) == 1);  // at its first push the floor was 1
  b.push(0, 2);
  b.push(0, 3);
  CHECK(b.queue.counter(2) == 3001 && b.queue.counter(3) == 3001);
  b.queue.remove(slow);
  // With nobody waiting, the last one that did is the measure.
  for (int i = 0; i < 3; ++i) b.serve(7);
  b.push(0, 4);
  CHECK(b.queue.counter(4) == 3008);
}

TEST(debts_are_kept_until_the_floor_has_reached_them) {
  Bench b;
  for (int i = 0; i < 10; ++i) b.push(0, 1);
  QueueEntry& big = b.run(0, 2, 25);
  b.queue.remove(big);
  CHECK(b.queue.counter(2) == 25);  // not active, above the floor
  QueueEntry& again = b.push(0, 2);
  CHECK(b.queue.counter(2) == 25);
  b.queue.remove(again);
  b.serve(24);
  b.push(0, 3);
  CHECK(b.queue.counter(2) == 25 && b.queue.counter(3) == 24);
  b.serve(10), b.serve(10);
  b.push(0, 4);  // the floor is 34 now
  CHECK(!b.queue.counter(2) && b.queue.num_tenants() == 3);
}

TEST(when_nobody_is_active_all_is_forgotten) {
  Bench b;
  QueueEntry& first = b.run(0, 1, 100);
  QueueEntry& second = b.run(0, 2, 500);
  b.queue.remove(second);
  b.queue.remove(first);
  CHECK(b.queue.num_tenants() == 0);
  b.push(0, 2);
  CHECK(b.queue.counter(2) == 0);
}

TEST(only_the_greatest_debts_are_kept) {
  Bench b;
  b.push(0, 0);  // keeps the floor at 0
  constexpr auto kMany = static_cast<int32_t>(WaitingQueue::kMaxDebtors) + 100;
  for (int32_t tenant = 1; tenant <= kMany; ++tenant) b.queue.remove(b.run(0, tenant, tenant));
  CHECK(b.queue.num_tenants() == WaitingQueue::kMaxDebtors + 1);
  CHECK(!b.queue.counter(100) && b.queue.counter(101) == 101 && b.queue.counter(kMany) == kMany);
}

TEST(an_entry_that_dies_leaves_its_queue) {
  WaitingQueue queue(0);
  QueueEntry stays;
  queue.push(stays, {0, 1, 3, 0});
  {
    QueueEntry waits, runs;
    queue.push(waits, {0, 2, 4, 0});
    queue.push(runs, {0, 3, 5, 0});
    queue.admit(runs);
  }
  CHECK(queue.size() == 1 && queue.num_running() == 0 && queue.num_tenants() == 1);
  queue.remove(stays);
  queue.push(stays, {4, 9, 6, 0});  // and may come again
  CHECK(stays.arrival().priority == 4 && chooses(queue, 0, stays, ChoiceReason::FairShare));
}

TEST(misuse_stops_the_process) {
  const auto dies = [](const char* text, auto body) {
    return aborts_with(text, [&] {
      WaitingQueue queue(5);
      QueueEntry entry;
      queue.push(entry, {1, 1, 1, 0});
      QueueEntry other;
      body(queue, entry, other);
    });
  };
  CHECK(dies("queued once", [](auto& queue, auto& entry, auto&) { queue.push(entry, {1, 1, 2, 0}); }));
  CHECK(dies("priority class", [](auto& queue, auto&, auto& other) { queue.push(other, {10, 1, 2, 0}); }));
  CHECK(dies("priority class", [](auto& queue, auto&, auto& other) { queue.push(other, {-1, 1, 2, 0}); }));
  CHECK(dies("0 or more", [](auto& queue, auto&, auto& other) { queue.push(other, {1, -1, 2, 0}); }));
  CHECK(dies("numbers rise", [](auto& queue, auto&, auto& other) { queue.push(other, {1, 1, 1, 0}); }));
  CHECK(dies("waits here", [](auto& queue, auto& entry, auto&) { queue.admit(entry), queue.admit(entry); }));
  CHECK(dies("waits here", [](auto& queue, auto&, auto& other) { queue.admit(other); }));
  CHECK(dies("runs is preempted", [](auto& queue, auto& entry, auto&) { queue.push_preempted(entry); }));
  CHECK(dies("is removed", [](auto& queue, auto& entry, auto&) { queue.remove(entry), queue.remove(entry); }));
  CHECK(dies("waits or runs", [](auto& queue, auto&, auto& other) { queue.charge(other, 1); }));
  CHECK(dies("not taken back", [](auto& queue, auto& entry, auto&) { queue.charge(entry, -1); }));
  CHECK(dies("waits here", [](auto&, auto& entry, auto&) { WaitingQueue(5).admit(entry); }));
  CHECK(aborts_with("outlive", [] {
    QueueEntry entry;
    WaitingQueue(5).push(entry, {0, 0, 0, 0});
  }));
  CHECK(aborts_with("negative", [] { WaitingQueue queue(-1); }));
}

TEST(only_push_allocates) {
  Bench b;
  constexpr int32_t kMany = 300;
  QueueEntry& rest = b.push(0, kMany);  // keeps the floor at 0, so that all others become debtors
  std::vector<QueueEntry*> entries;
  for (int32_t i = 0; i < kMany; ++i) entries.push_back(&b.push(i % kNumPriorities, i));
  const int64_t before = num_allocations;
  for (QueueEntry* entry : entries) b.queue.admit(*entry);
  for (QueueEntry* entry : entries) b.queue.charge(*entry, 10), b.queue.push_preempted(*entry);
  CHECK(b.queue.num_preempted() == kMany);
  for (QueueEntry* entry : entries) b.queue.remove(*entry);
  CHECK(b.queue.num_tenants() == kMany + 1 && b.queue.size() == 1);
  b.queue.remove(rest);
  CHECK(b.queue.num_tenants() == 0 && num_allocations == before);
}

TEST(a_push_without_memory_changes_nothing) {
  int64_t num_failed = 0;
  for (int64_t allowed = 0;; ++allowed) {
    WaitingQueue queue(0);
    QueueEntry entry;
    bool failed = false;
    num_left = allowed;
    try {
      queue.push(entry, {0, 1, 0, 0});
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    num_left = INT64_MAX;
    CHECK(entry.is_waiting() != failed && queue.size() == !failed && queue.num_tenants() == !failed);
    if (failed) queue.push(entry, {0, 1, 0, 0});
    CHECK(chooses(queue, 0, entry, ChoiceReason::FairShare));
    if (!failed) break;
    ++num_failed;
  }
  CHECK(num_failed >= 4);
}

TEST(a_steady_queue_does_not_allocate) {
  WaitingQueue queue(1000);
  std::vector<QueueEntry> entries(512);
  int64_t number = 0, allocated_before = 0;
  for (int round = 0; round < 4; ++round) {
    if (round == 2) allocated_before = num_allocations;
    for (QueueEntry& entry : entries) {
      if (entry.is_running()) queue.remove(entry);
      queue.push(entry, {static_cast<int32_t>(number % 3), static_cast<int32_t>(number % 16), number, number});
      ++number;
    }
    for (size_t i = 0; i < entries.size(); ++i) {
      QueueEntry& next = *queue.front(number).entry;
      queue.admit(next);
      queue.charge(next, static_cast<int64_t>(i % 7));
      if (i % 5 == 0) queue.push_preempted(next);
    }
    while (!queue.empty()) queue.admit(*queue.front(number).entry);
  }
  CHECK(num_allocations == allocated_before);
}

TEST(random_use_agrees_with_the_model) {
  struct Shape {
    int64_t aging_ns, num_tenants;
    size_t crowd;
    int num_steps;
  };
  int64_t num_idle = 0, num_aged = 0, num_fair = 0, num_preempted = 0;
  uint64_t seed = 1;
  for (const Shape& shape : {Shape{0, 4, 30, 60000}, Shape{40, 3, 12, 60000}, Shape{300, 12, 60, 60000},
                             Shape{60, 40, 80, 20000}, Shape{3, 2, 6, 40000}}) {
    Pair pair(++seed, shape.aging_ns, shape.num_tenants, shape.crowd);
    for (int step = 0; step < shape.num_steps; ++step) {
      pair.step();
      if (pair.agree()) continue;
      std::printf("aging %d, step %d\n", static_cast<int>(shape.aging_ns), step);
      CHECK(!"queue and model agree");
      break;
    }
    num_idle += pair.num_idle;
    num_aged += pair.num_chosen(ChoiceReason::Aged);
    num_fair += pair.num_chosen(ChoiceReason::FairShare);
    num_preempted += pair.num_chosen(ChoiceReason::Preempted);
  }
  CHECK(num_idle > 100 && num_aged > 1000 && num_fair > 1000 && num_preempted > 1000);
}

TEST(nobody_who_comes_too_late_is_chosen_before) {
  // Twice as many arrive as are admitted, of all classes or of the first alone; of all that still wait when one is
  // chosen, none came (its class + 1) * aging or more before that one.
  for (const int64_t lowest : {0, 2, kNumPriorities - 1}) {
    constexpr int64_t kAging = 64;
    Random random(static_cast<uint64_t>(lowest) + 1);
    Bench b(kAging);
    std::map<int64_t, QueueEntry*> waiting;
    bool holds = true;
    int64_t num_passed = 0, num_old = 0;  // times that one was passed by a younger one; chosen for their age
    for (int64_t now = 0; now < 3000; ++now) {
      for (int i = 0; i < 2 && waiting.size() < 600; ++i) {
        const int64_t priority = draw(random, 0, 99) == 0 ? kNumPriorities - 1 : draw(random, 0, lowest);
        QueueEntry& entry = b.push(static_cast<int32_t>(priority), static_cast<int32_t>(draw(random, 0, 5)), now);
        waiting[entry.arrival().number] = &entry;
      }
      num_old += b.queue.front(now).reason == ChoiceReason::Aged;
      const int64_t number = b.serve(draw(random, 1, 50), now);
      const int64_t came = waiting.at(number)->arrival().time_ns;
      waiting.erase(number);
      for (const auto& [other, entry] : waiting) {
        holds &= came < entry->arrival().time_ns + (entry->arrival().priority + 1) * kAging;
        num_passed += other < number;
      }
    }
    CHECK(holds && num_passed > 100 && num_old > 100);
  }
}

TEST(the_bound_of_waiting_is_met) {
  for (int32_t priority = 0; priority < kNumPriorities; ++priority) {
    constexpr int64_t kAging = 50;
    const int64_t bound = (priority + 1) * kAging;
    Bench b(kAging);
    // Its class, and in class 0 its tenant's debt, puts it behind one that comes just before the bound.
    if (priority == 0) b.push(9, 3);  // keeps the floor at 0
    b.run(0, 1, 100);
    QueueEntry& waits = b.push(priority, 1, 0);
    QueueEntry& passes = b.push(0, 2, bound - 1);
    CHECK(chooses(b.queue, bound - 1, passes, ChoiceReason::FairShare));
    b.queue.remove(passes);
    b.push(0, 2, bound);
    CHECK(chooses(b.queue, bound, waits, ChoiceReason::Aged));
  }
}

TEST(an_old_request_is_admitted_in_a_stream_of_the_first_class) {
  constexpr int64_t kAging = 100;
  for (int32_t priority = 0; priority < kNumPriorities; ++priority) {
    Bench b(kAging);
    QueueEntry& low = b.push(priority, 1, 0);
    b.queue.charge(low, 1000000);
    int64_t now = 0;
    for (; low.is_waiting() && now < 100000; ++now) {  // one comes and one is admitted at each point of time
      b.push(0, 2, now);
      b.serve(1, now);
    }
    CHECK(now <= (priority + 1) * kAging + 1);
    CHECK(now >= priority * kAging);
  }
}

TEST(tenants_that_keep_waiting_are_served_alike) {
  for (const int32_t num_tenants : {2, 50}) {
    Random random(static_cast<uint64_t>(num_tenants));
    Bench b;
    constexpr int64_t kMost = 1000;
    std::vector<int64_t> served(static_cast<size_t>(num_tenants)), num_requests(served.size());
    for (int32_t tenant = 0; tenant < num_tenants; ++tenant) b.push(0, tenant), b.push(0, tenant);
    int64_t widest = 0;
    for (int i = 0; i < 20000; ++i) {
      QueueEntry& entry = *b.queue.front(0).entry;
      const int32_t tenant = entry.arrival().tenant;
      // Tenants differ in the size of their requests: the last ones have up to a thousand tokens, the first few.
      const int64_t num_tokens = draw(random, 1, std::max<int64_t>(1, kMost * (tenant + 1) / num_tenants));
      b.queue.admit(entry);
      b.queue.charge(entry, num_tokens);
      served[static_cast<size_t>(tenant)] += num_tokens;
      ++num_requests[static_cast<size_t>(tenant)];
      b.queue.remove(entry);
      b.push(0, tenant);
      const auto [least, most] = std::minmax_element(served.begin(), served.end());
      widest = std::max(widest, *most - *least);
    }
    CHECK(widest <= kMost && widest > 0);
    CHECK(num_requests.front() > num_requests.back());  // shares are of tokens, not of requests
  }
}

TEST(requests_that_draw_for_long_are_shared_alike) {
  // Eight run at once, each charged token by token. One tenant is ahead of the other by at most what is charged for
  // its requests that ran after its last admission.
  constexpr int64_t kSlots = 8, kMost = 200;
  Random random(5);
  Bench b;
  std::vector<std::pair<QueueEntry*, int64_t>> running;  // and how many tokens are left to draw
  std::array<int64_t, 2> served{};
  for (int i = 0; i < 20; ++i) b.push(0, i % 2);
  int64_t widest = 0;
  for (int step = 0; step < 20000; ++step) {
    while (running.size() < kSlots) {
      QueueEntry& entry = *b.queue.front(0).entry;
      b.queue.admit(entry);
      running.emplace_back(&entry, entry.arrival().tenant == 0 ? kMost : draw(random, 1, 20));
      b.push(0, entry.arrival().tenant);
    }
    for (auto& [entry, left] : running) {
      b.queue.charge(*entry, 1);
      ++served[static_cast<size_t>(entry->arrival().tenant)];
      if (--left == 0) b.queue.remove(*entry);
    }
    std::erase_if(running, [](const auto& r) { return r.second == 0; });
    widest = std::max(widest, std::abs(served[0] - served[1]));
  }
  CHECK(served[0] + served[1] > 100000);
  CHECK(widest <= kSlots * kMost);
}

TEST(one_request_at_a_time_escapes_no_debt) {
  // One tenant has large requests, one after the other; the other keeps many small ones waiting.
  Bench b;
  for (int i = 0; i < 10; ++i) b.push(0, 1);
  QueueEntry* large = nullptr;
  std::array<int64_t, 2> served{};
  for (int i = 0; i < 5000; ++i) {
    if (large == nullptr) large = &b.push(0, 2);
    QueueEntry& entry = *b.queue.front(0).entry;
    const int64_t num_tokens = &entry == large ? 1000 : 10;
    b.queue.admit(entry);
    b.queue.charge(entry, num_tokens);
    served[&entry == large] += num_tokens;
    b.queue.remove(entry);
    if (&entry == large) large = nullptr;
    else b.push(0, 1);
  }
  CHECK(std::abs(served[0] - served[1]) <= 1000 && served[1] > 10000);
}

TEST_MAIN
