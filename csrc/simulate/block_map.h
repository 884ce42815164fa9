// What a router believes that each replica has cached: the blocks of prompts that it has sent there, the least recently
// used of them forgotten beyond what the replica's pages hold. It hears nothing of what the replicas really keep.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace tokenspeed::simulate {

class BlockMap {
 public:
  // `capacity`: blocks per replica, 1 at least.
  BlockMap(int32_t num_replicas, int64_t capacity);

  // How many of the first blocks each replica has: written to `matched`, one entry a replica. O(blocks + replicas).
  void match(std::span<const uint64_t> blocks, std::vector<int32_t>& matched) const;

  // The replica has these blocks now, the first ones being those that are forgotten last.
  void add(int32_t replica, std::span<const uint64_t> blocks);

  int64_t num_blocks(int32_t replica) const noexcept { return static_cast<int64_t>(of(replica).known.size()); }

 private:
  // Blocks of one replica, in a list by their last use; node 0 is its end.
  struct Node {
    uint64_t block;
    uint32_t before, after;
  };
  struct Blocks {
    std::unordered_map<uint64_t, uint32_t> known;
    std::vector<Node> nodes{{0, 0, 0}};
    std::vector<uint32_t> spare;

    void unlink(uint32_t at) noexcept;
    void link_first(uint32_t at) noexcept;
  };

  const Blocks& of(int32_t replica) const noexcept { return replicas_[static_cast<size_t>(replica)]; }
  void forget_last(int32_t replica);
  uint64_t& word(uint32_t holders, int32_t replica) noexcept {
    return bits_[holders * num_words_ + static_cast<size_t>(replica) / 64];
  }

  const size_t num_words_;
  const size_t capacity_;
  std::vector<Blocks> replicas_;

  // Who has a block, as bits: found by block, never walked over.
  std::unordered_map<uint64_t, uint32_t> holders_;
  std::vector<uint64_t> bits_;  // [holders][num_words_]
  std::vector<uint32_t> spare_holders_;
};

}  // namespace tokenspeed::simulate
