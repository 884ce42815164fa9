// The tokens of a trace's blocks: made from their ids when somebody needs them, so that equal ids are equal tokens and
// no prompt has to be kept.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tokenspeed::simulate {

// Spreads every bit of a number over all of the result (the finalizer of splitmix64).
constexpr uint64_t mix(uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Token `i` of what `seed` stands for: 0 or more.
constexpr int32_t token_at(uint64_t seed, int32_t i) noexcept {
  return static_cast<int32_t>((seed + static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15) >> 33);
}

// The tokens of one request: those of its blocks, and behind these its own, which no other request has.
class TokenStream {
 public:
  TokenStream() = default;
  TokenStream(std::span<const uint64_t> blocks, int32_t block_tokens, int64_t request_index) noexcept
      : blocks_(blocks), block_tokens_(block_tokens), own_(mix(~static_cast<uint64_t>(request_index))) {}

  int32_t at(int32_t position) const noexcept {
    const auto block = static_cast<size_t>(position / block_tokens_);
    return block < blocks_.size() ? token_at(mix(blocks_[block]), position % block_tokens_) : token_at(own_, position);
  }

  // The first `count`, in a vector with room for `more`.
  std::vector<int32_t> first(int32_t count, int32_t more = 0) const {
    std::vector<int32_t> tokens;
    tokens.reserve(static_cast<size_t>(count) + static_cast<size_t>(more));
    tokens.resize(static_cast<size_t>(count));
    const int64_t in_blocks = static_cast<int64_t>(blocks_.size()) * block_tokens_;
    const auto shared = static_cast<int32_t>(std::min<int64_t>(count, in_blocks));
    for (int32_t begin = 0; begin < shared; begin += block_tokens_) {
      const uint64_t seed = mix(blocks_[static_cast<size_t>(begin / block_tokens_)]);
      const int32_t end = std::min(shared, begin + block_tokens_);
      for (int32_t i = begin; i < end; ++i) tokens[static_cast<size_t>(i)] = token_at(seed, i - begin);
    }
    for (int32_t i = shared; i < count; ++i) tokens[static_cast<size_t>(i)] = token_at(own_, i);
    return tokens;
  }

 private:
  std::span<const uint64_t> blocks_;
  int32_t block_tokens_ = 1;
  uint64_t own_ = 0;
};

}  // namespace tokenspeed::simulate
