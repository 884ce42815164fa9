// Only the token of a step in flight can end a request.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](Decoding&& decoding) { return apply(std::move(decoding), Finish{}); };
  (void)misuse;
}
