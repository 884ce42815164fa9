// Files of known bytes for tests of weights.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <string>
#include <vector>

#include "test.h"

namespace tokenspeed::device {

using Bytes = std::vector<std::byte>;

struct TempFile {
  std::string path = "/tmp/tokenspeed_test_XXXXXX";
  explicit TempFile(const Bytes& contents) {
    const int fd = mkstemp(path.data());
    CHECK(fd >= 0 && write(fd, contents.data(), contents.size()) == static_cast<ssize_t>(contents.size()));
    close(fd);
  }
  ~TempFile() { unlink(path.c_str()); }
};

inline Bytes counted_bytes(size_t count, unsigned factor) {
  Bytes bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>((i * factor) >> 13);
  return bytes;
}

}  // namespace tokenspeed::device
