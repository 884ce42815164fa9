// KV pages: a fixed pool, and the move-only lease through which pages are owned.
//
// The pool is one array `next`: every page is in exactly one singly linked list, the free list or the list of
// one lease, or marked as detached. So acquiring, joining and releasing pages neither allocates nor throws, and a page
// cannot be in two places at once. The free list is last in, first out: the same calls always give the same pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "check/huge_pages.h"

namespace tokenspeed::cache {

class PagePool;

// Owns pages in the order of the positions they hold; gives them back when it dies.
class PageLease {
 public:
  PageLease() noexcept = default;  // of no pool; holds nothing
  PageLease(PageLease&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)),
        first_(std::exchange(other.first_, kNone)),
        last_(std::exchange(other.last_, kNone)),
        num_pages_(std::exchange(other.num_pages_, 0)) {}
  PageLease& operator=(PageLease&& other) noexcept;
  PageLease(const PageLease&) = delete;
  PageLease& operator=(const PageLease&) = delete;
  ~PageLease() {
    if (num_pages_ > 0) release();
  }

  int32_t num_pages() const noexcept { return num_pages_; }

  // The first page; there must be one.
  int32_t front() const noexcept;

  // Takes over the pages of `more`, behind its own.
  void absorb(PageLease&& more) noexcept {
    if (more.num_pages_ > 0) join(std::move(more));
  }

  // A lease of the first page alone, which this one no longer has. There must be one. O(1).
  [[nodiscard]] PageLease take_front() noexcept;

  class Iterator {
   public:
    using iterator_category = std::forward_iterator_tag;
    using value_type = int32_t;
    using difference_type = std::ptrdiff_t;
    using pointer = const int32_t*;
    using reference = int32_t;

    Iterator() noexcept = default;
    Iterator(const int32_t* next, int32_t page) noexcept : next_(next), page_(page) {}
    int32_t operator*() const noexcept { return page_; }
    Iterator& operator++() noexcept {
      page_ = next_[page_];
      return *this;
    }
    Iterator operator++(int) noexcept {
      Iterator before = *this;
      ++*this;
      return before;
    }
    bool operator==(const Iterator& other) const noexcept { return page_ == other.page_; }

   private:
    const int32_t* next_ = nullptr;
    int32_t page_ = kNone;
  };
  Iterator begin() const noexcept;
  Iterator end() const noexcept { return {}; }

 private:
  friend class PagePool;
  static constexpr int32_t kNone = -1;

  PageLease(PagePool* pool, int32_t first, int32_t last, int32_t num_pages) noexcept
      : pool_(pool), first_(first), last_(last), num_pages_(num_pages) {}
  void release() noexcept;
  void join(PageLease&& more) noexcept;

  PagePool* pool_ = nullptr;
  int32_t first_ = kNone;
  int32_t last_ = kNone;
  int32_t num_pages_ = 0;
};

// Pages 0 .. num_pages-1. Must outlive its leases. Not thread-safe: the scheduler's thread owns it.
class PagePool {
 public:
  explicit PagePool(int32_t num_pages);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // All of `num_pages` (0 or more) pages, or nothing. O(num_pages).
  [[nodiscard]] std::optional<PageLease> acquire(int32_t num_pages) noexcept;

  // Pages that outlive their lease: whoever calls `detach` keeps the page by its number and must attach it again, once.
  // O(1). A page that is not detached cannot be attached: this is what keeps a page from having two owners.
  [[nodiscard]] int32_t detach(PageLease&& one_page) noexcept;
  [[nodiscard]] PageLease attach(int32_t page) noexcept;

  int32_t num_pages() const noexcept { return static_cast<int32_t>(next_.size()); }
  int32_t num_free() const noexcept { return num_free_; }

 private:
  friend class PageLease;
  static constexpr int32_t kDetached = -2;  // in `next`: in no list
  void give_back(int32_t first, int32_t last, int32_t num_pages) noexcept;  // O(1)

  check::HugeVector<int32_t> next_;
  int32_t first_free_;
  int32_t num_free_;
};

}  // namespace tokenspeed::cache
