// A state owns its leases: it cannot be copied.
// expected-error: (use of deleted function|call to implicitly-deleted copy constructor)
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](Decoding& decoding) { Decoding copy = decoding; };
  (void)misuse;
}
