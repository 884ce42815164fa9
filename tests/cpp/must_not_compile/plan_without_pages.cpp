// What a step writes to is acquired before it is planned: an event carries a lease, not a number.
// expected-error: (could not convert|cannot convert|no viable conversion).*PageLease
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](Decoding&& decoding) { return apply(std::move(decoding), PlanDecode{1}); };
  (void)misuse;
}
