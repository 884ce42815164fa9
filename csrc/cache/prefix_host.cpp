// The host tier of the prefix index: which host page holds what, and the copies of the step being planned.
#include <utility>

#include "cache/prefix_index.h"
#include "check/check.h"

namespace tokenspeed::cache {

// A free host page, made free if need be; kNoIndex where all are needed.
int32_t PrefixIndex::host_page_to_fill() {
  if (!has_host_tier_) return kNoIndex;
  if (free_host_.empty()) {
    if (first_spare_ != kNoIndex) {
      free_host_page(host(first_spare_).node);
    } else if (const int32_t leaf = host_queue_.front(nodes_); leaf != kNoIndex) {
      const int32_t parent = at(leaf).parent;
      erase_node(leaf);
      after_child_left(parent);
    } else {
      return kNoIndex;
    }
  }
  const int32_t page = free_host_.back();
  free_host_.pop_back();
  return page;
}

// Gives the node a host page and has it filled, if one is to be had.
void PrefixIndex::copy_out(int32_t node) {
  const int32_t page = host_page_to_fill();
  if (page == kNoIndex) return;
  at(node).host_page = page;
  host(page).node = node;
  host(page).copy_out = static_cast<int32_t>(copies_out_.size());
  copies_out_.push_back({at(node).device_page, page, id_of(node)});
}

// Gives a locked node that is on the host alone a device page, and has that filled.
void PrefixIndex::restore(int32_t node, PageLease&& page) {
  set_device_page(node, pages_.detach(std::move(page)));
  const int32_t from = at(node).host_page;
  host(from).copy_in = static_cast<int32_t>(copies_in_.size());
  copies_in_.push_back({at(node).device_page, from, id_of(node)});
}

void PrefixIndex::cancel(std::vector<PageCopy>& copies, int32_t HostPage::*index, int32_t host_page) noexcept {
  const int32_t at_copy = std::exchange(host(host_page).*index, kNoIndex);
  if (at_copy == kNoIndex) return;
  const PageCopy last = copies.back();
  copies.pop_back();
  if (last.host_page == host_page) return;
  copies[static_cast<size_t>(at_copy)] = last;
  host(last.host_page).*index = at_copy;
}

void PrefixIndex::free_host_page(int32_t node) noexcept {
  const int32_t page = std::exchange(at(node).host_page, kNoIndex);
  cancel(copies_in_, &HostPage::copy_in, page);
  cancel(copies_out_, &HostPage::copy_out, page);
  if (host(page).is_spare) unlink_spare(page);
  host(page).node = kNoIndex;
  free_host_.push_back(page);
}

// The page's contents are on the device as well, and no copy in reads it: it may be reused at no loss.
void PrefixIndex::link_spare(int32_t page) noexcept {
  HostPage& linked = host(page);
  linked.is_spare = true;
  linked.prev = last_spare_;
  linked.next = kNoIndex;
  (last_spare_ == kNoIndex ? first_spare_ : host(last_spare_).next) = page;
  last_spare_ = page;
}

void PrefixIndex::unlink_spare(int32_t page) noexcept {
  HostPage& unlinked = host(page);
  TS_ASSERT(unlinked.is_spare, "a host page is spare while its contents are on the device");
  unlinked.is_spare = false;
  (unlinked.prev == kNoIndex ? first_spare_ : host(unlinked.prev).next) = unlinked.next;
  (unlinked.next == kNoIndex ? last_spare_ : host(unlinked.next).prev) = unlinked.prev;
}

void PrefixIndex::take_copies(std::vector<PageCopy>& out, std::vector<PageCopy>& in) noexcept {
  out.clear();
  in.clear();
  std::swap(out, copies_out_);
  std::swap(in, copies_in_);
  for (const PageCopy& copy : out) host(copy.host_page).copy_out = kNoIndex;
  for (const PageCopy& copy : in) {
    HostPage& read = host(copy.host_page);
    read.copy_in = kNoIndex;
    if (at(read.node).is_stale) {
      free_host_page(read.node);
    } else {
      link_spare(copy.host_page);
    }
  }
}

void PrefixIndex::take_events(std::vector<PrefixEvent>& events) noexcept {
  events.clear();
  std::swap(events, events_);
}

void PrefixIndex::drop_host_tier() noexcept {
  ++version_;
  has_host_tier_ = false;
  while (!copies_in_.empty()) {  // a node that becomes stale and broken cancels its copy
    const int32_t node = resolve(copies_in_.back().node);
    const int32_t parent = at(node).parent;
    make_stale(node, true);
    after_child_left(parent);
  }
  for (const HostPage& page : host_pages_) {
    if (page.node == kNoIndex) continue;
    if (at(page.node).device_page != kNoIndex) {
      free_host_page(page.node);
    } else {
      const int32_t parent = at(page.node).parent;
      erase_subtree(page.node);
      after_child_left(parent);
    }
  }
}

}  // namespace tokenspeed::cache
