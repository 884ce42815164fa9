// The prefix index rule by rule; test_prefix_model.cpp has them all at once.
#include "cache/prefix_index.h"

#include <memory>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "death.h"
#include "test.h"

using namespace tokenspeed::cache;
using tokenspeed::testing::aborts_with;

static_assert(!std::is_copy_constructible_v<PrefixRef> && !std::is_copy_assignable_v<PrefixRef>);
static_assert(std::is_nothrow_move_constructible_v<PrefixRef> && std::is_nothrow_move_assignable_v<PrefixRef>);
static_assert(std::is_nothrow_default_constructible_v<PrefixRef> && std::is_nothrow_destructible_v<PrefixRef>);
static_assert(!std::is_constructible_v<PrefixRef, PrefixIndex*, int32_t, int32_t>, "only the index makes refs");
static_assert(!std::is_move_constructible_v<PrefixIndex> && !std::is_copy_constructible_v<PrefixIndex>);
static_assert(noexcept(std::declval<PagePool&>().detach(std::declval<PageLease>())));
static_assert(noexcept(std::declval<PagePool&>().attach(0)) && noexcept(std::declval<PageLease&>().take_front()));

namespace {

using Tokens = std::vector<int32_t>;

// An index with pages of two tokens.
struct Cache {
  explicit Cache(int32_t num_pages, int32_t num_host_pages = 0, bool record_events = false)
      : pool(num_pages), index(pool, {.page_size = 2, .num_host_pages = num_host_pages, .salt = "digest",
                                      .record_events = record_events}) {}

  int32_t cached(const Tokens& tokens, const std::string& key = "") {
    return index.find(key, tokens, INT32_MAX).num_pages;
  }
  int32_t on_host(const Tokens& tokens) { return index.find("", tokens, INT32_MAX).num_host_pages; }
  PrefixRef take(const Tokens& tokens, const std::string& key = "") {
    return std::move(*index.take(key, index.find(key, tokens, INT32_MAX)));
  }
  // Publishes what of the tokens is not cached yet.
  PrefixRef store(const Tokens& tokens, const std::string& key = "") {
    PrefixRef ref = take(tokens, key);
    for (auto at = static_cast<size_t>(2 * ref.num_pages()); at + 2 <= tokens.size(); at += 2) {
      CHECK(index.make_room(1));
      index.publish(ref, std::span(tokens).subspan(at, 2), std::move(*pool.acquire(1)));
    }
    return ref;
  }
  Tokens row(const PrefixRef& ref) {
    Tokens row(static_cast<size_t>(ref.num_pages()));
    index.copy_pages(ref, row);
    return row;
  }
  void evict(int32_t count) { CHECK(index.make_room(pool.num_free() + count)); }
  void copies() { index.take_copies(out, in); }

  PagePool pool;
  PrefixIndex index;
  std::vector<PageCopy> out, in;
};

}  // namespace

TEST(a_page_can_outlive_its_lease_and_is_attached_once) {
  PagePool pool(3);
  PageLease lease = std::move(*pool.acquire(3));
  PageLease first = lease.take_front();
  CHECK(first.front() == 0 && first.num_pages() == 1 && lease.front() == 1 && lease.num_pages() == 2);
  const int32_t page = pool.detach(std::move(first));
  CHECK(page == 0 && first.num_pages() == 0 && pool.num_free() == 0);
  static_cast<void>(pool.attach(page));
  CHECK(pool.num_free() == 1);
  PageLease second = lease.take_front(), third = lease.take_front();
  CHECK(lease.num_pages() == 0 && lease.begin() == lease.end() && second.front() == 1 && third.front() == 2);
  lease.absorb(std::move(second));  // it is still a lease of the pool
  CHECK(lease.front() == 1);
}

TEST(whole_pages_are_found_as_far_as_they_agree) {
  Cache c(8);
  c.store({1, 2, 3, 4, 5, 6});
  CHECK(c.cached({1, 2, 3, 4, 5, 6}) == 3 && c.cached({1, 2, 3, 4, 5, 6, 7, 8}) == 3);
  CHECK(c.cached({1, 2, 3, 4, 5}) == 2 && c.cached({1, 2, 3, 9, 5, 6}) == 1 && c.cached({1}) == 0);
  CHECK(c.cached({3, 4}) == 0 && c.cached({}) == 0);  // a page is found below its own parent alone
  CHECK(c.index.find("", Tokens{1, 2, 3, 4}, 1).num_pages == 1 && c.index.find("", Tokens{1, 2}, 0).num_pages == 0);
}

