// The prefix index: which pages of tokens are cached, where, and which of them may be evicted.
//
// It is a trie of full pages. A node is one page of tokens below its parent; the roots are namespaces (keys). A node
// is looked up by the chain hash of all tokens up to its end and then compared with the tokens themselves below the
// very same parent: a collision costs time, never a wrong hit.
//
// A node has a device page, a host page, or both with the same contents. These always hold:
//  - The parent of a node with a device page is a root or has a device page: pages leave the device leaf by leaf.
//  - A path that a PrefixRef ends in is locked: all of it is on the device and stays there.
//  - Whatever is below an unlocked node is unlocked. So every unlocked device page can be evicted.
//
// Eviction takes the least recently used leaf: of the unlocked nodes without a child on the device the one with the
// smallest tick. With a host tier its page moves to a host page (nothing is copied when it has one already).
// A host page comes from, in this order: the free ones; pages whose contents are on the device as well, the one
// that came to be so first; the least recently used node without children that is on the host alone, which goes away.
// Without a host page the evicted node goes away, and what is below it.
//
// Copies are collected for the step that is being planned. Who runs them must finish all copies out, then all copies
// in, before that step's kernels, behind all earlier steps. Until take_copies, no host page that a copy in reads is
// reused; a device page that a copy out reads may be, by a copy in or by kernels.
//
// Not thread-safe: the scheduler's thread owns it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/page_pool.h"
#include "cache/prefix_nodes.h"

namespace tokenspeed::cache {

class PrefixIndex;

struct PrefixConfig {
  int32_t page_size;           // tokens per page, 1 or more
  int32_t num_host_pages = 0;  // 0: no host tier
  std::string salt = {};       // part of every hash: the artifact's digest
  bool record_events = false;
  uint64_t hash_mask = ~uint64_t{0};  // tests clear bits of it to make hashes collide
};

// A node and which of its lives: nodes are reused, ids are not.
using NodeId = int64_t;
inline constexpr NodeId kNoNode = -1;

struct PageCopy {
  int32_t device_page;
  int32_t host_page;
  NodeId node;  // to name in PrefixIndex::invalidate should the copy fail
  bool operator==(const PageCopy&) const = default;
};

// What a router needs to know about what can be hit here.
struct PrefixEvent {
  enum class Kind : uint8_t { Stored, Removed, Cleared };
  Kind kind;
  uint64_t hash = 0;                           // Stored, Removed
  std::optional<uint64_t> parent_hash = {};    // Stored: none for the first page of a prefix
  std::string key = {};                        // Stored
  std::vector<int32_t> tokens = {};            // Stored: the page's
};

// Keeps a path of the index on the device: the first num_pages() pages of a sequence. The index must outlive it.
class PrefixRef {
 public:
  PrefixRef() noexcept = default;  // of no index; holds nothing
  PrefixRef(PrefixRef&& other) noexcept
      : index_(std::exchange(other.index_, nullptr)),
        node_(std::exchange(other.node_, kNoIndex)),
        num_pages_(std::exchange(other.num_pages_, 0)) {}
  PrefixRef& operator=(PrefixRef&& other) noexcept;
  PrefixRef(const PrefixRef&) = delete;
  PrefixRef& operator=(const PrefixRef&) = delete;
  ~PrefixRef() { release(); }

  explicit operator bool() const noexcept { return index_ != nullptr; }
  int32_t num_pages() const noexcept { return num_pages_; }
  // The weights changed, or is_broken(): the pages are still kept, but nothing can be published behind them.
  bool is_stale() const noexcept;
  // A copy failed: the pages do not all hold what they should; what was computed from them is wrong.
  bool is_broken() const noexcept;

 private:
  friend class PrefixIndex;
  PrefixRef(PrefixIndex* index, int32_t node, int32_t num_pages) noexcept
      : index_(index), node_(node), num_pages_(num_pages) {}
  void release() noexcept;

  PrefixIndex* index_ = nullptr;
  int32_t node_ = kNoIndex;
  int32_t num_pages_ = 0;
};

class PrefixIndex {
 public:
  PrefixIndex(PagePool& pages, const PrefixConfig& config);  // `pages` must outlive it
  ~PrefixIndex();                                            // gives back all pages; no ref may be left
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // The longest cached path of a sequence.
  struct Found {
    NodeId node = kNoNode;  // its last; kNoNode for 0 pages
    int32_t num_pages = 0;
    int32_t num_host_pages = 0;             // the last ones of the path, which are on the host alone
    int32_t num_unlocked_device_pages = 0;  // which are evictable now and would not be after a take
    uint64_t version = 0;                   // of the index; any change makes it void
  };
  // At most max_pages pages; `tokens` may end within a page. Changes nothing.
  Found find(std::string_view key, std::span<const int32_t> tokens, int32_t max_pages) const noexcept;

