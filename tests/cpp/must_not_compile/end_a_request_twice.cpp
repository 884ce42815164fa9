// A request ends once: one that drains cannot be aborted.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](InFlight<Draining, 2>&& draining) { return apply(std::move(draining), Abort{}); };
  (void)misuse;
}
