// Only the index makes refs: a cached path cannot be claimed by number.
// expected-error: (PrefixRef\(.*is private|private constructor of class .*PrefixRef)
#include "cache/page_pool.h"
#include "cache/prefix_index.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  PrefixIndex index(pages, {.page_size = 2});
  const int32_t tokens[] = {1, 2};
  (void)tokens;
  PrefixRef path(&index, 0, 1);
}
