// The rules kept: this program must compile, so that the others fail for their own reason alone.
#include "cache/page_pool.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  SlotPool slots(1);
  Prefilling prefilling = apply(Waiting{}, Admit{std::move(*slots.acquire()), std::move(*pages.acquire(1))});
  auto first = apply(std::move(prefilling), PlanLastChunk{std::move(*pages.acquire(0)), 3});
  Decoding decoding = apply(std::move(first), Commit{});
  auto second = apply(std::move(decoding), PlanDecode{std::move(*pages.acquire(0))});
  auto third = apply(std::move(second), PlanDecode{std::move(*pages.acquire(1))});
  Draining draining = apply(std::move(third), Finish{});
  [[maybe_unused]] Finished finished = apply(std::move(draining), Commit{});
}
