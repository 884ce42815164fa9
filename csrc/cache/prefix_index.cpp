// Finding, taking and publishing. How nodes leave is in prefix_evict.cpp, the host tier in prefix_host.cpp.
#include "cache/prefix_index.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "cache/prefix_hash.h"
#include "check/check.h"

namespace tokenspeed::cache {

namespace {


PrefixConfig validated(const PrefixConfig& config) {
  TS_ASSERT(config.page_size >= 1 && config.num_host_pages >= 0, "a prefix index needs pages of 1 token or more");
  return config;
}

}  // namespace

PrefixRef& PrefixRef::operator=(PrefixRef&& other) noexcept {
  if (this != &other) {
    release();
    index_ = std::exchange(other.index_, nullptr);
    node_ = std::exchange(other.node_, kNoIndex);
    num_pages_ = std::exchange(other.num_pages_, 0);
  }
  return *this;
}

void PrefixRef::release() noexcept {
  if (index_ != nullptr) std::exchange(index_, nullptr)->release(node_);
}

bool PrefixRef::is_stale() const noexcept { return index_ != nullptr && index_->at(node_).is_stale; }

bool PrefixRef::is_broken() const noexcept { return index_ != nullptr && index_->at(node_).is_broken; }

// Every node but a root has a page of its own, on the device or on the host.
PrefixIndex::PrefixIndex(PagePool& pages, const PrefixConfig& config)
    : pages_(pages),
      config_(validated(config)),
      num_page_nodes_(pages.num_pages() + config.num_host_pages),
      nodes_(static_cast<size_t>(num_page_nodes_)),
      tokens_(static_cast<size_t>(num_page_nodes_) * static_cast<size_t>(config.page_size)),
      host_pages_(static_cast<size_t>(config.num_host_pages)),
      table_(num_page_nodes_),
      has_host_tier_(config.num_host_pages > 0),
      records_events_(config.record_events) {
  for (int32_t node = num_page_nodes_ - 1; node >= 0; --node) {
    at(node).parent = std::exchange(first_free_node_, node);
  }
  free_host_.reserve(host_pages_.size());
  for (int32_t page = config.num_host_pages - 1; page >= 0; --page) free_host_.push_back(page);
}

PrefixIndex::~PrefixIndex() {
  for (int32_t root = first_root_; root != kNoIndex; root = at(root).next_sibling) {
    TS_ASSERT(at(root).locks == 0, "a prefix index must outlive its refs");
  }
  for (const Node& node : nodes_) {
    if (node.device_page != kNoIndex) [[maybe_unused]] const PageLease back = pages_.attach(node.device_page);
  }
}

uint64_t PrefixIndex::hash_key(std::string_view key) noexcept { return hash_bytes(0, key); }

uint64_t PrefixIndex::chain_hash(uint64_t parent, const int32_t* tokens) const noexcept {
  return hash_page(parent, {tokens, static_cast<size_t>(config_.page_size)}) & config_.hash_mask;
}

std::span<int32_t> PrefixIndex::tokens_of(int32_t node) noexcept {
  const auto size = static_cast<size_t>(config_.page_size);
  return std::span(tokens_).subspan(static_cast<size_t>(node) * size, size);
}

std::span<const int32_t> PrefixIndex::tokens_of(int32_t node) const noexcept {
  const auto size = static_cast<size_t>(config_.page_size);
  return std::span(tokens_).subspan(static_cast<size_t>(node) * size, size);
}

bool PrefixIndex::is_page(int32_t node, int32_t parent, uint64_t hash, const int32_t* tokens) const noexcept {
  const std::span<const int32_t> own = tokens_of(node);
  return at(node).hash == hash && at(node).parent == parent && std::memcmp(own.data(), tokens, own.size_bytes()) == 0;
}

NodeId PrefixIndex::id_of(int32_t node) const noexcept {
  return static_cast<NodeId>(uint64_t{at(node).generation} << 32 | static_cast<uint32_t>(node));
}

int32_t PrefixIndex::resolve(NodeId id) const noexcept {
  const auto node = static_cast<int32_t>(static_cast<uint64_t>(id) & 0xffffffff);
  return node >= 0 && node < num_page_nodes_ && id_of(node) == id ? node : kNoIndex;
}

int32_t PrefixIndex::root_of(std::string_view key) const noexcept {
  const auto found = roots_.find(key);
  return found != roots_.end() ? found->second : kNoIndex;
}

// The namespace's root, made if it is not there.
int32_t PrefixIndex::root_made(std::string_view key) {
  if (const int32_t root = root_of(key); root != kNoIndex) return root;
  if (first_free_root_ == kNoIndex) {
    nodes_.emplace_back();
    root_keys_.emplace_back();
    first_free_root_ = static_cast<int32_t>(nodes_.size()) - 1;
  }
  const int32_t root = first_free_root_;
  root_keys_[static_cast<size_t>(root - num_page_nodes_)] = key;
  roots_.emplace(key, root);
  first_free_root_ = std::exchange(at(root).parent, kNoIndex);
  at(root).hash = hash_bytes(hash_bytes(weight_version_, config_.salt), key);
  link_sibling(first_root_, root);
  ++num_roots_;
  return root;
}

void PrefixIndex::link_sibling(int32_t& first, int32_t node) noexcept {
  at(node).prev_sibling = kNoIndex;
  at(node).next_sibling = first;
  if (first != kNoIndex) at(first).prev_sibling = node;
  first = node;
}

void PrefixIndex::unlink_sibling(int32_t& first, int32_t node) noexcept {
  const int32_t prev = at(node).prev_sibling, next = at(node).next_sibling;
  (prev == kNoIndex ? first : at(prev).next_sibling) = next;
  if (next != kNoIndex) at(next).prev_sibling = prev;
}

// Where a page's entry in the table is depends on tokens alone, not on the pages before: so while one page is compared,
// the memory that later ones need is on its way, their entries first, then their nodes and tokens. How far ahead that
// goes rises with what was found, as all of it is in vain behind the last page found.
PrefixIndex::Found PrefixIndex::find(std::string_view key, std::span<const int32_t> tokens,
                                     int32_t max_pages) const noexcept {
  constexpr int32_t kEntriesAhead = 24, kNodesAhead = 12, kRing = 32;
  const auto page_size = static_cast<size_t>(config_.page_size);
  const auto num_whole = static_cast<int32_t>(std::min<size_t>(tokens.size() / page_size, INT32_MAX));
  const int32_t limit = std::min(num_whole, max_pages);
  Found found{.version = version_};
  int32_t node = root_of(key);
  if (node == kNoIndex) return found;
  const auto page_at = [&](int32_t i) { return tokens.data() + static_cast<size_t>(i) * page_size; };
  std::array<uint64_t, kRing> hashes;
  uint64_t last_hash = at(node).hash;
  int32_t num_hashed = 0, num_asked = 0;
  for (int32_t i = 0; i < limit; ++i) {
    for (const int32_t end = std::min({limit, 2 * i + 1, i + kEntriesAhead}); num_hashed < end; ++num_hashed) {
      last_hash = chain_hash(last_hash, page_at(num_hashed));
      hashes[static_cast<size_t>(num_hashed % kRing)] = last_hash;
      table_.prefetch(last_hash);
    }
    for (const int32_t end = std::min(num_hashed, i + kNodesAhead); num_asked < end; ++num_asked) {
      prefetch_page(table_.find(hashes[static_cast<size_t>(num_asked % kRing)], [](int32_t) { return true; }));
    }
    const uint64_t hash = hashes[static_cast<size_t>(i % kRing)];
    const int32_t child = table_.find(hash, [&](int32_t some) { return is_page(some, node, hash, page_at(i)); });
    if (child == kNoIndex) break;
    node = child;
    found.node = id_of(node);
    found.num_pages += 1;
    found.num_host_pages += at(node).device_page == kNoIndex;
    found.num_unlocked_device_pages += at(node).device_page != kNoIndex && at(node).locks == 0;
  }
  return found;
}

void PrefixIndex::prefetch_page(int32_t node) const noexcept {
  if (node == kNoIndex) return;
  __builtin_prefetch(&at(node));
  const std::span<const int32_t> tokens = tokens_of(node);
  for (size_t i = 0; i < tokens.size(); i += 16) __builtin_prefetch(&tokens[i]);
}

std::optional<PrefixRef> PrefixIndex::take(std::string_view key, const Found& found) {
  TS_ASSERT(found.version == version_, "a path must be taken before the prefix index changes");
  if (num_available_after(found) < 0) return std::nullopt;
  const int32_t node = found.num_pages > 0 ? resolve(found.node) : root_made(key);
  ++version_;
  ++tick_;
  lock(node);
  walk_.clear();  // what is on the host alone, the last page first
  for (int32_t n = node; !is_root(n); n = at(n).parent) {
    at(n).last_used = tick_;
    if (at(n).device_page == kNoIndex) walk_.push_back(n);
  }
  evict_until(found.num_host_pages);
  std::optional<PageLease> pages = pages_.acquire(found.num_host_pages);
  TS_ASSERT(pages.has_value(), "pages that are evictable can be had");
  for (size_t i = walk_.size(); i > 0; --i) restore(walk_[i - 1], pages->take_front());
  return PrefixRef{this, node, found.num_pages};
}

void PrefixIndex::copy_pages(const PrefixRef& ref, std::span<int32_t> row) const noexcept {
  TS_ASSERT(row.size() >= static_cast<size_t>(ref.num_pages_), "a row must have room for its path's pages");
  int32_t node = ref.node_;
  for (auto i = static_cast<size_t>(ref.num_pages_); i > 0; --i, node = at(node).parent) {
    row[i - 1] = at(node).device_page;
  }
}

PrefixIndex::Published PrefixIndex::publish(PrefixRef& ref, std::span<const int32_t> tokens,
                                            PageLease&& page) noexcept {
  TS_ASSERT(ref.index_ == this && !ref.is_stale(), "pages are published behind a ref of this index that is not stale");
  TS_ASSERT(tokens.size() == static_cast<size_t>(config_.page_size), "pages are published whole");
  ++version_;
  ++tick_;
  const int32_t parent = ref.node_;
  const uint64_t hash = chain_hash(at(parent).hash, tokens.data());
  int32_t node = table_.find(hash, [&](int32_t some) { return is_page(some, parent, hash, tokens.data()); });
  if (node == kNoIndex) node = new_node(parent, hash, tokens.data());
  lock_below(ref, node);
  at(node).last_used = tick_;
  if (at(node).device_page != kNoIndex) return {at(node).device_page, std::move(page)};
  if (at(node).host_page != kNoIndex) link_spare(at(node).host_page);
  set_device_page(node, pages_.detach(std::move(page)));
  return {at(node).device_page, std::nullopt};
}

int32_t PrefixIndex::new_node(int32_t parent, uint64_t hash, const int32_t* tokens) {
  const int32_t node = first_free_node_;
  TS_ASSERT(node != kNoIndex, "every node but the new one has a page");
  Node& made = at(node);
  first_free_node_ = std::exchange(made.parent, parent);
  made.hash = hash;
  link_sibling(at(parent).first_child, node);
  std::copy_n(tokens, config_.page_size, tokens_of(node).begin());
  table_.insert(hash, node);
  ++num_nodes_;
  if (records_events_) {
    int32_t root = parent;
    while (!is_root(root)) root = at(root).parent;
    PrefixEvent event{.kind = PrefixEvent::Kind::Stored, .hash = hash};
    if (!is_root(parent)) event.parent_hash = at(parent).hash;
    event.key = root_keys_[static_cast<size_t>(root - num_page_nodes_)];
    event.tokens.assign(tokens, tokens + config_.page_size);
    events_.push_back(std::move(event));
  }
  return node;
}

void PrefixIndex::set_device_page(int32_t node, int32_t page) noexcept {
  TS_ASSERT(at(node).locks > 0 && at(node).device_page == kNoIndex, "a node gets a device page under a lock");
  at(node).device_page = page;
  at(at(node).parent).num_device_children += 1;
  ++num_device_pages_;
}

// One more ref ends at the node.
void PrefixIndex::lock(int32_t node) noexcept {
  for (; node != kNoIndex; node = at(node).parent) {
    if (at(node).locks++ > 0) return;
    dequeue(node);
    num_evictable_ -= at(node).device_page != kNoIndex;
  }
}

// The ref, which ends at the child's parent, ends at the child instead: the parent has one ref less and, unless the
// child was locked, one locked child more.
void PrefixIndex::lock_below(PrefixRef& ref, int32_t child) noexcept {
  if (at(child).locks++ > 0) {
    at(at(child).parent).locks -= 1;
  } else {
    dequeue(child);
    num_evictable_ -= at(child).device_page != kNoIndex;
  }
  ref.node_ = child;
  ref.num_pages_ += 1;
}

void PrefixIndex::release(int32_t node) noexcept {
  ++version_;
  at(node).last_used = ++tick_;
  while (node != kNoIndex) {
    Node& left = at(node);
    TS_ASSERT(left.locks > 0, "a path is unlocked once per ref");
    if (--left.locks > 0) return;
    const int32_t parent = left.parent;
    num_evictable_ += left.device_page != kNoIndex;
    if (is_root(node)) {
      if (left.first_child == kNoIndex) erase_root(node);
    } else if (left.is_stale) {
      erase_node(node);
    } else {
      enqueue_if_leaf(node);
    }
    node = parent;
  }
}

void PrefixIndex::enqueue_if_leaf(int32_t node) noexcept {
  const Node& leaf = at(node);
  if (leaf.locks > 0 || leaf.place != Node::Place::None) return;
  if (leaf.device_page != kNoIndex) {
    if (leaf.num_device_children == 0) device_queue_.push(nodes_, node);
  } else if (leaf.first_child == kNoIndex) {
    host_queue_.push(nodes_, node);
  }
}

void PrefixIndex::dequeue(int32_t node) noexcept {
  if (at(node).place == Node::Place::None) return;
  (at(node).device_page != kNoIndex ? device_queue_ : host_queue_).remove(nodes_, node);
}

}  // namespace tokenspeed::cache
