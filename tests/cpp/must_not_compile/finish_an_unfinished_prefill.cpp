// A chunk that leaves some of the prompt draws no token that could end the request.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](InFlight<Prefilling, 1>&& prefilling) { return apply(std::move(prefilling), Finish{}); };
  (void)misuse;
}