TEST(long_paths_are_found_up_to_any_page) {
  Cache c(300);
  Tokens tokens(400);
  std::iota(tokens.begin(), tokens.end(), 0);
  const PrefixRef ref = c.store(tokens);
  for (int32_t limit = 0; limit <= 200; ++limit) CHECK(c.index.find("", tokens, limit).num_pages == limit);
  for (size_t wrong = 0; wrong < tokens.size(); ++wrong) {
    Tokens other = tokens;
    other[wrong] = -1;
    CHECK(c.cached(other) == static_cast<int32_t>(wrong / 2));
  }
}

TEST(namespaces_share_nothing_and_go_when_empty) {
  Cache c(4);
  CHECK(c.cached({1, 2}, "lora") == 0 && c.index.num_namespaces() == 0);  // looking makes none
  c.store({1, 2}, "lora");
  CHECK(c.cached({1, 2}, "lora") == 1 && c.cached({1, 2}) == 0 && c.index.num_namespaces() == 1);
  {
    const PrefixRef ref = c.take({1, 2});
    CHECK(ref && ref.num_pages() == 0 && c.index.num_namespaces() == 2);
  }
  CHECK(c.index.num_namespaces() == 1);
  c.evict(1);
  CHECK(c.index.num_namespaces() == 0 && c.pool.num_free() == 4);
  c.store({1, 2}, "another");  // in the place of the first
  CHECK(c.cached({1, 2}, "another") == 1 && c.cached({1, 2}, "lora") == 0);
}

TEST(a_page_that_is_cached_already_comes_back) {
  Cache c(4);
  PrefixRef one = c.take({}), two = c.take({});
  const auto kept = c.index.publish(one, Tokens{1, 2}, std::move(*c.pool.acquire(1)));
  CHECK(kept.page == 0 && !kept.duplicate);
  {
    const auto again = c.index.publish(two, Tokens{1, 2}, std::move(*c.pool.acquire(1)));
    CHECK(again.page == 0 && again.duplicate && again.duplicate->front() == 1 && c.pool.num_free() == 2);
  }
  CHECK(c.pool.num_free() == 3 && c.row(two) == Tokens{0} && c.index.num_nodes() == 1);
}

TEST(the_least_recently_used_leaf_goes_first) {
  Cache c(8);
  c.store({0, 0, 1, 1});
  c.store({0, 0, 2, 2});
  c.store({9, 9});
  c.take({0, 0, 1, 1});  // used again
  c.evict(1);
  CHECK(c.cached({0, 0, 2, 2}) == 1);
  c.evict(1);
  CHECK(c.cached({9, 9}) == 0 && c.cached({0, 0, 1, 1}) == 2);
  c.evict(1);
  CHECK(c.cached({0, 0, 1, 1}) == 1);  // leaves before parents
  c.evict(1);
  CHECK(c.index.num_nodes() == 0 && c.pool.num_free() == 8);
}

TEST(a_parent_used_after_its_children_waits_for_its_turn) {
  Cache c(8);
  c.store({0, 0, 1, 1});
  c.store({2, 2});
  c.store({3, 3});
  c.take({0, 0});
  c.store({4, 4});
  c.evict(1);
  CHECK(c.cached({0, 0, 1, 1}) == 1);
  c.evict(2);
  CHECK(c.cached({2, 2}) == 0 && c.cached({3, 3}) == 0 && c.cached({0, 0}) == 1);
  c.evict(1);
  CHECK(c.cached({0, 0}) == 0 && c.cached({4, 4}) == 1);
}

TEST(what_a_ref_keeps_is_not_evicted) {
  Cache c(4);
  PrefixRef ref = c.store({1, 1, 2, 2});
  c.store({1, 1, 3, 3});
  CHECK(c.index.num_evictable() == 1 && c.index.num_available() == 2);
  CHECK(!c.index.make_room(3) && c.cached({1, 1, 3, 3}) == 2);  // and nothing goes in vain
  CHECK(c.index.make_room(2) && c.cached({1, 1, 3, 3}) == 1 && c.cached({1, 1, 2, 2}) == 2);
  PrefixRef same = c.take({1, 1});
  ref = std::move(same);  // lets the first go
  CHECK(c.index.num_evictable() == 1 && ref.num_pages() == 1);
  ref = PrefixRef{};
  CHECK(c.index.num_evictable() == 2 && !ref && !ref.is_stale());
}

