// A small test harness: TEST(name) { CHECK(...); } and one main() per program through TEST_MAIN.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace tokenspeed::testing {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
inline int& failures() {
  static int count = 0;
  return count;
}
struct Register {
  Register(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

inline int run_all(int argc, char** argv) {
  int failed_cases = 0, run = 0;
  for (const Case& c : cases()) {
    if (argc > 1 && std::strstr(c.name, argv[1]) == nullptr) continue;
    const int before = failures();
    c.body();
    ++run;
    if (failures() != before) {
      ++failed_cases;
      std::printf("FAILED %s\n", c.name);
    }
  }
  std::printf("%d passed, %d failed\n", run - failed_cases, failed_cases);
  return failed_cases != 0 || run == 0;
}

}  // namespace tokenspeed::testing

#define TEST(name)                                                                   \
  static void test_##name();                                                         \
  static ::tokenspeed::testing::Register register_##name(#name, &test_##name);       \
  static void test_##name()

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      ++::tokenspeed::testing::failures();                                           \
      std::printf("%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition);      \
    }                                                                                \
  } while (false)

#define TEST_MAIN                                                                    \
  int main(int argc, char** argv) { return ::tokenspeed::testing::run_all(argc, argv); }
