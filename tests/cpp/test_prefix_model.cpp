// Random use of the prefix index beside its model, with the memory of a device and a host that copies and kernels act
// on: after every operation both agree on what is cached where, and no ref ever sees a page with wrong contents.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cache/prefix_hash.h"
#include "cache/prefix_index.h"
#include "prefix_model.h"
#include "test.h"

using namespace tokenspeed::cache;
using tokenspeed::testing::ModelNode;
using tokenspeed::testing::Page;
using tokenspeed::testing::PrefixModel;

namespace {

constexpr int kPageSize = 2;
constexpr int kGarbage = -1;

struct Size {
  int num_device_pages, num_host_pages, num_requests;
  bool fails, records_events;
  uint64_t hash_mask;
};

// A sequence in work: pages of the index, then pages of its own, the first num_written of which hold their tokens.
struct Request {
  std::string key;
  uint64_t weights;
  std::vector<Page> pages;
  PrefixRef ref;
  int model_ref;
  std::vector<PageLease> own;
  size_t num_written = 0;
};

class World {
 public:
  World(const Size& size, uint32_t seed)
      : size_(size),
        random_(seed),
        pool_(size.num_device_pages),
        index_(pool_, {.page_size = kPageSize,
                       .num_host_pages = size.num_host_pages,
                       .salt = "digest",
                       .record_events = size.records_events,
                       .hash_mask = size.hash_mask}),
        model_(size.num_device_pages, size.num_host_pages),
        device_(static_cast<size_t>(size.num_device_pages), kGarbage),
        host_(static_cast<size_t>(size.num_host_pages), kGarbage) {}

  void run(int num_operations) {
    for (int i = 0; i < num_operations; ++i) {
      const uint32_t pick = random_() % 1000;
      if (pick < 200) open();
      else if (pick < 450) grow();
      else if (pick < 750) publish();
      else if (pick < 850) step();
      else if (pick < 960) close();
      else if (pick < 990) make_room();
      else if (pick < 991) flush();
      else if (pick < 996 && size_.fails) invalidate_any();
      else if (pick < 997 && size_.fails && below(3) == 0) drop_host_tier();
      check_counts();
      check_found(any_key(), any_pages(), 1 + below(7));
      if (i % 16 == 0) check_all_found();
      if (tokenspeed::testing::failures() > 0) return;
    }
    while (!requests_.empty()) close();
    check_counts();
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }
  std::string any_key() { return below(4) == 0 ? "other" : below(20) == 0 ? "third" : ""; }
  Page any_page() { return {7, below(3)}; }
  std::vector<Page> any_pages() {
    std::vector<Page> pages(static_cast<size_t>(below(7)));
    for (Page& page : pages) page = any_page();
    return pages;
  }
  static std::vector<int32_t> joined(const std::vector<Page>& pages) {
    std::vector<int32_t> tokens;
    for (const Page& page : pages) tokens.insert(tokens.end(), page.begin(), page.end());
    return tokens;
  }
  // What a page holds: a number for each (weights, key, tokens up to its end).
  int contents(const Request& r, size_t num_pages) {
    std::vector<int32_t> name = joined({r.pages.begin(), r.pages.begin() + static_cast<int64_t>(num_pages)});
    name.push_back(static_cast<int32_t>(r.weights));
    return contents_.try_emplace({r.key, name}, static_cast<int>(contents_.size())).first->second;
  }

