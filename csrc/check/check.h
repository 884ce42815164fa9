// Assertions for our own bugs. A user's mistake is an exception with a text; a broken invariant of ours
// stops the process here, before it can hand one request the memory of another.
#pragma once

namespace tokenspeed::check {

// Prints the text, the condition and the place to stderr, then aborts.
[[noreturn]] void fail(const char* text, const char* condition, const char* file, int line) noexcept;

}  // namespace tokenspeed::check

// Always on: every use costs one predictable branch. The text says what must hold, in words.
#define TS_ASSERT(condition, text)                                                              \
  do {                                                                                          \
    if (!(condition)) [[unlikely]]                                                              \
      ::tokenspeed::check::fail(text, #condition, __FILE__, __LINE__);                          \
  } while (false)

#define TS_UNREACHABLE(text) ::tokenspeed::check::fail(text, "unreachable", __FILE__, __LINE__)