TEST(a_take_says_beforehand_what_it_leaves) {
  Cache c(4, 4);
  c.store({1, 1, 2, 2});
  c.evict(2);
  c.copies();
  const PrefixRef other = c.store({5, 5, 6, 6, 7, 7});
  const auto found = c.index.find("", Tokens{1, 1, 2, 2}, 9);
  CHECK(found.num_pages == 2 && found.num_host_pages == 2 && c.index.num_available_after(found) == -1);
  CHECK(!c.index.take("", found) && c.index.find("", Tokens{1, 1, 2, 2}, 9).num_host_pages == 2);
  const auto half = c.index.find("", Tokens{1, 1, 2, 2}, 1);
  CHECK(c.index.num_available_after(half) == 0 && c.index.take("", half).has_value());
}

TEST(evicted_pages_move_to_the_host_and_back) {
  Cache c(2, 4);
  c.store({1, 1, 2, 2});
  c.evict(2);
  c.copies();
  CHECK(c.out.size() == 2 && c.in.empty() && c.out[0].device_page == 1 && c.out[1].device_page == 0);
  CHECK(c.cached({1, 1, 2, 2}) == 2 && c.on_host({1, 1, 2, 2}) == 2 && c.index.num_host_pages_used() == 2);
  {
    const PrefixRef ref = c.take({1, 1, 2, 2});
    const Tokens row = c.row(ref);
    const std::vector<PageCopy> first_out = c.out;
    c.copies();
    CHECK(c.out.empty() && c.in.size() == 2 && c.index.num_evictable() == 0);
    CHECK(c.in[0] == (PageCopy{row[0], first_out[1].host_page, first_out[1].node}));
    CHECK(c.in[1] == (PageCopy{row[1], first_out[0].host_page, first_out[0].node}));
  }
  c.evict(2);  // both are on the host still
  c.copies();
  CHECK(c.out.empty() && c.on_host({1, 1, 2, 2}) == 2);
}

TEST(a_page_computed_anew_replaces_the_one_on_the_host) {
  Cache c(2, 2);
  c.store({1, 1});
  c.evict(1);
  PrefixRef ref = c.take({});
  CHECK(!c.index.publish(ref, Tokens{1, 1}, std::move(*c.pool.acquire(1))).duplicate);
  CHECK(c.on_host({1, 1}) == 0 && c.index.num_host_pages_used() == 1 && c.index.num_nodes() == 1);
  ref = PrefixRef{};
  c.evict(1);
  c.copies();
  CHECK(c.out.size() == 1 && c.on_host({1, 1}) == 1);  // copied once, when it first left
}

TEST(a_full_host_gives_up_copies_first_then_its_oldest_leaf) {
  Cache c(3, 2);
  c.store({1, 1});
  c.store({2, 2});
  c.evict(2);
  c.copies();
  PrefixRef one = c.take({1, 1});
  c.copies();
  c.store({3, 3});
  c.evict(1);  // takes the host page of {1, 1}, which is on the device
  CHECK(c.cached({1, 1}) == 1 && c.on_host({1, 1}) == 0 && c.cached({2, 2}) == 1 && c.on_host({3, 3}) == 1);
  c.store({4, 4});
  c.evict(1);
  CHECK(c.cached({2, 2}) == 0 && c.on_host({3, 3}) == 1 && c.on_host({4, 4}) == 1);
}

TEST(without_a_host_page_what_is_below_goes_too) {
  Cache c(3, 1);
  c.store({1, 1, 2, 2});
  c.evict(1);
  c.copies();
  PrefixRef restored = c.take({1, 1, 2, 2});  // its host page is being read, so none can be had
  PrefixRef other = c.store({5, 5});
  other = PrefixRef{};
  c.evict(1);
  CHECK(c.cached({5, 5}) == 0 && c.cached({1, 1, 2, 2}) == 2);
  c.copies();
  CHECK(c.out.empty() && c.in.size() == 1);
  c.store({5, 5});
  c.evict(1);  // read by now
  CHECK(c.on_host({5, 5}) == 1);
  restored = PrefixRef{};
  c.evict(2);  // first {2, 2} takes the host page, then its parent takes it from {2, 2}
  CHECK(c.cached({5, 5}) == 0 && c.cached({1, 1, 2, 2}) == 1 && c.on_host({1, 1}) == 1);
}

