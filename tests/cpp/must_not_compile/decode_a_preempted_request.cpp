// A preempted request must be admitted again before it decodes.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  apply(Preempted{}, PlanDecode{PageLease{}});
}
