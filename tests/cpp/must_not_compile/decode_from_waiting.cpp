// A request in the queue has no pages to decode with.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  apply(Waiting{}, PlanDecode{std::move(*pages.acquire(1))});
}
