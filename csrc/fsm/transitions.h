// Every legal edge of a request's life, one overload each. There is no catch-all: an edge that is not here does not
// compile. A transition consumes its state; leases that the next state does not take are freed. The diagram in
// docs/scheduler.md is drawn from these overloads (table.h).
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

inline Place grown(Place&& place, cache::PageLease&& pages) noexcept {
  place->pages.absorb(std::move(pages));
  return std::move(place);
}

// `Phase` with kSteps planned steps that use it; with none it stands alone.
template <class Phase, int kSteps>
struct With {
  using Type = InFlight<Phase, kSteps>;
  static Type make(Phase&& phase) noexcept { return {std::move(phase)}; }
};
template <class Phase>
struct With<Phase, 0> {
  using Type = Phase;
  static Type make(Phase&& phase) noexcept { return std::move(phase); }
};

// One step fewer uses it.
template <class Phase, int kSteps>
auto one_less(InFlight<Phase, kSteps>&& s) noexcept {
  return With<Phase, kSteps - 1>::make(std::move(s.phase));
}

}  // namespace detail

// ---- the queue and the device ----
inline Prefilling apply(Waiting&&, Admit&& e) noexcept { return {std::move(e.place)}; }
inline Prefilling apply(Preempted&&, Admit&& e) noexcept { return {std::move(e.place)}; }
inline Preempted apply(Prefilling&& s, Preempt&&) noexcept { return detail::free_leases(std::move(s)), Preempted{}; }
inline Preempted apply(Decoding&& s, Preempt&&) noexcept { return detail::free_leases(std::move(s)), Preempted{}; }

// ---- a step is planned: the first that uses the request, or one more ----
inline InFlight<Prefilling, 1> apply(Prefilling&& s, PlanChunk&& e) noexcept {
  return {{detail::grown(std::move(s.place), std::move(e.pages))}};
}
inline InFlight<Decoding, 1> apply(Prefilling&& s, PlanLastChunk&& e) noexcept {
  return {{detail::grown(std::move(s.place), std::move(e.pages))}};
}
inline InFlight<Decoding, 1> apply(Decoding&& s, PlanDecode&& e) noexcept {
  return {{detail::grown(std::move(s.place), std::move(e.pages))}};
}
template <int kSteps>
  requires(kSteps < kMaxInFlight)
InFlight<Prefilling, kSteps + 1> apply(InFlight<Prefilling, kSteps>&& s, PlanChunk&& e) noexcept {
  return {{detail::grown(std::move(s.phase.place), std::move(e.pages))}};
}
template <int kSteps>
  requires(kSteps < kMaxInFlight)
InFlight<Decoding, kSteps + 1> apply(InFlight<Prefilling, kSteps>&& s, PlanLastChunk&& e) noexcept {
  return {{detail::grown(std::move(s.phase.place), std::move(e.pages))}};
}
template <int kSteps>
  requires(kSteps < kMaxInFlight)
InFlight<Decoding, kSteps + 1> apply(InFlight<Decoding, kSteps>&& s, PlanDecode&& e) noexcept {
  return {{detail::grown(std::move(s.phase.place), std::move(e.pages))}};
}

// ---- the oldest step commits, and the request goes on ----
template <int kSteps>
auto apply(InFlight<Prefilling, kSteps>&& s, Commit&&) noexcept {
  return detail::one_less(std::move(s));
}
template <int kSteps>
auto apply(InFlight<Decoding, kSteps>&& s, Commit&&) noexcept {
  return detail::one_less(std::move(s));
}

// ---- it ends: at once where no other step uses it, else it drains ----
inline Finished apply(InFlight<Decoding, 1>&& s, Finish&&) noexcept {
  return detail::free_leases(std::move(s)), Finished{};
}
template <int kSteps>
  requires(kSteps > 1)
InFlight<Draining, kSteps - 1> apply(InFlight<Decoding, kSteps>&& s, Finish&&) noexcept {
  return {{std::move(s.phase.place)}};
}
template <class Phase>
  requires(!std::is_same_v<Phase, Draining>)
Finished apply(InFlight<Phase, 1>&& s, Fail&&) noexcept {
  return detail::free_leases(std::move(s)), Finished{};
}
template <class Phase, int kSteps>
  requires(kSteps > 1 && !std::is_same_v<Phase, Draining>)
InFlight<Draining, kSteps - 1> apply(InFlight<Phase, kSteps>&& s, Fail&&) noexcept {
  return {{std::move(s.phase.place)}};
}
inline Finished apply(Waiting&&, Abort&&) noexcept { return {}; }
inline Finished apply(Preempted&&, Abort&&) noexcept { return {}; }
inline Finished apply(Prefilling&& s, Abort&&) noexcept { return detail::free_leases(std::move(s)), Finished{}; }
inline Finished apply(Decoding&& s, Abort&&) noexcept { return detail::free_leases(std::move(s)), Finished{}; }
template <class Phase, int kSteps>
  requires(!std::is_same_v<Phase, Draining>)
InFlight<Draining, kSteps> apply(InFlight<Phase, kSteps>&& s, Abort&&) noexcept {
  return {{std::move(s.phase.place)}};
}

// ---- a step that still used an ended request is over, well or badly ----
inline Finished apply(InFlight<Draining, 1>&& s, Commit&&) noexcept {
  return detail::free_leases(std::move(s)), Finished{};
}
template <int kSteps>
  requires(kSteps > 1)
InFlight<Draining, kSteps - 1> apply(InFlight<Draining, kSteps>&& s, Commit&&) noexcept {
  return {{std::move(s.phase.place)}};
}

}  // namespace tokenspeed::fsm