TEST(copies_for_nothing_are_dropped) {
  Cache c(2, 1);
  c.store({1, 1});
  c.evict(1);
  c.store({2, 2});
  c.evict(1);
  c.copies();
  CHECK(c.out.size() == 1 && c.cached({1, 1}) == 0);  // the first left the host before it came there
  { const PrefixRef ref = c.take({2, 2}); }
  c.evict(1);
  c.copies();
  CHECK(c.in.empty() && c.out.empty() && c.on_host({2, 2}) == 1);
  const PrefixRef ref = c.take({2, 2});
  c.copies();
  CHECK(c.in.size() == 1);
}

TEST(dropping_a_copy_keeps_track_of_the_others) {
  Cache c(4, 4);
  c.store({1, 1});
  c.store({2, 2});
  c.store({3, 3});
  c.evict(3);
  c.copies();
  PrefixRef one = c.take({1, 1}), two = c.take({2, 2}), three = c.take({3, 3});
  const Tokens left = c.row(two);
  one = PrefixRef{};
  three = PrefixRef{};
  c.evict(1);  // {1, 1}: the copy of {3, 3} takes its place in the list
  c.evict(1);
  c.copies();
  CHECK(c.in.size() == 1 && c.in[0].device_page == left[0]);
}

TEST(nothing_older_than_a_flush_is_found) {
  Cache c(4, 2);
  PrefixRef kept = c.store({1, 1, 2, 2});
  c.store({1, 1, 3, 3});
  c.index.flush();
  CHECK(kept.is_stale() && !kept.is_broken() && c.cached({1, 1}) == 0 && c.index.weight_version() == 1);
  CHECK(c.pool.num_free() == 2 && c.index.num_nodes() == 2 && c.row(kept) == (Tokens{0, 1}));
  PrefixRef fresh = c.store({1, 1});
  CHECK(!fresh.is_stale() && c.cached({1, 1, 2, 2}) == 1 && c.index.num_namespaces() == 2);
  CHECK(!c.index.make_room(2));  // stale pages that are kept cannot be evicted
  kept = PrefixRef{};
  CHECK(c.pool.num_free() == 3 && c.index.num_namespaces() == 1 && c.cached({1, 1}) == 1);
}

TEST(a_flush_lets_copies_in_for_refs_run) {
  Cache c(2, 2);
  c.store({1, 1});
  c.evict(1);
  c.copies();
  PrefixRef ref = c.take({1, 1});
  c.index.flush();
  CHECK(ref.is_stale() && !ref.is_broken() && c.index.num_host_pages_used() == 1);
  c.copies();
  CHECK(c.in.size() == 1 && c.in[0].device_page == c.row(ref)[0] && c.index.num_host_pages_used() == 0);
}

TEST(failed_copies_take_all_below_along) {
  Cache c(6, 4);
  c.store({1, 1, 2, 2, 3, 3});
  c.evict(3);
  c.copies();
  const NodeId second = c.out[1].node;
  PrefixRef first = c.take({1, 1});
  PrefixRef all = c.take({1, 1, 2, 2, 3, 3});
  c.copies();
  c.index.invalidate(std::vector<NodeId>{second});
  CHECK(all.is_broken() && all.is_stale() && !first.is_stale() && c.cached({1, 1, 2, 2}) == 1);
  CHECK(c.index.num_device_pages() == 3 && c.index.num_host_pages_used() == 1);
  PrefixRef anew = c.store({1, 1, 2, 2});
  c.index.invalidate(std::vector<NodeId>{second});
  all = PrefixRef{};
  c.index.invalidate(std::vector<NodeId>{second, kNoNode});  // its node is gone, or serves another page
  CHECK(!anew.is_stale() && c.cached({1, 1, 2, 2, 3, 3}) == 2 && c.index.num_device_pages() == 2);
  CHECK(c.index.num_available() == 4);
}

