// A ref lets go of its path when it dies, and at no other time.
// expected-error: (release.*is private|.release. is a private member)
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
  path->release();
}
