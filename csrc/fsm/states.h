// The states of a request, as move-only types that own exactly what the request owns in that state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "cache/page_pool.h"
#include "cache/prefix_index.h"
#include "cache/slot_pool.h"

namespace tokenspeed::fsm {

inline constexpr int kMaxInFlight = 3;  // steps planned before the oldest commits: depth 2 and the one at hand

// What a request holds while it has a place on the device: its slot, the cached path that its first pages are on, and
// the pages behind that path, which no other request sees.
struct Holding {
  cache::SlotLease slot;
  cache::PrefixRef prefix;
  cache::PageLease pages;
};

namespace detail {

struct DestroyInPlace {
  void operator()(Holding* held) const noexcept { std::destroy_at(held); }
};

}  // namespace detail

// Owns a Holding, and frees all of it when it dies. A pointer, since states change at every step.
using Place = std::unique_ptr<Holding, detail::DestroyInPlace>;

// Memory of Holdings, one for each slot. Must outlive its places.
class PlaceStore {
 public:
  explicit PlaceStore(int32_t num_slots) : memory_(std::make_unique<Memory[]>(static_cast<size_t>(num_slots))) {}

  Place hold(cache::SlotLease&& slot, cache::PrefixRef&& prefix, cache::PageLease&& pages) noexcept {
    auto* at = memory_[static_cast<size_t>(slot.slot())].bytes;
    return Place(new (at) Holding{std::move(slot), std::move(prefix), std::move(pages)});
  }

 private:
  struct Memory {
    alignas(64) std::byte bytes[sizeof(Holding)];
  };
  std::unique_ptr<Memory[]> memory_;
};

namespace detail {

// Holds nothing, and moves like what holds something: a state is used once.
template <class Tag>
struct Empty {
  Empty() noexcept = default;
  Empty(Empty&&) noexcept = default;
  Empty& operator=(Empty&&) noexcept = default;
};

}  // namespace detail

// In the queue, and never yet on the device.
struct Waiting : detail::Empty<Waiting> {};

// In the queue again, with the tokens that it has drawn so far; its pages went to others.
struct Preempted : detail::Empty<Preempted> {};

// Some, or none, of its known tokens are in pages.
struct Prefilling {
  Place place;
};

// All of its tokens but the newest are in pages; the newest is in the last-token table.
struct Decoding {
  Place place;
};

// Its end has been reported, but planned steps still touch its slot and pages: met under InFlight alone.
struct Draining {
  Place place;
};

// `kSteps` planned steps use the request; `phase` is what it will be when they have committed.
template <class Phase, int kSteps>
struct InFlight {
  static_assert(kSteps >= 1 && kSteps <= kMaxInFlight);
  Phase phase;
};

// Holds nothing; the record may be deleted.
struct Finished : detail::Empty<Finished> {};

// Events carry what their transition needs, acquired beforehand: a transition cannot fail.

// It leaves the queue: with a slot, a cached path (which may be empty), and pages for its first chunk, or for all its
// known tokens.
struct Admit {
  Place place;
};
// The next known tokens join a step, and some remain.
struct PlanChunk {
  cache::PageLease pages;
};
// The last known tokens join a step, which draws the next token.
struct PlanLastChunk {
  cache::PageLease pages;
};
// The newest token joins a step, which draws the next one.
struct PlanDecode {
  cache::PageLease pages;
};
// The oldest step that uses the request has run, and the request goes on.
struct Commit {};
// The oldest step that uses the request has run, and drew the request's final token.
struct Finish {};
// The oldest step that uses the request failed on the device.
struct Fail {};
// Gives slot and pages up; what is not cached is computed anew later.
struct Preempt {};
// Nobody wants it any more: the client left, or its deadline has passed.
struct Abort {};

}  // namespace tokenspeed::fsm