TEST(the_host_tier_can_be_dropped) {
  Cache c(6, 4);
  c.store({1, 1, 2, 2});
  c.store({7, 7});
  c.evict(3);
  c.copies();
  PrefixRef first = c.take({1, 1});
  c.copies();
  PrefixRef waiting = c.take({7, 7});  // its copy is not taken yet
  c.index.drop_host_tier();
  CHECK(c.cached({1, 1, 2, 2}) == 1 && c.on_host({1, 1}) == 0 && !first.is_stale());
  CHECK(waiting.is_broken() && c.cached({7, 7}) == 0 && c.index.num_host_pages_used() == 0);
  c.copies();
  CHECK(c.in.empty() && c.out.empty());
  first = PrefixRef{};
  waiting = PrefixRef{};
  c.evict(1);
  c.copies();
  CHECK(c.out.empty() && c.index.num_nodes() == 0 && !c.index.has_host_tier());
}

TEST(events_tell_what_can_be_hit) {
  using Kind = PrefixEvent::Kind;
  Cache c(3, 1, true);
  std::vector<PrefixEvent> events;
  c.store({1, 1, 2, 2}, "key");
  c.index.take_events(events);
  CHECK(events.size() == 2 && events[0].kind == Kind::Stored && events[1].kind == Kind::Stored);
  CHECK(!events[0].parent_hash && events[1].parent_hash == events[0].hash && events[0].hash != events[1].hash);
  CHECK(events[1].key == "key" && events[1].tokens == (Tokens{2, 2}));
  const uint64_t parent = events[0].hash, child = events[1].hash;
  c.evict(1);
  c.index.take_events(events);
  CHECK(events.empty());  // the host has it
  c.evict(1);
  c.index.take_events(events);
  CHECK(events.size() == 1 && events[0].kind == Kind::Removed && events[0].hash == child);
  c.store({3, 3}, "key");
  c.index.flush();
  c.store({1, 1}, "key");
  c.index.take_events(events);
  CHECK(events.size() == 2 && events[0].kind == Kind::Cleared && events[1].kind == Kind::Stored);
  CHECK(events[1].hash != parent);  // other weights, other hash
  const uint64_t hash = events[1].hash;
  c.store({1, 1}, "other key");
  c.index.take_events(events);
  CHECK(events.size() == 1 && events[0].hash != hash);
}

TEST(hashes_name_the_artifact) {
  std::vector<uint64_t> hashes;
  for (const char* salt : {"digest", "digest", "other"}) {
    PagePool pool(1);
    PrefixIndex index(pool, {.page_size = 1, .salt = salt, .record_events = true});
    PrefixRef ref = std::move(*index.take("", index.find("", {}, 0)));
    index.publish(ref, Tokens{5}, std::move(*pool.acquire(1)));
    std::vector<PrefixEvent> events;
    index.take_events(events);
    hashes.push_back(events.at(0).hash);
  }
  CHECK(hashes[0] == hashes[1] && hashes[0] != hashes[2]);
}

TEST(our_bugs_abort_with_a_text) {
  CHECK(aborts_with("only a detached page can be attached", [] {
    PagePool pool(2);
    const int32_t page = pool.detach(std::move(*pool.acquire(1)));
    PageLease once = pool.attach(page);
    PageLease twice = pool.attach(page);
  }));
  CHECK(aborts_with("one page of this pool can be detached at a time", [] {
    PagePool pool(2);
    static_cast<void>(pool.detach(std::move(*pool.acquire(2))));
  }));
  CHECK(aborts_with("an empty lease has no first page", [] {
    PagePool pool(2);
    PageLease none = std::move(*pool.acquire(0));
    static_cast<void>(none.take_front());
  }));
  CHECK(aborts_with("a prefix index must outlive its refs", [] {
    PagePool pool(2);
    auto index = std::make_unique<PrefixIndex>(pool, PrefixConfig{.page_size = 2});
    const auto ref = index->take("", {});
    index.reset();
  }));
  CHECK(aborts_with("a path must be taken before the prefix index changes", [] {
    Cache c(2);
    const auto found = c.index.find("", Tokens{1, 1}, 9);
    c.store({1, 1});
    static_cast<void>(c.index.take("", found));
  }));
  CHECK(aborts_with("behind a ref of this index that is not stale", [] {
    Cache c(2);
    PrefixRef ref = c.take({});
    c.index.flush();
    c.index.publish(ref, Tokens{1, 1}, std::move(*c.pool.acquire(1)));
  }));
  CHECK(aborts_with("pages are published whole", [] {
    Cache c(2);
    PrefixRef ref = c.take({});
    c.index.publish(ref, Tokens{1}, std::move(*c.pool.acquire(1)));
  }));
}

TEST_MAIN
