// A request whose end was reported joins no further step.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](InFlight<Draining, 1>&& draining) {
    return apply(std::move(draining), PlanDecode{PageLease{}});
  };
  (void)misuse;
}