  // Pages that would still be to be had, free or by eviction, after a take. Below 0: take would fail.
  int32_t num_available_after(const Found& found) const noexcept {
    return num_available() - found.num_unlocked_device_pages - found.num_host_pages;
  }

  // Locks the path found by find(key, ...), with no change of the index since, and brings the pages that are on the
  // host alone to the device, evicting as needed. A path of 0 pages is the namespace itself. nullopt, nothing
  // changed: too few pages are to be had.
  [[nodiscard]] std::optional<PrefixRef> take(std::string_view key, const Found& found);

  // The path's device pages, the first ref.num_pages() entries of `row`.
  void copy_pages(const PrefixRef& ref, std::span<int32_t> row) const noexcept;

  struct Published {
    int32_t page;                        // the page that the path now has there
    std::optional<PageLease> duplicate;  // the lease, when the index had that page on the device already
  };
  // The path grows by one page: `tokens` (page_size of them) are those whose keys and values `page` (a lease of one)
  // holds, or will once the steps planned so far have run. The ref must not be stale.
  Published publish(PrefixRef& ref, std::span<const int32_t> tokens, PageLease&& page) noexcept;

  // For who publishes many at once: asks for the memory that publish will need next, and changes nothing. First that of
  // the ref, then, when it is there, that of the page behind it.
  void prefetch_ref(const PrefixRef& ref) const noexcept {
    if (ref.index_ == this) __builtin_prefetch(&at(ref.node_));
  }
  void prefetch_publish(const PrefixRef& ref, std::span<const int32_t> tokens) const noexcept {
    if (ref.index_ == this) table_.prefetch(chain_hash(at(ref.node_).hash, tokens.data()));
  }

  // Evicts until the pool has num_free free pages. False, nothing evicted: so many are not to be had.
  bool make_room(int32_t num_free) noexcept;

  // The weights changed: nothing that is cached now will be found again. Pages go at once, locked ones with their last
  // ref; such refs are stale.
  void flush() noexcept;

  // Copies of these nodes failed: they and all below them are not found again, refs to them are stale and broken.
  // Ids of nodes that are gone are no mistake.
  void invalidate(std::span<const NodeId> nodes) noexcept;

  // The host's memory failed: what is on the host alone goes away, no host page is used again. Copies that were not
  // taken yet are dropped, and nodes that a copy in was to fill are invalidated.
  void drop_host_tier() noexcept;

  // Replaces the contents of both by the copies collected since the last call.
  void take_copies(std::vector<PageCopy>& out, std::vector<PageCopy>& in) noexcept;
  // Replaces the contents by the events since the last call, in order; what came before a Cleared is left out. To be
  // called regularly when events are recorded.
  void take_events(std::vector<PrefixEvent>& events) noexcept;

  int32_t page_size() const noexcept { return config_.page_size; }
  int32_t num_evictable() const noexcept { return num_evictable_; }  // device pages that no ref keeps
  int32_t num_available() const noexcept { return pages_.num_free() + num_evictable_; }
  int32_t num_nodes() const noexcept { return num_nodes_; }  // without roots
  int32_t num_device_pages() const noexcept { return num_device_pages_; }
  int32_t num_host_pages() const noexcept { return static_cast<int32_t>(host_pages_.size()); }  // of the tier
  int32_t num_host_pages_used() const noexcept { return num_host_pages() - static_cast<int32_t>(free_host_.size()); }
  int64_t num_evictions() const noexcept { return num_evictions_; }  // pages that left the device, since the start
  int32_t num_namespaces() const noexcept { return num_roots_; }
  uint64_t weight_version() const noexcept { return weight_version_; }  // flushes so far
  bool has_host_tier() const noexcept { return has_host_tier_; }

 private:
  friend class PrefixRef;
  using Node = PrefixNode;

  // What a host page is for; links are those of the list of pages that are on the device as well.
  struct HostPage {
    int32_t node = kNoIndex;
    int32_t copy_in = kNoIndex;   // index of its copy in copies_in_
    int32_t copy_out = kNoIndex;  // index of its copy in copies_out_
    int32_t prev = kNoIndex;
    int32_t next = kNoIndex;
    bool is_spare = false;  // in that list
  };
  struct KeyHash {
    using is_transparent = void;
    size_t operator()(std::string_view key) const noexcept { return static_cast<size_t>(hash_key(key)); }
  };
  static uint64_t hash_key(std::string_view key) noexcept;

