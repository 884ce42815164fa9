// Admission carries a slot, acquired before.
// expected-error: (could not convert.*SlotLease|no viable conversion.*SlotLease)
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  Prefilling prefilling = apply(Waiting{}, Admit{{}, std::move(*pages.acquire(1))});
}
