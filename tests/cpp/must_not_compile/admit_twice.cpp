// A request that has a place gets no other.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](Prefilling&& prefilling, Place&& place) {
    return apply(std::move(prefilling), Admit{std::move(place)});
  };
  (void)misuse;
}
