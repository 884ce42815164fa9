// At most two steps are in flight.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  auto plan = [&](InFlight<InFlight<Decoding>>&& twice) {
    return apply(std::move(twice), PlanDecode{std::move(*pages.acquire(0))});
  };
  (void)plan;
}
