// A request decodes only after its last chunk.
// expected-error: no matching function for call to .apply
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](Prefilling&& prefilling) {
    return apply(std::move(prefilling), PlanDecode{PageLease{}});
  };
  (void)misuse;
}
