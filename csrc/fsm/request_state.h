// The state of a request whose type is known only at run time, and the bridge from there to transitions.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "check/check.h"
#include "fsm/states.h"
#include "fsm/transitions.h"

namespace tokenspeed::fsm {

// A state, whichever it is. Like a std::variant, but one that knows both types while it changes from one to the other:
// std::variant asks a table of functions for what to destroy, and a token takes two changes.
template <class... States>
class OneOf {
 public:
  static constexpr size_t kNumStates = sizeof...(States);
  template <class State>
  static constexpr size_t kIndexOf = [] {
    constexpr std::array<bool, kNumStates> kIs = {std::is_same_v<State, States>...};
    return static_cast<size_t>(std::find(kIs.begin(), kIs.end(), true) - kIs.begin());
  }();

  template <class State>
    requires(kIndexOf<State> < kNumStates)
  OneOf(State&& state) noexcept {
    hold(std::move(state));
  }
  ~OneOf();
  OneOf(const OneOf&) = delete;
  OneOf& operator=(const OneOf&) = delete;

  size_t index() const noexcept { return index_; }
  template <class State>
  State& as() noexcept {
    return *std::launder(reinterpret_cast<State*>(memory_));
  }
  template <class State>
  const State& as() const noexcept {
    return *std::launder(reinterpret_cast<const State*>(memory_));
  }

  // `now`, which is the state there is and has been moved from, gives way to `next`.
  template <class Now, class Next>
  void change(Now& now, Next next) noexcept {
    std::destroy_at(&now);
    hold(std::move(next));
  }

 private:
  template <class State>
  void hold(State&& state) noexcept {
    new (memory_) State(std::move(state));
    index_ = kIndexOf<State>;
  }

  alignas(std::max({alignof(States)...})) std::byte memory_[std::max({sizeof(States)...})];
  uint8_t index_;
};

namespace detail {

// Every state. Those that decodes pass through at every step come first: dispatch asks in this order.
template <int... kSteps>
OneOf<Decoding, InFlight<Decoding, kSteps + 1>..., Prefilling, InFlight<Prefilling, kSteps + 1>...,
      InFlight<Draining, kSteps + 1>..., Waiting, Preempted, Finished>
every_state(std::integer_sequence<int, kSteps...>);

// Calls `visitor` with the state that there is: the first of `State, More...` that it is.
template <class State, class... More, class Any, class Visitor>
constexpr decltype(auto) dispatch_among(Any& state, Visitor&& visitor) noexcept {
  if constexpr (sizeof...(More) > 0) {
    if (state.index() != std::remove_const_t<Any>::template kIndexOf<State>) {
      return dispatch_among<More...>(state, visitor);
    }
  }
  return visitor(state.template as<State>());
}
template <class... States, class Visitor>
constexpr decltype(auto) dispatch(OneOf<States...>& state, Visitor&& visitor) noexcept {
  return dispatch_among<States...>(state, visitor);
}
template <class... States, class Visitor>
constexpr decltype(auto) dispatch(const OneOf<States...>& state, Visitor&& visitor) noexcept {
  return dispatch_among<States...>(state, visitor);
}

}  // namespace detail

template <class... States>
OneOf<States...>::~OneOf() {
  detail::dispatch(*this, [](auto& state) { std::destroy_at(&state); });
}

using RequestState = decltype(detail::every_state(std::make_integer_sequence<int, kMaxInFlight>{}));

// Whether transitions.h has an edge for this event in this state.
template <class State, class Event>
concept Accepts = requires(State&& state, Event&& event) { apply(std::move(state), std::move(event)); };

// Follows the event's edge. The scheduler knows which states can be met; another one is a bug and aborts.
template <class Event>
void follow(RequestState& state, Event event) noexcept {
  detail::dispatch(state, [&]<class State>(State& current) {
    if constexpr (Accepts<State, Event>) {
      state.change(current, apply(std::move(current), std::move(event)));
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
    using Layers = detail::Layers<State>;
    if constexpr (requires { Layers::phase(s).place; }) return Layers::phase(s).place.get();
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
  static constexpr uint32_t of(const OneOf<States...>*) noexcept {
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
