// Only the pool makes leases: pages cannot be claimed by number.
// expected-error: (PageLease\(.*is private|private constructor of class 'tokenspeed::cache::PageLease')
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  PageLease lease(&pages, 0, 0, 1);
}
