// A lease frees itself; nobody else can give its pages back.
// expected-error: (give_back.*is private|'give_back' is a private member)
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  auto lease = pages.acquire(1);
  pages.give_back(0, 0, 1);
}
