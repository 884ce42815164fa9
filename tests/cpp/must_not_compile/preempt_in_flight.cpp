// The device still uses the pages of a request in flight: they cannot be taken.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](InFlight<Decoding, 1>&& decoding) { return apply(std::move(decoding), Preempt{}); };
  (void)misuse;
}
