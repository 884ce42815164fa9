#include "simulate/block_map.h"

#include <algorithm>
#include <bit>
#include <iterator>

namespace tokenspeed::simulate {

BlockMap::BlockMap(int32_t num_replicas, int64_t capacity)
    : num_words_((static_cast<size_t>(num_replicas) + 63) / 64),
      capacity_(static_cast<size_t>(std::max<int64_t>(1, capacity))),
      replicas_(static_cast<size_t>(num_replicas)) {}

void BlockMap::Blocks::unlink(uint32_t at) noexcept {
  nodes[nodes[at].before].after = nodes[at].after;
  nodes[nodes[at].after].before = nodes[at].before;
}

void BlockMap::Blocks::link_first(uint32_t at) noexcept {
  nodes[at].before = 0;
  nodes[at].after = nodes[0].after;
  nodes[nodes[0].after].before = at;
  nodes[0].after = at;
}

// Walks over the blocks with the set of replicas that have had all of them so far; who leaves it is done.
void BlockMap::match(std::span<const uint64_t> blocks, std::vector<int32_t>& matched) const {
  matched.assign(replicas_.size(), static_cast<int32_t>(blocks.size()));
  std::vector<uint64_t> left(num_words_, ~uint64_t{0});
  if (replicas_.size() % 64 != 0) left.back() = (uint64_t{1} << replicas_.size() % 64) - 1;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto found = holders_.find(blocks[i]);
    bool any = false;
    for (size_t w = 0; w < num_words_; ++w) {
      const uint64_t have = found == holders_.end() ? 0 : bits_[found->second * num_words_ + w];
      for (uint64_t gone = left[w] & ~have; gone != 0; gone &= gone - 1) {
        matched[w * 64 + static_cast<size_t>(std::countr_zero(gone))] = static_cast<int32_t>(i);
      }
      left[w] &= have;
      any |= left[w] != 0;
    }
    if (!any) return;
  }
}

void BlockMap::add(int32_t replica, std::span<const uint64_t> blocks) {
  Blocks& own = replicas_[static_cast<size_t>(replica)];
  for (size_t i = std::min(blocks.size(), capacity_); i-- > 0;) {
    const uint64_t block = blocks[i];
    if (const auto known = own.known.find(block); known != own.known.end()) {
      own.unlink(known->second);
      own.link_first(known->second);
      continue;
    }
    if (own.known.size() == capacity_) forget_last(replica);
    if (own.spare.empty()) {
      own.spare.push_back(static_cast<uint32_t>(own.nodes.size()));
      own.nodes.push_back({});
    }
    const uint32_t at = own.spare.back();
    own.spare.pop_back();
    own.nodes[at].block = block;
    own.link_first(at);
    own.known.emplace(block, at);

    auto holders = holders_.find(block);
    if (holders == holders_.end()) {
      if (spare_holders_.empty()) {
        spare_holders_.push_back(static_cast<uint32_t>(bits_.size() / num_words_));
        bits_.resize(bits_.size() + num_words_);
      }
      holders = holders_.emplace(block, spare_holders_.back()).first;
      spare_holders_.pop_back();
    }
    word(holders->second, replica) |= uint64_t{1} << replica % 64;
  }
}

void BlockMap::forget_last(int32_t replica) {
  Blocks& own = replicas_[static_cast<size_t>(replica)];
  const uint32_t last = own.nodes[0].before;
  const uint64_t block = own.nodes[last].block;
  own.unlink(last);
  own.known.erase(block);
  own.spare.push_back(last);
  const auto holders = holders_.find(block);
  word(holders->second, replica) &= ~(uint64_t{1} << replica % 64);
  const auto first = bits_.begin() + static_cast<std::ptrdiff_t>(holders->second * num_words_);
  if (std::all_of(first, first + static_cast<std::ptrdiff_t>(num_words_), [](uint64_t w) { return w == 0; })) {
    spare_holders_.push_back(holders->second);
    holders_.erase(holders);
  }
}

}  // namespace tokenspeed::simulate
