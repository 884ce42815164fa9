// The state of a request whose type is known only at run time, and the bridge from there to transitions.h.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>
#include <variant>

#include "check/check.h"
#include "fsm/states.h"
#include "fsm/transitions.h"

namespace tokenspeed::fsm {

namespace detail {

// Every state. Those that decodes pass through at every step come first: dispatch asks in this order.
template <int... kSteps>
std::variant<Decoding, InFlight<Decoding, kSteps + 1>..., Prefilling, InFlight<Prefilling, kSteps + 1>...,
             InFlight<Draining, kSteps + 1>..., Waiting, Preempted, Finished>
every_state(std::integer_sequence<int, kSteps...>);

// Calls `visitor` with the state that there is. (std::visit calls through a table for so many, and inlines none.)
template <size_t kIndex = 0, class Variant, class Visitor>
constexpr decltype(auto) dispatch(Variant& state, Visitor&& visitor) noexcept {
  if constexpr (kIndex + 1 == std::variant_size_v<std::remove_const_t<Variant>>) {
    return visitor(*std::get_if<kIndex>(&state));
  } else {
    if (state.index() == kIndex) return visitor(*std::get_if<kIndex>(&state));
    return dispatch<kIndex + 1>(state, visitor);
  }
}

}  // namespace detail

using RequestState = decltype(detail::every_state(std::make_integer_sequence<int, kMaxInFlight>{}));

// Whether transitions.h has an edge for this event in this state.
template <class State, class Event>
concept Accepts = requires(State&& state, Event&& event) { apply(std::move(state), std::move(event)); };

// Follows the event's edge. The scheduler knows which states can be met; another one is a bug and aborts.
template <class Event>
void follow(RequestState& state, Event event) noexcept {
  detail::dispatch(state, [&]<class State>(State& current) {
    if constexpr (Accepts<State, Event>) {
      state = apply(std::move(current), std::move(event));
    } else {
      TS_UNREACHABLE("an event met a request in a state that has no edge for it");
    }
  });
}

namespace detail {

// A state's phase, and how many steps in flight use it.
template <class State>
struct Layers {
  using Phase = State;
  static constexpr int kSteps = 0;
  static const Phase& phase(const State& state) noexcept { return state; }
};
template <class P, int n>
struct Layers<InFlight<P, n>> {
  using Phase = P;
  static constexpr int kSteps = n;
  static const Phase& phase(const InFlight<P, n>& state) noexcept { return state.phase; }
};

}  // namespace detail

// What the request holds on the device, or null.
inline Holding* holding(const RequestState& state) noexcept {
  return detail::dispatch(state, []<class State>(const State& s) -> Holding* {
    if constexpr (requires { detail::Layers<State>::phase(s).place; }) return detail::Layers<State>::phase(s).place.get();
    return nullptr;
  });
}

namespace detail {

// A bit for each state that is in one of the phases.
template <class... Phases>
struct Mask {
  template <class State>
  static constexpr bool has = (std::is_same_v<Phases, typename Layers<State>::Phase> || ...);

  template <class... States>
  static constexpr uint32_t of(const std::variant<States...>*) noexcept {
    uint32_t mask = 0, bit = 1;
    ((mask |= has<States> ? bit : 0, bit <<= 1), ...);
    return mask;
  }
};

template <class... Phases>
bool is_any(const RequestState& state) noexcept {
  constexpr uint32_t kMask = Mask<Phases...>::of(static_cast<RequestState*>(nullptr));
  return (kMask >> state.index() & 1) != 0;
}

}  // namespace detail

// Whether the request is in `Phase`, with or without steps in flight.
template <class Phase>
bool is(const RequestState& state) noexcept {
  return detail::is_any<Phase>(state);
}

// Steps in flight that use the request.
inline int num_steps_in_flight(const RequestState& state) noexcept {
  return detail::dispatch(state, []<class State>(const State&) { return detail::Layers<State>::kSteps; });
}

// Its end has been reported: no event of it may reach the engine any more.
inline bool has_ended(const RequestState& state) noexcept { return detail::is_any<Draining, Finished>(state); }

template <class Phase>
constexpr const char* phase_name() noexcept {
  if constexpr (std::is_same_v<Phase, Waiting>) return "waiting";
  else if constexpr (std::is_same_v<Phase, Preempted>) return "preempted";
  else if constexpr (std::is_same_v<Phase, Prefilling>) return "prefilling";
  else if constexpr (std::is_same_v<Phase, Decoding>) return "decoding";
  else if constexpr (std::is_same_v<Phase, Draining>) return "draining";
  else return "finished";
}

inline const char* name(const RequestState& state) noexcept {
  return detail::dispatch(
      state, []<class State>(const State&) { return phase_name<typename detail::Layers<State>::Phase>(); });
}

}  // namespace tokenspeed::fsm
