// Leases point at their pool: it stays where it is.
// expected-error: (use of deleted function|call to deleted constructor).*PagePool
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  PagePool elsewhere = std::move(pages);
}
