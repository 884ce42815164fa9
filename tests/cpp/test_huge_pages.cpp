#include "check/huge_pages.h"

#include <cstdint>
#include <set>
#include <vector>

#include "test.h"

using tokenspeed::check::HugePool;
using tokenspeed::check::HugeVector;

TEST(large_arrays_begin_at_a_huge_page_and_small_ones_at_a_cache_line) {
  const HugeVector<int32_t> small(10), large(size_t{1} << 20);
  CHECK(reinterpret_cast<uintptr_t>(small.data()) % 64 == 0u);
  CHECK(reinterpret_cast<uintptr_t>(large.data()) % tokenspeed::check::kHugePage == 0u);
  for (const int32_t value : large) CHECK(value == 0);
}

TEST(objects_of_a_pool_are_apart_and_their_places_are_used_again) {
  struct Counted {
    explicit Counted(int& counter) : num_alive(counter) { ++num_alive; }
    ~Counted() { --num_alive; }
    int& num_alive;
    alignas(64) int64_t value = 0;
  };
  int alive = 0;
  HugePool<Counted> pool;
  std::vector<HugePool<Counted>::Owner> owners;
  std::set<Counted*> places;
  for (int round = 0; round < 3; ++round) {
    while (owners.size() < 50'000) {
      owners.push_back(pool.make(alive));
      owners.back()->value = static_cast<int64_t>(owners.size());
      places.insert(owners.back().get());
    }
    CHECK(alive == 50'000);
    for (size_t i = 0; i < owners.size(); ++i) CHECK(owners[i]->value == static_cast<int64_t>(i + 1));
    owners.resize(1'000);
    CHECK(alive == 1'000);
  }
  CHECK(places.size() == 50'000u);  // never more than were alive at once
  owners.clear();
  CHECK(alive == 0);
}

TEST_MAIN
