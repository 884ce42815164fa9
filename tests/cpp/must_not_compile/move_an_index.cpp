// Refs point at their index: it stays where it is.
// expected-error: (use of deleted function|call to deleted constructor).*PrefixIndex
#include "cache/page_pool.h"
#include "cache/prefix_index.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  PrefixIndex index(pages, {.page_size = 2});
  PrefixIndex elsewhere = std::move(index);
}
