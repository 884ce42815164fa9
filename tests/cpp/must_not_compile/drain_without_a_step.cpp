// What no step in flight uses does not drain: there is no state for it.
// expected-error: (static assertion failed|static_assert failed).*
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = []() { InFlight<Draining, 0> draining{}; };
  (void)misuse;
}
