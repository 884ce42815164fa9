// The state of a request whose type is known only at run time, and the bridge from there to transitions.h.
#pragma once

#include <type_traits>
#include <utility>
#include <variant>

#include "check/check.h"
#include "fsm/states.h"
#include "fsm/transitions.h"

namespace tokenspeed::fsm {

using RequestState =
    std::variant<Waiting, Prefilling, Decoding, InFlight<Prefilling>, InFlight<Decoding>,
                 InFlight<InFlight<Prefilling>>, InFlight<InFlight<Decoding>>, Draining, InFlight<Draining>, Finished>;

// Whether transitions.h has an edge for this event in this state.
template <class State, class Event>
concept Accepts = requires(State&& state, Event&& event) { apply(std::move(state), std::move(event)); };

// Follows the event's edge. The scheduler knows which states can be met; another one is a bug and aborts.
template <class Event>
void follow(RequestState& state, Event event) noexcept {
  state = std::visit(
      [&event]<class State>(State& from) -> RequestState {
        if constexpr (Accepts<State, Event>) {
          return apply(std::move(from), std::move(event));
        } else {
          TS_UNREACHABLE("an event met a request in a state that has no edge for it");
        }
      },
      state);
}

namespace detail {

// A state without its InFlight layers, and how many steps in flight use it.
template <class State>
struct Layers {
  using Phase = State;
  static constexpr int kSteps = std::is_same_v<State, Draining> ? 1 : 0;
  static const Phase& phase(const State& state) noexcept { return state; }
};
template <class Next>
struct Layers<InFlight<Next>> {
  using Phase = typename Layers<Next>::Phase;
  static constexpr int kSteps = 1 + Layers<Next>::kSteps;
  static const Phase& phase(const InFlight<Next>& state) noexcept { return Layers<Next>::phase(state.next); }
};

}  // namespace detail

// What the request holds on the device, or null.
inline const Holding* holding(const RequestState& state) noexcept {
  return std::visit(
      []<class State>(const State& s) -> const Holding* {
        if constexpr (requires { detail::Layers<State>::phase(s).held; }) return &detail::Layers<State>::phase(s).held;
        return nullptr;
      },
      state);
}

// Whether the request is in `Phase`, with or without steps in flight.
template <class Phase>
bool is(const RequestState& state) noexcept {
  return std::visit(
      []<class State>(const State&) { return std::is_same_v<Phase, typename detail::Layers<State>::Phase>; }, state);
}

// Steps in flight that use the request.
inline int num_steps_in_flight(const RequestState& state) noexcept {
  return std::visit([]<class State>(const State&) { return detail::Layers<State>::kSteps; }, state);
}

// Its end has been reported: no event of it may reach the engine any more.
inline bool has_ended(const RequestState& state) noexcept { return is<Draining>(state) || is<Finished>(state); }

inline const char* name(const RequestState& state) noexcept {
  if (is<Waiting>(state)) return "waiting";
  if (is<Prefilling>(state)) return "prefilling";
  if (is<Decoding>(state)) return "decoding";
  if (is<Draining>(state)) return "draining";
  return "finished";
}

}  // namespace tokenspeed::fsm
