// A place has one owner: two requests cannot hold it.
// expected-error: (use of deleted function|call to (implicitly-)?deleted (copy )?constructor)
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  auto misuse = [](Prefilling& prefilling) { Place copy = prefilling.place; };
  (void)misuse;
}