  PrefixIndex::Found check_found(const std::string& key, const std::vector<Page>& pages, int max_pages) {
    std::vector<int32_t> tokens = joined(pages);
    if (below(2) == 0) tokens.push_back(7);  // a started page
    const PrefixIndex::Found found = index_.find(key, tokens, max_pages);
    const PrefixModel::Found expected = model_.find(key, pages, max_pages);
    CHECK(found.num_pages == static_cast<int32_t>(expected.path.size()));
    CHECK(found.num_host_pages == expected.num_host && found.num_unlocked_device_pages == expected.num_unlocked);
    if (!expected.path.empty()) CHECK(found.node == model_.nodes.at(expected.path.back()).id);
    return found;
  }
  void check_all_found() {
    for (const auto& [name, node] : model_.nodes) {
      if (node.is_stale || node.parent == 0) continue;
      std::vector<Page> pages;
      for (const int n : model_.path_of(name)) pages.push_back(model_.nodes.at(n).page);
      int root = name;
      while (model_.nodes.at(root).parent != 0) root = model_.nodes.at(root).parent;
      const PrefixIndex::Found found = check_found(model_.nodes.at(root).key, pages, INT32_MAX);
      CHECK(found.num_pages == static_cast<int32_t>(pages.size()));
    }
  }
  void check_counts() {
    int leased = 0;
    for (const Request& r : requests_) leased += static_cast<int>(r.own.size());
    CHECK(index_.num_nodes() == model_.num_nodes() && index_.num_namespaces() == model_.num_roots());
    CHECK(index_.num_device_pages() == model_.num_on_device());
    CHECK(index_.num_host_pages_used() == model_.num_on_host() && model_.num_on_host() <= size_.num_host_pages);
    CHECK(index_.num_evictable() == model_.num_evictable());
    CHECK(pool_.num_free() == model_.num_free);
    CHECK(pool_.num_free() + index_.num_device_pages() + leased == size_.num_device_pages);
    for (const Request& r : requests_) {
      const ModelNode& end = model_.nodes.at(model_.refs.at(r.model_ref));
      CHECK(r.ref.is_stale() == end.is_stale && r.ref.is_broken() == end.is_broken);
    }
  }

  std::vector<int32_t> row_of(const Request& r) const {
    std::vector<int32_t> row(static_cast<size_t>(r.ref.num_pages()));
    index_.copy_pages(r.ref, row);
    for (const PageLease& page : r.own) row.push_back(page.front());
    return row;
  }

  void open() {
    if (static_cast<int>(requests_.size()) == size_.num_requests) return;
    Request r{.key = any_key(), .weights = index_.weight_version(), .pages = any_pages(), .ref = {}, .model_ref = 0,
              .own = {}};
    const int max_pages = below(8);
    const PrefixIndex::Found found = check_found(r.key, r.pages, max_pages);
    const int32_t left = index_.num_available_after(found);
    std::optional<PrefixRef> ref = index_.take(r.key, found);
    r.model_ref = model_.take(r.key, model_.find(r.key, r.pages, max_pages));
    CHECK(ref.has_value() == (r.model_ref != 0) && ref.has_value() == (left >= 0));
    if (!ref) return;
    CHECK(index_.num_available() == left && ref->num_pages() == found.num_pages);
    r.pages.resize(static_cast<size_t>(found.num_pages));
    r.ref = std::move(*ref);
    requests_.push_back(std::move(r));
  }

  void grow() {
    if (requests_.empty()) return;
    Request& r = requests_[static_cast<size_t>(below(static_cast<int>(requests_.size())))];
    const bool has_room = index_.make_room(1);
    CHECK(has_room == model_.make_room(1));
    if (!has_room) return;
    r.own.push_back(std::move(*pool_.acquire(1)));
    r.pages.push_back(any_page());
    model_.num_free -= 1;
  }

  void publish() {
    if (requests_.empty()) return;
    Request& r = requests_[static_cast<size_t>(below(static_cast<int>(requests_.size())))];
    if (r.num_written == 0 || r.ref.is_stale()) return;
    const Page& page = r.pages[static_cast<size_t>(r.ref.num_pages())];
    const int32_t before = r.own.front().front();
    PageLease lease = std::move(r.own.front());
    r.own.erase(r.own.begin());
    r.num_written -= 1;
    {
      const PrefixIndex::Published published = index_.publish(r.ref, page, std::move(lease));
      const bool is_kept = model_.publish(r.model_ref, page);
      CHECK(published.duplicate.has_value() == !is_kept && (published.page == before) == is_kept);
      if (!is_kept) CHECK(published.duplicate->front() == before);
      model_.num_free += !is_kept;
    }
    CHECK(row_of(r)[static_cast<size_t>(r.ref.num_pages()) - 1] >= 0);
    ModelNode& node = model_.nodes.at(model_.refs.at(r.model_ref));
    node.id = index_.find(r.key, joined(r.pages), r.ref.num_pages()).node;
    names_[node.id] = model_.refs.at(r.model_ref);
  }

