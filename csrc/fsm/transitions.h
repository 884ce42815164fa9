// Every legal edge of a request's life, one overload each. There is no catch-all: an edge that is not here
// does not compile. A transition consumes its state; leases that the next state does not take are freed.
#pragma once

#include <type_traits>
#include <utility>

#include "fsm/states.h"

namespace tokenspeed::fsm {

namespace detail {

template <class State>
void free_leases(State&& state) noexcept {
  [[maybe_unused]] const std::remove_cvref_t<State> gone{std::move(state)};
}

inline Holding grown(Holding&& held, cache::PageLease&& pages, int32_t num_tokens) noexcept {
  held.pages.absorb(std::move(pages));
  held.num_positions += num_tokens;
  return std::move(held);
}

}  // namespace detail

// Queue and device.
inline Prefilling apply(Waiting&&, Admit&& e) noexcept { return {{std::move(e.slot), std::move(e.pages), 0}}; }
inline Waiting apply(Prefilling&& s, Preempt&&) noexcept { return detail::free_leases(std::move(s)), Waiting{}; }
inline Waiting apply(Decoding&& s, Preempt&&) noexcept { return detail::free_leases(std::move(s)), Waiting{}; }

// A step is planned while no other one uses the request.
inline InFlight<Prefilling> apply(Prefilling&& s, PlanChunk&& e) noexcept {
  return {{detail::grown(std::move(s.held), std::move(e.pages), e.num_tokens)}};
}
inline InFlight<Decoding> apply(Prefilling&& s, PlanLastChunk&& e) noexcept {
  return {{detail::grown(std::move(s.held), std::move(e.pages), e.num_tokens)}};
}
inline InFlight<Decoding> apply(Decoding&& s, PlanDecode&& e) noexcept {
  return {{detail::grown(std::move(s.held), std::move(e.pages), 1)}};
}

// A second step is planned while the first is in flight.
inline InFlight<InFlight<Prefilling>> apply(InFlight<Prefilling>&& s, PlanChunk&& e) noexcept {
  return {apply(std::move(s.next), std::move(e))};
}
inline InFlight<InFlight<Decoding>> apply(InFlight<Prefilling>&& s, PlanLastChunk&& e) noexcept {
  return {apply(std::move(s.next), std::move(e))};
}
inline InFlight<InFlight<Decoding>> apply(InFlight<Decoding>&& s, PlanDecode&& e) noexcept {
  return {apply(std::move(s.next), std::move(e))};
}

// The oldest step commits, and the request goes on.
inline Prefilling apply(InFlight<Prefilling>&& s, Commit&&) noexcept { return std::move(s.next); }
inline Decoding apply(InFlight<Decoding>&& s, Commit&&) noexcept { return std::move(s.next); }
inline InFlight<Prefilling> apply(InFlight<InFlight<Prefilling>>&& s, Commit&&) noexcept { return std::move(s.next); }
inline InFlight<Decoding> apply(InFlight<InFlight<Decoding>>&& s, Commit&&) noexcept { return std::move(s.next); }

// The oldest step commits, and its drawn token ends the request.
inline Finished apply(InFlight<Decoding>&& s, Finish&&) noexcept {
  return detail::free_leases(std::move(s)), Finished{};
}
inline Draining apply(InFlight<InFlight<Decoding>>&& s, Finish&&) noexcept { return {std::move(s.next.next.held)}; }

// The oldest step failed.
inline Finished apply(InFlight<Prefilling>&& s, Fail&&) noexcept {
  return detail::free_leases(std::move(s)), Finished{};
}
inline Finished apply(InFlight<Decoding>&& s, Fail&&) noexcept {
  return detail::free_leases(std::move(s)), Finished{};
}
inline Draining apply(InFlight<InFlight<Prefilling>>&& s, Fail&&) noexcept { return {std::move(s.next.next.held)}; }
inline Draining apply(InFlight<InFlight<Decoding>>&& s, Fail&&) noexcept { return {std::move(s.next.next.held)}; }

// The client left: at once where no step is in flight, else when the last one has run.
inline Finished apply(Waiting&&, Abort&&) noexcept { return {}; }
inline Finished apply(Prefilling&& s, Abort&&) noexcept { return detail::free_leases(std::move(s)), Finished{}; }
inline Finished apply(Decoding&& s, Abort&&) noexcept { return detail::free_leases(std::move(s)), Finished{}; }
inline Draining apply(InFlight<Prefilling>&& s, Abort&&) noexcept { return {std::move(s.next.held)}; }
inline Draining apply(InFlight<Decoding>&& s, Abort&&) noexcept { return {std::move(s.next.held)}; }
inline InFlight<Draining> apply(InFlight<InFlight<Prefilling>>&& s, Abort&&) noexcept {
  return {{std::move(s.next.next.held)}};
}
inline InFlight<Draining> apply(InFlight<InFlight<Decoding>>&& s, Abort&&) noexcept {
  return {{std::move(s.next.next.held)}};
}

// A step that still used an ended request is over, well or badly.
inline Finished apply(Draining&& s, Commit&&) noexcept { return detail::free_leases(std::move(s)), Finished{}; }
inline Draining apply(InFlight<Draining>&& s, Commit&&) noexcept { return std::move(s.next); }

}  // namespace tokenspeed::fsm
