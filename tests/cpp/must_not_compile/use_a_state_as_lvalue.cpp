// A transition consumes its state: one that stays in scope must be moved from, visibly.
// expected-error: (cannot bind rvalue reference|no matching function for call to .apply)
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](Decoding& decoding) { return apply(decoding, Preempt{}); };
  (void)misuse;
}