  void close() {
    if (requests_.empty()) return;
    const auto it = requests_.begin() + below(static_cast<int>(requests_.size()));
    model_.num_free += static_cast<int>(it->own.size());
    model_.release(it->model_ref);
    requests_.erase(it);
  }

  void make_room() {
    const int want = below(size_.num_device_pages + 2);
    CHECK(index_.make_room(want) == model_.make_room(want));
  }

  void flush() {
    index_.flush();
    model_.flush();
  }

  void invalidate_any() {  // of any time, also gone by now
    if (names_.empty()) return;
    invalidate({std::next(names_.begin(), below(static_cast<int>(names_.size())))->first});
  }
  void invalidate(const std::vector<NodeId>& ids) {
    index_.invalidate(ids);
    for (const NodeId id : ids) model_.invalidate(names_.at(id));
  }

  void drop_host_tier() {
    index_.drop_host_tier();
    model_.drop_host_tier();
    CHECK(index_.num_host_pages_used() == 0 && !index_.has_host_tier());
  }

  // Runs the copies, in any order that is allowed, and the kernels; copies may fail, which is told now or a step later.
  void step() {
    std::vector<PageCopy> out, in;
    index_.take_copies(out, in);
    check_copies(out, model_.copies_out);
    check_copies(in, model_.copies_in);
    std::vector<int> order;
    for (const PageCopy& copy : in) order.push_back(names_.at(copy.node));
    model_.take_copies(order);
    std::shuffle(out.begin(), out.end(), random_);
    std::shuffle(in.begin(), in.end(), random_);
    std::vector<NodeId> failed = std::exchange(failed_, {});
    const auto fails = [&](const PageCopy& copy) {
      if (!size_.fails || below(40) != 0) return false;
      failed.push_back(copy.node);
      return true;
    };
    for (const PageCopy& c : out) host_[host_at(c)] = fails(c) ? kGarbage : device_[device_at(c)];
    for (const PageCopy& c : in) device_[device_at(c)] = fails(c) ? kGarbage : host_[host_at(c)];
    for (Request& r : requests_) run_kernel(r);
    if (below(2) == 0) {
      failed_ = failed;
      return;
    }
    invalidate(failed);
    for (const Request& r : requests_) check_contents(r);
    check_events();
  }
  static size_t host_at(const PageCopy& copy) { return static_cast<size_t>(copy.host_page); }
  static size_t device_at(const PageCopy& copy) { return static_cast<size_t>(copy.device_page); }

  void check_copies(const std::vector<PageCopy>& copies, const std::vector<int>& expected) {
    std::set<int> names, device_pages, host_pages;
    for (const PageCopy& copy : copies) {
      names.insert(names_.at(copy.node));
      host_pages.insert(copy.host_page);
      device_pages.insert(copy.device_page);
    }
    CHECK(names == std::set<int>(expected.begin(), expected.end()) && copies.size() == expected.size());
    CHECK(host_pages.size() == copies.size());
    if (&expected == &model_.copies_in) CHECK(device_pages.size() == copies.size());
  }

  // What is computed from a wrong page is wrong.
  void run_kernel(Request& r) {
    const std::vector<int32_t> row = row_of(r);
    const auto num_cached = static_cast<size_t>(r.ref.num_pages());
    bool is_right = true;
    for (size_t i = 0; i < row.size(); ++i) {
      int& page = device_[static_cast<size_t>(row[i])];
      if (i >= num_cached + r.num_written) page = is_right ? contents(r, i + 1) : kGarbage;
      is_right = is_right && page == contents(r, i + 1);
    }
    r.num_written = r.own.size();
  }

  void check_contents(const Request& r) {
    if (r.ref.is_broken()) return;
    const std::vector<int32_t> row = row_of(r);
    for (size_t i = 0; i < row.size(); ++i) CHECK(device_[static_cast<size_t>(row[i])] == contents(r, i + 1));
  }

