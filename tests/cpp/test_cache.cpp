// Pages and slots: who owns them, in which order they come, and that none is lost or given twice.
#include "cache/page_pool.h"
#include "cache/slot_pool.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <type_traits>
#include <vector>

#include "death.h"
#include "test.h"

using tokenspeed::cache::PageLease;
using tokenspeed::cache::PagePool;
using tokenspeed::cache::SlotLease;
using tokenspeed::cache::SlotPool;
using tokenspeed::testing::aborts_with;

template <class Lease>
constexpr bool is_sole_owner = !std::is_copy_constructible_v<Lease> && !std::is_copy_assignable_v<Lease> &&
                               std::is_nothrow_move_constructible_v<Lease> &&
                               std::is_nothrow_move_assignable_v<Lease> && std::is_nothrow_destructible_v<Lease>;
static_assert(is_sole_owner<PageLease>);
static_assert(is_sole_owner<SlotLease> && !std::is_default_constructible_v<SlotLease>);
static_assert(!std::is_constructible_v<SlotLease, SlotPool*, int32_t>, "only the pool makes leases");
static_assert(!std::is_constructible_v<PageLease, PagePool*, int32_t, int32_t, int32_t>);
static_assert(!std::is_move_constructible_v<PagePool> && !std::is_copy_constructible_v<PagePool>);
static_assert(!std::is_move_constructible_v<SlotPool> && !std::is_copy_constructible_v<SlotPool>);
static_assert(noexcept(std::declval<PagePool&>().acquire(1)) && noexcept(std::declval<SlotPool&>().acquire()));
static_assert(noexcept(std::declval<PageLease&>().absorb(std::declval<PageLease>())));
static_assert(std::forward_iterator<PageLease::Iterator>);

namespace {

std::vector<int32_t> pages_of(const PageLease& lease) { return {lease.begin(), lease.end()}; }

}  // namespace

TEST(a_lease_gives_its_pages_back) {
  PagePool pool(4);
  {
    const auto lease = pool.acquire(3);
    CHECK(lease && lease->num_pages() == 3 && pool.num_free() == 1);
    CHECK((pages_of(*lease) == std::vector<int32_t>{0, 1, 2}));
  }
  CHECK(pool.num_free() == 4);
}

TEST(all_pages_or_none) {
  PagePool pool(4);
  auto lease = pool.acquire(3);
  CHECK(!pool.acquire(2) && pool.num_free() == 1);
  auto rest = pool.acquire(1);
  CHECK(rest && pages_of(*rest) == std::vector<int32_t>{3});
  CHECK(!pool.acquire(1));
  auto none = pool.acquire(0);
  CHECK(none && none->num_pages() == 0 && none->begin() == none->end());
}

TEST(the_page_freed_last_comes_first) {
  PagePool pool(8);
  auto a = pool.acquire(2);
  auto b = pool.acquire(3);
  a.reset();
  b.reset();
  const auto c = pool.acquire(6);
  CHECK((pages_of(*c) == std::vector<int32_t>{2, 3, 4, 0, 1, 5}));
}

TEST(absorbed_pages_stand_behind) {
  PagePool pool(6);
  auto a = pool.acquire(2);
  auto b = pool.acquire(1);
  auto c = pool.acquire(2);
  a->absorb(std::move(*c));
  a->absorb(std::move(*b));
  CHECK((pages_of(*a) == std::vector<int32_t>{0, 1, 3, 4, 2}));
  CHECK(b->num_pages() == 0 && c->num_pages() == 0);
  b.reset();
  c.reset();
  CHECK(pool.num_free() == 1);
  a.reset();
  CHECK(pool.num_free() == 6);
}

TEST(an_empty_lease_absorbs_and_is_absorbed) {
  PagePool pool(3);
  auto empty = pool.acquire(0);
  auto two = pool.acquire(2);
  auto also_empty = pool.acquire(0);
  empty->absorb(std::move(*two));
  empty->absorb(std::move(*also_empty));
  CHECK((pages_of(*empty) == std::vector<int32_t>{0, 1}));
  empty.reset();
  CHECK(pool.num_free() == 3);
}

TEST(moving_a_lease_moves_the_pages) {
  PagePool pool(3);
  auto a = pool.acquire(2);
  PageLease b = std::move(*a);
  CHECK(a->num_pages() == 0 && b.num_pages() == 2);
  a.reset();
  CHECK(pool.num_free() == 1);
  auto c = pool.acquire(1);
  b = std::move(*c);  // frees what b held
  CHECK(b.num_pages() == 1 && pool.num_free() == 2);
  PageLease& same = b;
  b = std::move(same);
  CHECK(b.num_pages() == 1 && pool.num_free() == 2);
}

TEST(random_use_conserves_pages) {
  PagePool pool(50);
  std::mt19937 random(3);
  std::vector<PageLease> leases;
  for (int i = 0; i < 5000; ++i) {
    const auto pick = random() % 3;
    if (pick == 0 || leases.empty()) {
      if (auto lease = pool.acquire(static_cast<int32_t>(random() % 8))) leases.push_back(std::move(*lease));
    } else if (pick == 1) {
      leases.erase(leases.begin() + static_cast<int64_t>(random() % leases.size()));
    } else {
      PageLease last = std::move(leases.back());
      leases.pop_back();
      if (!leases.empty()) leases[random() % leases.size()].absorb(std::move(last));
    }
    std::set<int32_t> seen;
    int32_t held = 0;
    for (const PageLease& lease : leases) {
      for (const int32_t page : lease) CHECK(page >= 0 && page < 50 && seen.insert(page).second);
      held += lease.num_pages();
    }
    CHECK(held == static_cast<int32_t>(seen.size()) && held + pool.num_free() == 50);
  }
}

TEST(slots_are_unique_and_come_back) {
  SlotPool pool(2);
  auto a = pool.acquire();
  auto b = pool.acquire();
  CHECK(a && b && a->slot() == 0 && b->slot() == 1 && !pool.acquire());
  SlotLease moved = std::move(*a);
  a.reset();
  CHECK(pool.num_free() == 0 && moved.slot() == 0);
  moved = std::move(*b);
  CHECK(pool.num_free() == 1 && moved.slot() == 1);
  CHECK(pool.acquire()->slot() == 0);
}

TEST(our_bugs_abort_with_a_text) {
  CHECK(aborts_with("a page pool must outlive its leases", [] {
    auto* pool = new PagePool(2);
    [[maybe_unused]] auto lease = pool->acquire(1);
    delete pool;
  }));
  CHECK(aborts_with("leases joined must be of one pool", [] {
    PagePool one(2), other(2);
    auto a = one.acquire(1);
    auto b = other.acquire(1);
    a->absorb(std::move(*b));
  }));
  CHECK(aborts_with("a slot lease was used after it moved away", [] {
    SlotPool pool(1);
    auto a = pool.acquire();
    [[maybe_unused]] SlotLease b = std::move(*a);
    [[maybe_unused]] const int32_t slot = a->slot();
  }));
  CHECK(aborts_with("cannot acquire a negative number of pages", [] {
    PagePool pool(1);
    [[maybe_unused]] auto lease = pool.acquire(-1);
  }));
}

TEST_MAIN
