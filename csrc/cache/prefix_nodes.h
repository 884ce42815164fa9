// The parts of the prefix index: its node, the queue of pages to evict, and the table that finds nodes by hash.
// All are arrays of fixed-size entries that name one another by index: nothing moves, nothing is allocated per node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "check/huge_pages.h"

namespace tokenspeed::cache {

inline constexpr int32_t kNoIndex = -1;

// One page of tokens below its parent, or the root of a namespace (no parent, no pages). One cache line.
struct alignas(64) PrefixNode {
  uint64_t hash = 0;       // chain hash
  uint64_t last_used = 0;  // tick

  int32_t parent = kNoIndex;  // of a free node: the next free one
  int32_t first_child = kNoIndex;
  int32_t next_sibling = kNoIndex;  // roots are siblings too
  int32_t prev_sibling = kNoIndex;

  int32_t num_device_children = 0;
  int32_t locks = 0;  // refs that end here + children with locks
  int32_t device_page = kNoIndex;
  int32_t host_page = kNoIndex;

  // The queue that the node waits in for eviction: of device pages if it has one, else of host pages.
  enum class Place : uint8_t { None, List, Heap };
  int32_t queue_prev = kNoIndex;  // in the heap: its index there
  int32_t queue_next = kNoIndex;

  uint32_t generation = 0;  // rises when the node is freed
  Place place = Place::None;
  bool is_stale = false;   // no longer found; goes with its last lock
  bool is_broken = false;  // stale, and its device page does not hold what it should
};
static_assert(sizeof(PrefixNode) == 64);

using Nodes = check::HugeVector<PrefixNode>;

// Nodes in order of last_used, which differs between the nodes of one queue. Exact, and O(1) for what happens all the
// time: a node used just now comes last, the parent of the node evicted just now nearly always comes first. Those
// form a sorted list; the odd node that belongs somewhere in its middle goes to a heap: O(log of these).
class LruQueue {
 public:
  int32_t front(const Nodes& nodes) const noexcept;  // kNoIndex: empty
  void push(Nodes& nodes, int32_t node);
  void remove(Nodes& nodes, int32_t node) noexcept;

 private:
  void place(Nodes& nodes, size_t at, int32_t node) noexcept;
  void sift_up(Nodes& nodes, size_t at, int32_t node) noexcept;
  void sift_down(Nodes& nodes, size_t at, int32_t node) noexcept;

  int32_t first_ = kNoIndex;
  int32_t last_ = kNoIndex;
  std::vector<int32_t> heap_;  // binary, the smallest last_used on top
};

// Open addressing with linear probing, at most half full; an entry is a node and the upper half of its hash, whose
// first bits are its home. Erasing moves later entries of the run back, so there are no tombstones.
class HashTable {
 public:
  explicit HashTable(int32_t max_nodes);

  void prefetch(uint64_t hash) const noexcept { __builtin_prefetch(&entries_[home(upper(hash))]); }
  // The first node for which `is_it(node)`, among those with the same upper half of the hash; or kNoIndex.
  template <class IsIt>
  int32_t find(uint64_t hash, const IsIt& is_it) const noexcept {
    const uint32_t key = upper(hash);
    for (size_t at = home(key);; at = (at + 1) & mask_) {
      const Entry& entry = entries_[at];
      if (entry.node == kNoIndex) return kNoIndex;
      if (entry.key == key && is_it(entry.node)) return entry.node;
    }
  }
  void insert(uint64_t hash, int32_t node) noexcept;
  void erase(uint64_t hash, int32_t node) noexcept;

 private:
  struct Entry {
    uint32_t key = 0;
    int32_t node = kNoIndex;
  };
  static uint32_t upper(uint64_t hash) noexcept { return static_cast<uint32_t>(hash >> 32); }
  size_t home(uint32_t key) const noexcept { return static_cast<size_t>(uint64_t{key} >> shift_); }

  check::HugeVector<Entry> entries_;
  size_t mask_;
  int shift_;
};

}  // namespace tokenspeed::cache