  // A router that follows the events knows exactly what can be found.
  void check_events() {
    std::vector<PrefixEvent> events;
    index_.take_events(events);
    if (!size_.records_events) {
      CHECK(events.empty());
      return;
    }
    for (const PrefixEvent& e : events) {
      if (e.kind == PrefixEvent::Kind::Cleared) routed_.clear();
      if (e.kind == PrefixEvent::Kind::Removed) CHECK(routed_.erase(e.hash) == 1);
      if (e.kind == PrefixEvent::Kind::Stored) {
        CHECK(!e.parent_hash || routed_.contains(*e.parent_hash));
        std::vector<int32_t> tokens = e.parent_hash ? routed_[*e.parent_hash].second : std::vector<int32_t>{};
        if (e.parent_hash) CHECK(e.hash == hash_page(*e.parent_hash, e.tokens));
        if (e.parent_hash) CHECK(e.key == routed_[*e.parent_hash].first);
        tokens.insert(tokens.end(), e.tokens.begin(), e.tokens.end());
        CHECK(routed_.try_emplace(e.hash, e.key, tokens).second);
      }
    }
    std::set<std::pair<std::string, std::vector<int32_t>>> routed, known;
    for (const auto& [hash, prefix] : routed_) routed.insert(prefix);
    for (const auto& [name, node] : model_.nodes) {
      if (node.is_stale || node.parent == 0) continue;
      std::vector<Page> pages;
      int root = name;
      for (; model_.nodes.at(root).parent != 0; root = model_.nodes.at(root).parent) {
        pages.insert(pages.begin(), model_.nodes.at(root).page);
      }
      known.insert({model_.nodes.at(root).key, joined(pages)});
    }
    CHECK(routed == known && routed.size() == routed_.size());
  }

  const Size size_;
  std::mt19937 random_;
  PagePool pool_;
  PrefixIndex index_;
  PrefixModel model_;
  std::vector<Request> requests_;
  std::vector<int> device_, host_;  // what each page holds
  std::map<std::pair<std::string, std::vector<int32_t>>, int> contents_;
  std::map<NodeId, int> names_;
  std::vector<NodeId> failed_;  // copies not told yet
  std::map<uint64_t, std::pair<std::string, std::vector<int32_t>>> routed_;
};

// Worlds of 2000 operations each, of all sizes that matter: the device crowded or roomy, the host absent, smaller or
// larger than the device.
void run_worlds(int num_worlds, const Size& kind) {
  for (int i = 0; i < num_worlds && tokenspeed::testing::failures() == 0; ++i) {
    Size size = kind;
    size.num_device_pages = 2 + (i % 5) * (i % 5) * 2;
    if (kind.num_host_pages > 0) size.num_host_pages = 1 + i % 3 * 12;
    size.num_requests = 1 + i % 7;
    World(size, static_cast<uint32_t>(i)).run(2000);
    if (tokenspeed::testing::failures() > 0) std::printf("in world %d\n", i);
  }
}

constexpr uint64_t kWhole = ~uint64_t{0};

}  // namespace

TEST(without_a_host_tier) {
  run_worlds(20, {.num_device_pages = 0, .num_host_pages = 0, .num_requests = 0, .fails = false,
                  .records_events = true, .hash_mask = kWhole});
}

TEST(with_a_host_tier) {
  run_worlds(45, {.num_device_pages = 0, .num_host_pages = 1, .num_requests = 0, .fails = false,
                  .records_events = true, .hash_mask = kWhole});
}

TEST(with_copies_that_fail) {
  run_worlds(45, {.num_device_pages = 0, .num_host_pages = 1, .num_requests = 0, .fails = true,
                  .records_events = true, .hash_mask = kWhole});
}

TEST(with_hashes_that_collide) {
  run_worlds(10, {.num_device_pages = 0, .num_host_pages = 1, .num_requests = 0, .fails = true,
                  .records_events = false, .hash_mask = uint64_t{3} << 40});
}

TEST_MAIN
