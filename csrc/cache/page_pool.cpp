#include "cache/page_pool.h"

#include "check/check.h"

namespace tokenspeed::cache {

PageLease& PageLease::operator=(PageLease&& other) noexcept {
  if (this != &other) {
    release();
    pool_ = std::exchange(other.pool_, nullptr);
    first_ = std::exchange(other.first_, kNone);
    last_ = std::exchange(other.last_, kNone);
    num_pages_ = std::exchange(other.num_pages_, 0);
  }
  return *this;
}

void PageLease::release() noexcept {
  if (num_pages_ > 0) pool_->give_back(first_, last_, num_pages_);
  pool_ = nullptr;
  first_ = last_ = kNone;
  num_pages_ = 0;
}

void PageLease::join(PageLease&& more) noexcept {
  TS_ASSERT(pool_ != nullptr && pool_ == more.pool_ && this != &more, "leases joined must be of one pool, and alive");
  if (num_pages_ > 0) {
    pool_->next_[static_cast<size_t>(last_)] = more.first_;
  } else {
    first_ = more.first_;
  }
  last_ = more.last_;
  num_pages_ += more.num_pages_;
  more.pool_ = nullptr;
  more.first_ = more.last_ = kNone;
  more.num_pages_ = 0;
}

int32_t PageLease::front() const noexcept {
  TS_ASSERT(num_pages_ > 0, "an empty lease has no first page");
  return first_;
}

PageLease PageLease::take_front() noexcept {
  const int32_t page = front();
  first_ = std::exchange(pool_->next_[static_cast<size_t>(page)], kNone);
  if (--num_pages_ == 0) last_ = kNone;
  return PageLease{pool_, page, page, 1};
}

PageLease::Iterator PageLease::begin() const noexcept {
  return num_pages_ > 0 ? Iterator{pool_->next_.data(), first_} : end();
}

PagePool::PagePool(int32_t num_pages) : first_free_(PageLease::kNone), num_free_(num_pages) {
  TS_ASSERT(num_pages >= 0, "a pool cannot have a negative number of pages");
  next_.resize(static_cast<size_t>(num_pages));
  for (int32_t page = num_pages - 1; page >= 0; --page) {
    next_[static_cast<size_t>(page)] = first_free_;
    first_free_ = page;
  }
}

PagePool::~PagePool() { TS_ASSERT(num_free_ == num_pages(), "a page pool must outlive its leases"); }

std::optional<PageLease> PagePool::acquire(int32_t num_pages) noexcept {
  TS_ASSERT(num_pages >= 0, "cannot acquire a negative number of pages");
  if (num_pages > num_free_) return std::nullopt;
  if (num_pages == 0) return PageLease{this, PageLease::kNone, PageLease::kNone, 0};
  const int32_t first = first_free_;
  int32_t last = first;
  for (int32_t i = 1; i < num_pages; ++i) last = next_[static_cast<size_t>(last)];
  first_free_ = std::exchange(next_[static_cast<size_t>(last)], PageLease::kNone);
  num_free_ -= num_pages;
  return PageLease{this, first, last, num_pages};
}

int32_t PagePool::detach(PageLease&& one_page) noexcept {
  TS_ASSERT(one_page.pool_ == this && one_page.num_pages_ == 1, "one page of this pool can be detached at a time");
  const int32_t page = one_page.first_;
  next_[static_cast<size_t>(page)] = kDetached;
  one_page.pool_ = nullptr;
  one_page.first_ = one_page.last_ = PageLease::kNone;
  one_page.num_pages_ = 0;
  return page;
}

PageLease PagePool::attach(int32_t page) noexcept {
  TS_ASSERT(page >= 0 && page < num_pages() && next_[static_cast<size_t>(page)] == kDetached,
            "only a detached page can be attached");
  next_[static_cast<size_t>(page)] = PageLease::kNone;
  return PageLease{this, page, page, 1};
}

void PagePool::give_back(int32_t first, int32_t last, int32_t num_pages) noexcept {
  next_[static_cast<size_t>(last)] = first_free_;
  first_free_ = first;
  num_free_ += num_pages;
  TS_ASSERT(num_free_ <= this->num_pages(), "more pages came back than were leased");
}

}  // namespace tokenspeed::cache
