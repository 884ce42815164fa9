// A page is published by the lease that owns it, not by its number: nobody publishes one twice.
// expected-error: (cannot convert .int. to|no viable conversion|no known conversion).*PageLease
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
  auto path = index.take("", index.find("", tokens, 1));
  index.publish(*path, tokens, 3);
}
