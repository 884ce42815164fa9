#include "check/check.h"

#include <cstdio>
#include <cstdlib>

namespace tokenspeed::check {

void fail(const char* text, const char* condition, const char* file, int line) noexcept {
  std::fprintf(stderr, "tokenspeed: internal error: %s (%s) at %s:%d\n", text, condition, file, line);
  std::fflush(stderr);
  std::abort();
}

}  // namespace tokenspeed::check
