// A lease frees its pages when it dies, and at no other time.
// expected-error: (release.*is private|'release' is a private member)
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  auto lease = pages.acquire(1);
  lease->release();
}
