// The rules kept: this program must compile, so that the others fail for their own reason alone.
#include "cache/page_pool.h"
#include "cache/prefix_index.h"
#include "cache/slot_pool.h"
#include "fsm/transitions.h"

using namespace tokenspeed::cache;
using namespace tokenspeed::fsm;

int main() {
  PagePool pages(4);
  PrefixIndex index(pages, {.page_size = 2});
  SlotPool slots(1);
  PlaceStore places(1);
  const int32_t tokens[] = {1, 2};
  PrefixRef path = std::move(*index.take("", index.find("", tokens, 0)));
  Place place = places.hold(std::move(*slots.acquire()), std::move(path), std::move(*pages.acquire(1)));
  Prefilling prefilling = apply(Waiting{}, Admit{std::move(place)});
  Preempted preempted = apply(std::move(prefilling), Preempt{});
  Place again = places.hold(std::move(*slots.acquire()), PrefixRef{}, std::move(*pages.acquire(1)));
  auto first = apply(apply(std::move(preempted), Admit{std::move(again)}), PlanLastChunk{std::move(*pages.acquire(0))});
  Decoding decoding = apply(std::move(first), Commit{});
  auto second = apply(std::move(decoding), PlanDecode{std::move(*pages.acquire(0))});
  auto third = apply(std::move(second), PlanDecode{std::move(*pages.acquire(1))});
  InFlight<Decoding, 3> fourth = apply(std::move(third), PlanDecode{PageLease{}});
  InFlight<Draining, 2> draining = apply(std::move(fourth), Finish{});
  InFlight<Draining, 1> last = apply(std::move(draining), Commit{});
  [[maybe_unused]] Finished finished = apply(std::move(last), Commit{});
}
