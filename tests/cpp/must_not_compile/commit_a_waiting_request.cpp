// A request that waits is in no step that could commit.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](Waiting&& waiting) { return apply(std::move(waiting), Commit{}); };
  (void)misuse;
}
