// The states of a request, as move-only types that own exactly what the request owns in that state.
#pragma once

#include <cstdint>
#include <utility>

#include "cache/page_pool.h"
#include "cache/slot_pool.h"

namespace tokenspeed::fsm {

// What a request holds while it has a place on the device.
struct Holding {
  cache::SlotLease slot;
  cache::PageLease pages;
  int32_t num_positions;  // written to its pages once every planned step has run
};

// In the queue; holds nothing. A preempted request waits again, with the tokens that it has drawn so far.
struct Waiting {
  Waiting() noexcept = default;
  Waiting(Waiting&&) noexcept = default;
  Waiting& operator=(Waiting&&) noexcept = default;
};

// Some, or none, of its known tokens are in pages.
struct Prefilling {
  Holding held;
};

// All of its tokens but the newest are in pages; the newest is in the last-token table.
struct Decoding {
  Holding held;
};

// One planned step uses the request; `next` is what it becomes when that step commits.
// Two steps in flight nest: InFlight<InFlight<Decoding>>.
template <class Next>
struct InFlight {
  Next next;
};

// Its end has been reported, but one planned step still touches its slot and pages.
struct Draining {
  Holding held;
};

// Holds nothing; the record may be deleted.
struct Finished {
  Finished() noexcept = default;
  Finished(Finished&&) noexcept = default;
  Finished& operator=(Finished&&) noexcept = default;
};

// Events carry what their transition needs, acquired beforehand: a transition cannot fail.

struct Admit {
  cache::SlotLease slot;
  cache::PageLease pages;
};
// The next num_tokens known tokens join a step, and some remain.
struct PlanChunk {
  cache::PageLease pages;
  int32_t num_tokens;
};
// The last num_tokens known tokens join a step, which draws the next token.
struct PlanLastChunk {
  cache::PageLease pages;
  int32_t num_tokens;
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
// Gives slot and pages up; everything is computed anew later.
struct Preempt {};
// The client no longer wants it.
struct Abort {};

}  // namespace tokenspeed::fsm
