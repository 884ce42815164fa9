// A place is made of a slot, a path and pages: none of them can be left out.
// expected-error: (no matching function for call to .*hold|too few arguments to function call)
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  SlotPool slots(1);
  PlaceStore places(1);
  Prefilling prefilling = apply(Waiting{}, Admit{places.hold(std::move(*slots.acquire()), PrefixRef{})});
}
