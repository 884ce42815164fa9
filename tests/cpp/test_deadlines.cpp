// Which requests have run out of time, and in which order.
#include "scheduler/deadlines.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "death.h"
#include "test.h"

using tokenspeed::scheduler::Deadlines;
using tokenspeed::testing::aborts_with;

TEST(deadlines_expire_in_order_and_once) {
  Deadlines deadlines;
  std::vector<int64_t> out{-7};
  CHECK(!deadlines.next() && !deadlines.remove(1));
  for (const auto& [id, at] : {std::pair{5, 30}, {4, 20}, {9, 20}, {2, 40}, {1, 20}}) deadlines.add(id, at);
  CHECK(deadlines.next() == 20 && deadlines.size() == 5);
  deadlines.expired(19, out);
  CHECK(out == std::vector<int64_t>{-7});
  CHECK(deadlines.remove(4) && !deadlines.remove(4));
  deadlines.expired(30, out);
  CHECK((out == std::vector<int64_t>{-7, 1, 9, 5}));
  CHECK(!deadlines.remove(5) && deadlines.size() == 1 && deadlines.next() == 40);
  deadlines.add(5, 39);  // an id may come again
  deadlines.expired(INT64_MAX, out);
  CHECK((out == std::vector<int64_t>{-7, 1, 9, 5, 5, 2}) && deadlines.size() == 0);
  CHECK(aborts_with("one deadline", [&] { deadlines.add(1, 1), deadlines.add(1, 2); }));
}

TEST(deadlines_agree_with_a_plain_list) {
  std::mt19937_64 random(3);
  const auto draw = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  Deadlines deadlines;
  std::map<int64_t, int64_t> plain;
  int64_t now = 0, num_expired = 0;
  bool same = true;
  for (int step = 0; step < 50000; ++step) {
    const int64_t id = draw(0, 199);
    if (draw(0, 1) == 0) {
      if (plain.emplace(id, now + draw(-2, 150)).second) deadlines.add(id, plain.at(id));
    } else if (draw(0, 1) == 0) {
      same &= deadlines.remove(id) == (plain.erase(id) == 1);
    } else {
      now += draw(0, 5);
      std::vector<std::pair<int64_t, int64_t>> due;
      for (const auto& [known, at] : plain) {
        if (at <= now) due.emplace_back(at, known);
      }
      std::sort(due.begin(), due.end());
      std::vector<int64_t> out, expected;
      for (const auto& [at, known] : due) expected.push_back(known), plain.erase(known);
      deadlines.expired(now, out);
      same &= out == expected;
      num_expired += static_cast<int64_t>(out.size());
    }
    same &= deadlines.size() == plain.size();
  }
  CHECK(same && num_expired > 1000);
}

TEST_MAIN
