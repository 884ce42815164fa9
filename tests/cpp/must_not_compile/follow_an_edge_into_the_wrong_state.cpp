// The type of the next state is part of the edge: a preempted request waits.
// expected-error: (conversion from .*Waiting.* to non-scalar type .*Decoding|no viable conversion.*Waiting.*Decoding)
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto preempt = [](Decoding&& decoding) {
    Decoding still = apply(std::move(decoding), Preempt{});
  };
  (void)preempt;
}
