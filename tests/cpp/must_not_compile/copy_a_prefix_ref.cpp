// A path is kept once per ref: a copy would let go of it twice.
// expected-error: (use of deleted function|call to deleted constructor).*PrefixRef
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
  PrefixRef copy = *path;
}
