// Admission carries the pages of the first chunk.
// expected-error: (could not convert|no matching function|no matching constructor).*PageLease
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  SlotPool slots(1);
  Prefilling prefilling = apply(Waiting{}, Admit{std::move(*slots.acquire())});
}
