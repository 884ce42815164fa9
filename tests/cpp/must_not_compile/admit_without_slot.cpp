// A place carries a slot, acquired before: none can be made up.
// expected-error: (cannot convert|no viable conversion|no matching|initializer list).*SlotLease
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  PlaceStore places(1);
  Prefilling prefilling = apply(Waiting{}, Admit{places.hold({}, PrefixRef{}, std::move(*pages.acquire(1)))});
}
