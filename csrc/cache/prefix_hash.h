// The hash that names a cached page: a chain over the pages of a prefix. Defined by arithmetic on numbers alone, so
// it is the same on every platform, and may leave the process (routers compare such hashes).
//
// One round multiplies two 64-bit words into 128 bits and folds the halves together with xor: one multiplication
// spreads every bit of both words over the whole result. Four lanes take the words in turn, so that their
// multiplications overlap.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tokenspeed::cache {

namespace prefix_hash {

// The fractions of the square roots of the first eight primes, in 64 bits. As pairs of token ids they would all be
// far outside of any vocabulary, so no word cancels one of them.
inline constexpr std::array<uint64_t, 8> kConstants = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

constexpr uint64_t fold(uint64_t a, uint64_t b) noexcept {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

class Lanes {
 public:
  constexpr explicit Lanes(uint64_t seed) noexcept {
    for (size_t j = 0; j < 4; ++j) lanes_[j] = seed ^ kConstants[j];
  }
  constexpr void add(size_t lane, uint64_t first, uint64_t second) noexcept {
    lanes_[lane] = fold(lanes_[lane] ^ first, kConstants[4 + lane] ^ second);
  }
  constexpr uint64_t finish(uint64_t length) const noexcept {
    const uint64_t left = fold(lanes_[0] ^ length, std::rotl(lanes_[1], 19) ^ kConstants[0]);
    const uint64_t right = fold(lanes_[2] ^ kConstants[1], std::rotl(lanes_[3], 43) ^ kConstants[2]);
    return fold(left ^ kConstants[3], std::rotl(right, 32) ^ kConstants[4]);
  }

 private:
  std::array<uint64_t, 4> lanes_{};
};

}  // namespace prefix_hash

// The hash of the page that holds `tokens` below a page of hash `parent`. Token pairs make words, the earlier token
// in the low half; a missing last one counts as 0 (the length is hashed too).
constexpr uint64_t hash_page(uint64_t parent, std::span<const int32_t> tokens) noexcept {
  prefix_hash::Lanes lanes(parent);
  const auto word = [&](size_t at) {
    const uint64_t low = at < tokens.size() ? static_cast<uint32_t>(tokens[at]) : 0;
    const uint64_t high = at + 1 < tokens.size() ? static_cast<uint32_t>(tokens[at + 1]) : 0;
    return low | high << 32;
  };
  size_t at = 0;
  for (; at + 16 <= tokens.size(); at += 16) {
    for (size_t lane = 0; lane < 4; ++lane) lanes.add(lane, word(at + 4 * lane), word(at + 4 * lane + 2));
  }
  for (size_t lane = 0; at < tokens.size(); at += 4, ++lane) lanes.add(lane, word(at), word(at + 2));
  return lanes.finish(tokens.size());
}

// The hash of some bytes, eight to a word, the first in the lowest place.
constexpr uint64_t hash_bytes(uint64_t seed, std::string_view bytes) noexcept {
  prefix_hash::Lanes lanes(seed);
  for (size_t at = 0; at < bytes.size(); at += 8) {
    uint64_t word = 0;
    for (size_t i = 0; i < 8 && at + i < bytes.size(); ++i) {
      word |= uint64_t{static_cast<unsigned char>(bytes[at + i])} << (8 * i);
    }
    lanes.add(at / 8 % 4, word, 0);
  }
  return lanes.finish(bytes.size());
}

}  // namespace tokenspeed::cache
