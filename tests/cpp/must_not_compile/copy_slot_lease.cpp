// A slot has one owner: a lease cannot be copied.
// expected-error: (use of deleted function|call to deleted constructor).*SlotLease
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  SlotPool slots(1);
  auto lease = slots.acquire();
  SlotLease copy = *lease;
}
