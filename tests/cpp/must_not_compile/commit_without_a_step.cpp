// Without a step in flight there is nothing to commit.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](Decoding&& decoding) { return apply(std::move(decoding), Commit{}); };
  (void)misuse;
}