  Node& at(int32_t node) noexcept { return nodes_[static_cast<size_t>(node)]; }
  const Node& at(int32_t node) const noexcept { return nodes_[static_cast<size_t>(node)]; }
  HostPage& host(int32_t page) noexcept { return host_pages_[static_cast<size_t>(page)]; }
  bool is_root(int32_t node) const noexcept { return node >= num_page_nodes_; }
  std::span<const int32_t> tokens_of(int32_t node) const noexcept;
  std::span<int32_t> tokens_of(int32_t node) noexcept;
  NodeId id_of(int32_t node) const noexcept;
  int32_t resolve(NodeId id) const noexcept;  // kNoIndex: gone

  // Nodes (prefix_index.cpp).
  uint64_t chain_hash(uint64_t parent, const int32_t* tokens) const noexcept;
  bool is_page(int32_t node, int32_t parent, uint64_t hash, const int32_t* tokens) const noexcept;
  void prefetch_page(int32_t node) const noexcept;
  int32_t root_of(std::string_view key) const noexcept;
  int32_t root_made(std::string_view key);
  int32_t new_node(int32_t parent, uint64_t hash, const int32_t* tokens);
  void link_sibling(int32_t& first, int32_t node) noexcept;
  void unlink_sibling(int32_t& first, int32_t node) noexcept;
  void lock(int32_t node) noexcept;
  void release(int32_t node) noexcept;
  void lock_below(PrefixRef& ref, int32_t child) noexcept;
  void set_device_page(int32_t node, int32_t page) noexcept;
  void enqueue_if_leaf(int32_t node) noexcept;
  void dequeue(int32_t node) noexcept;

  // Leaving (prefix_evict.cpp).
  void evict_until(int32_t num_free);
  void evict(int32_t node);
  void free_device_page(int32_t node) noexcept;
  void erase_node(int32_t node) noexcept;  // without children
  void erase_subtree(int32_t top) noexcept;
  void erase_root(int32_t node) noexcept;
  void forget(int32_t node) noexcept;              // it is not found any more
  void after_child_left(int32_t parent) noexcept;  // one of its children, or that child's device page
  void make_stale(int32_t top, bool is_broken);

  // Host pages (prefix_host.cpp).
  int32_t host_page_to_fill();
  void copy_out(int32_t node);
  void restore(int32_t node, PageLease&& page);
  void cancel(std::vector<PageCopy>& copies, int32_t HostPage::*index, int32_t host_page) noexcept;
  void free_host_page(int32_t node) noexcept;
  void link_spare(int32_t host_page) noexcept;
  void unlink_spare(int32_t host_page) noexcept;

  PagePool& pages_;
  const PrefixConfig config_;
  const int32_t num_page_nodes_;
  Nodes nodes_;                        // [num_page_nodes], then roots
  check::HugeVector<int32_t> tokens_;  // [num_page_nodes][page_size]
  std::vector<HostPage> host_pages_;
  std::vector<int32_t> free_host_;
  HashTable table_;
  std::unordered_map<std::string, int32_t, KeyHash, std::equal_to<>> roots_;  // that can be found; never walked
  std::vector<std::string> root_keys_;                                        // [roots]
  LruQueue device_queue_;  // unlocked, on the device, no child on the device
  LruQueue host_queue_;    // on the host alone, no child
  int32_t first_spare_ = kNoIndex;
  int32_t last_spare_ = kNoIndex;
  int32_t first_free_node_ = kNoIndex;
  int32_t first_free_root_ = kNoIndex;
  int32_t first_root_ = kNoIndex;

  int32_t num_nodes_ = 0;
  int32_t num_roots_ = 0;
  int32_t num_evictable_ = 0;
  int32_t num_device_pages_ = 0;
  bool has_host_tier_;
  bool records_events_;
  uint64_t tick_ = 0;
  uint64_t version_ = 0;
  uint64_t weight_version_ = 0;
  int64_t num_evictions_ = 0;

  std::vector<PageCopy> copies_out_;
  std::vector<PageCopy> copies_in_;
  std::vector<PrefixEvent> events_;
  std::vector<int32_t> walk_;  // scratch
};

}  // namespace tokenspeed::cache
