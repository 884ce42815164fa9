// At most three steps are in flight.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](InFlight<Decoding, 3>&& decoding) {
    return apply(std::move(decoding), PlanDecode{PageLease{}});
  };
  (void)misuse;
}
