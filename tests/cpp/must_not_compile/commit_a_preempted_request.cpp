// A preempted request is in no step: none in flight may use it.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](Preempted&& preempted) { return apply(std::move(preempted), Commit{}); };
  (void)misuse;
}
