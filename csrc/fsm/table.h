// The transition table as data, read off the overloads in transitions.h: for docs and tests.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "fsm/request_state.h"

namespace tokenspeed::fsm {

struct TableEdge {
  std::string from, event, to;  // states as "decoding" or "decoding+2": with 2 steps in flight
};

namespace detail {

template <class State>
std::string state_name() {
  const std::string phase = phase_name<typename Layers<State>::Phase>();
  return Layers<State>::kSteps == 0 ? phase : phase + "+" + std::to_string(Layers<State>::kSteps);
}

template <class State, class Event>
void add_edge(std::vector<TableEdge>& edges, const char* event) {
  if constexpr (Accepts<State, Event>) {
    using Next = decltype(apply(std::declval<State>(), std::declval<Event>()));
    edges.push_back({state_name<State>(), event, state_name<Next>()});
  }
}

template <class State>
void add_edges(std::vector<TableEdge>& edges) {
  add_edge<State, Admit>(edges, "admit");
  add_edge<State, PlanChunk>(edges, "plan_chunk");
  add_edge<State, PlanLastChunk>(edges, "plan_last_chunk");
  add_edge<State, PlanDecode>(edges, "plan_decode");
  add_edge<State, Commit>(edges, "commit");
  add_edge<State, Finish>(edges, "finish");
  add_edge<State, Fail>(edges, "fail");
  add_edge<State, Preempt>(edges, "preempt");
  add_edge<State, Abort>(edges, "abort");
}

template <class... States>
std::vector<TableEdge> table_of(const OneOf<States...>*) {
  std::vector<TableEdge> edges;
  (add_edges<States>(edges), ...);
  return edges;
}

}  // namespace detail

// Every edge, in the order of states and events.
inline std::vector<TableEdge> transition_table() { return detail::table_of(static_cast<RequestState*>(nullptr)); }

}  // namespace tokenspeed::fsm
