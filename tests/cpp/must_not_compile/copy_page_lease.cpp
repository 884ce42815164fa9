// Pages have one owner: a lease cannot be copied.
// expected-error: (use of deleted function|call to deleted constructor).*PageLease
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  auto lease = pages.acquire(2);
  PageLease copy = *lease;
}
