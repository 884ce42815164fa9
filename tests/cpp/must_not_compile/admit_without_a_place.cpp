// Admission carries the place that the request gets, and nothing else becomes one.
// expected-error: (could not convert|no viable conversion|no matching constructor).*PageLease
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  Prefilling prefilling = apply(Waiting{}, Admit{std::move(*pages.acquire(1))});
}
