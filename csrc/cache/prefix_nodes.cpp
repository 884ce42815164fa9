#include "cache/prefix_nodes.h"

#include <algorithm>
#include <bit>

#include "check/check.h"

namespace tokenspeed::cache {

namespace {

PrefixNode& at(Nodes& nodes, int32_t node) noexcept { return nodes[static_cast<size_t>(node)]; }

uint64_t tick(const Nodes& nodes, int32_t node) noexcept { return nodes[static_cast<size_t>(node)].last_used; }

}  // namespace

int32_t LruQueue::front(const Nodes& nodes) const noexcept {
  if (heap_.empty()) return first_;
  if (first_ == kNoIndex) return heap_.front();
  return tick(nodes, first_) < tick(nodes, heap_.front()) ? first_ : heap_.front();
}

void LruQueue::push(Nodes& nodes, int32_t node) {
  PrefixNode& pushed = at(nodes, node);
  if (first_ != kNoIndex && pushed.last_used > tick(nodes, first_) && pushed.last_used < tick(nodes, last_)) {
    heap_.push_back(node);
    pushed.place = PrefixNode::Place::Heap;
    sift_up(nodes, heap_.size() - 1, node);
    return;
  }
  pushed.place = PrefixNode::Place::List;
  pushed.queue_prev = pushed.queue_next = kNoIndex;
  if (first_ == kNoIndex) {
    first_ = last_ = node;
  } else if (pushed.last_used > tick(nodes, last_)) {
    pushed.queue_prev = last_;
    at(nodes, last_).queue_next = node;
    last_ = node;
  } else {
    pushed.queue_next = first_;
    at(nodes, first_).queue_prev = node;
    first_ = node;
  }
}

void LruQueue::remove(Nodes& nodes, int32_t node) noexcept {
  PrefixNode& removed = at(nodes, node);
  if (removed.place == PrefixNode::Place::List) {
    (removed.queue_prev == kNoIndex ? first_ : at(nodes, removed.queue_prev).queue_next) = removed.queue_next;
    (removed.queue_next == kNoIndex ? last_ : at(nodes, removed.queue_next).queue_prev) = removed.queue_prev;
  } else {
    TS_ASSERT(removed.place == PrefixNode::Place::Heap, "only a queued node leaves the queue");
    const auto hole = static_cast<size_t>(removed.queue_prev);
    const int32_t filler = heap_.back();
    heap_.pop_back();
    if (hole < heap_.size()) {
      const bool rises = hole > 0 && tick(nodes, filler) < tick(nodes, heap_[(hole - 1) / 2]);
      rises ? sift_up(nodes, hole, filler) : sift_down(nodes, hole, filler);
    }
  }
  removed.place = PrefixNode::Place::None;
}

void LruQueue::place(Nodes& nodes, size_t index, int32_t node) noexcept {
  heap_[index] = node;
  at(nodes, node).queue_prev = static_cast<int32_t>(index);
}

void LruQueue::sift_up(Nodes& nodes, size_t index, int32_t node) noexcept {
  for (; index > 0; index = (index - 1) / 2) {
    const int32_t above = heap_[(index - 1) / 2];
    if (tick(nodes, above) < tick(nodes, node)) break;
    place(nodes, index, above);
  }
  place(nodes, index, node);
}

void LruQueue::sift_down(Nodes& nodes, size_t index, int32_t node) noexcept {
  for (size_t below; (below = 2 * index + 1) < heap_.size(); index = below) {
    if (below + 1 < heap_.size() && tick(nodes, heap_[below + 1]) < tick(nodes, heap_[below])) ++below;
    if (tick(nodes, node) < tick(nodes, heap_[below])) break;
    place(nodes, index, heap_[below]);
  }
  place(nodes, index, node);
}

HashTable::HashTable(int32_t max_nodes) {
  const size_t size = std::bit_ceil(std::max<size_t>(2 * static_cast<size_t>(max_nodes), 2));
  entries_.resize(size);
  mask_ = size - 1;
  shift_ = 32 - std::countr_zero(size);
  TS_ASSERT(shift_ >= 0, "a prefix index can have up to 2^31 nodes");
}

void HashTable::insert(uint64_t hash, int32_t node) noexcept {
  size_t at = home(upper(hash));
  while (entries_[at].node != kNoIndex) at = (at + 1) & mask_;
  entries_[at] = {upper(hash), node};
}

void HashTable::erase(uint64_t hash, int32_t node) noexcept {
  size_t hole = home(upper(hash));
  while (entries_[hole].node != node) {
    TS_ASSERT(entries_[hole].node != kNoIndex, "only a node of the table leaves it");
    hole = (hole + 1) & mask_;
  }
  // An entry of the run may move back to the hole unless that is before its home.
  for (size_t at = (hole + 1) & mask_; entries_[at].node != kNoIndex; at = (at + 1) & mask_) {
    const size_t distance = (at - home(entries_[at].key)) & mask_;
    if (distance < ((at - hole) & mask_)) continue;
    entries_[hole] = entries_[at];
    hole = at;
  }
  entries_[hole] = {};
}

}  // namespace tokenspeed::cache
