// The type of the next state is part of the edge: a preempted request is no decoding one.
// expected-error: (conversion from .*Preempted.* to .*Decoding|no viable conversion.*Preempted.*Decoding)
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](Decoding&& decoding) { Decoding still = apply(std::move(decoding), Preempt{}); };
  (void)misuse;
}
