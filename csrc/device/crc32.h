// CRC-32 as zlib computes it (reflected polynomial 0xEDB88320), eight bytes at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tokenspeed::device {

namespace crc32_detail {

// tables[n][b]: the effect of byte b followed by n zero bytes.
constexpr auto make_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? 0xEDB88320u : 0u);
    tables[0][byte] = value;
  }
  for (size_t n = 1; n < 8; ++n) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t value = tables[n - 1][byte];
      tables[n][byte] = (value >> 8) ^ tables[0][value & 0xff];
    }
  }
  return tables;
}
inline constexpr auto kTables = make_tables();

}  // namespace crc32_detail

inline uint32_t crc32(const std::byte* data, size_t size) noexcept {
  using crc32_detail::kTables;
  uint32_t crc = 0xffffffffu;
  for (; size >= 8; data += 8, size -= 8) {
    uint32_t low, high;
    std::memcpy(&low, data, 4);
    std::memcpy(&high, data + 4, 4);
    low ^= crc;
    crc = kTables[7][low & 0xff] ^ kTables[6][(low >> 8) & 0xff] ^ kTables[5][(low >> 16) & 0xff] ^
          kTables[4][low >> 24] ^ kTables[3][high & 0xff] ^ kTables[2][(high >> 8) & 0xff] ^
          kTables[1][(high >> 16) & 0xff] ^ kTables[0][high >> 24];
  }
  for (; size > 0; ++data, --size) crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<uint32_t>(*data)) & 0xff];
  return ~crc;
}

}  // namespace tokenspeed::device
