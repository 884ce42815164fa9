// How nodes leave the prefix index: one by one when pages are needed, or whole subtrees that became wrong.
#include <utility>

#include "cache/prefix_index.h"
#include "check/check.h"

namespace tokenspeed::cache {

bool PrefixIndex::make_room(int32_t num_free) noexcept {
  if (num_available() < num_free) return false;
  evict_until(num_free);
  return true;
}

void PrefixIndex::evict_until(int32_t num_free) {
  while (pages_.num_free() < num_free) {
    const int32_t node = device_queue_.front(nodes_);
    TS_ASSERT(node != kNoIndex, "an unlocked device page has a leaf below it, or is one");
    evict(node);
  }
}

// The node stays queued until it has its host page: making room on the host may take its children away, after which
// it must not be queued anew.
void PrefixIndex::evict(int32_t node) {
  ++version_;
  ++num_evictions_;
  const int32_t parent = at(node).parent;  // likely the next to be evicted
  table_.prefetch(at(parent).hash);
  if (!is_root(parent)) __builtin_prefetch(&at(at(parent).parent));
  if (at(node).host_page == kNoIndex) {
    copy_out(node);
  } else if (const int32_t page = at(node).host_page; host(page).copy_in != kNoIndex) {
    cancel(copies_in_, &HostPage::copy_in, page);
  } else {
    unlink_spare(page);
  }
  dequeue(node);
  free_device_page(node);
  if (at(node).host_page != kNoIndex) {
    enqueue_if_leaf(node);
  } else {
    erase_subtree(node);
  }
  after_child_left(parent);
}

void PrefixIndex::free_device_page(int32_t node) noexcept {
  Node& freed = at(node);
  [[maybe_unused]] const PageLease back = pages_.attach(std::exchange(freed.device_page, kNoIndex));
  at(freed.parent).num_device_children -= 1;
  num_evictable_ -= freed.locks == 0;
  --num_device_pages_;
}

void PrefixIndex::after_child_left(int32_t parent) noexcept {
  if (!is_root(parent)) {
    enqueue_if_leaf(parent);
  } else if (at(parent).first_child == kNoIndex && at(parent).locks == 0) {
    erase_root(parent);
  }
}

void PrefixIndex::erase_node(int32_t node) noexcept {
  Node& erased = at(node);
  TS_ASSERT(erased.locks == 0 && erased.first_child == kNoIndex, "only an unlocked node without children goes away");
  dequeue(node);
  forget(node);
  if (erased.host_page != kNoIndex) free_host_page(node);
  if (erased.device_page != kNoIndex) free_device_page(node);
  unlink_sibling(at(erased.parent).first_child, node);
  erased = Node{.parent = std::exchange(first_free_node_, node), .generation = (erased.generation + 1) & 0x7fffffff};
  --num_nodes_;
}

void PrefixIndex::erase_root(int32_t root) noexcept {
  forget(root);
  unlink_sibling(first_root_, root);
  at(root) = Node{.parent = std::exchange(first_free_root_, root)};
  --num_roots_;
}

// Children before parents.
void PrefixIndex::erase_subtree(int32_t top) noexcept {
  for (int32_t node = top;;) {
    while (at(node).first_child != kNoIndex) node = at(node).first_child;
    const int32_t parent = at(node).parent;
    is_root(node) ? erase_root(node) : erase_node(node);
    if (node == top) return;
    node = parent;
  }
}

void PrefixIndex::forget(int32_t node) noexcept {
  if (std::exchange(at(node).is_stale, true)) return;
  if (is_root(node)) {
    roots_.erase(root_keys_[static_cast<size_t>(node - num_page_nodes_)]);
    return;
  }
  table_.erase(at(node).hash, node);
  if (records_events_) events_.push_back({.kind = PrefixEvent::Kind::Removed, .hash = at(node).hash});
}

// The node and all below it are not found any more; what is not locked goes away at once. A host page that a copy in
// reads stays until that copy is taken, unless what it holds is wrong.
void PrefixIndex::make_stale(int32_t top, bool is_broken) {
  walk_.assign(1, top);
  while (!walk_.empty()) {
    const int32_t node = walk_.back();
    walk_.pop_back();
    if (at(node).locks == 0) {
      erase_subtree(node);
      continue;
    }
    forget(node);
    at(node).is_broken |= is_broken;
    const int32_t host_page = at(node).host_page;
    if (host_page != kNoIndex && (is_broken || host(host_page).copy_in == kNoIndex)) free_host_page(node);
    for (int32_t child = at(node).first_child; child != kNoIndex; child = at(child).next_sibling) {
      walk_.push_back(child);
    }
  }
}

void PrefixIndex::flush() noexcept {
  ++version_;
  ++weight_version_;
  const bool records = std::exchange(records_events_, false);
  for (int32_t root = first_root_, next; root != kNoIndex; root = next) {
    next = at(root).next_sibling;
    if (!at(root).is_stale) make_stale(root, false);
  }
  records_events_ = records;
  if (!records) return;
  events_.clear();
  events_.push_back({.kind = PrefixEvent::Kind::Cleared});
}

void PrefixIndex::invalidate(std::span<const NodeId> nodes) noexcept {
  ++version_;
  for (const NodeId id : nodes) {
    const int32_t node = resolve(id);
    if (node == kNoIndex) continue;
    const int32_t parent = at(node).parent;
    make_stale(node, true);
    after_child_left(parent);
  }
}

}  // namespace tokenspeed::cache
