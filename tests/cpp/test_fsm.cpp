// The states and edges of a request: exactly the ones that docs/scheduler.md draws, and who frees what.
#include "fsm/request_state.h"

#include <type_traits>
#include <utility>
#include <variant>

#include "death.h"
#include "test.h"

using namespace tokenspeed::fsm;
using tokenspeed::cache::PagePool;
using tokenspeed::cache::SlotPool;
using tokenspeed::testing::aborts_with;

namespace {

using InFlightP = InFlight<Prefilling>;
using InFlightD = InFlight<Decoding>;
using TwiceP = InFlight<InFlight<Prefilling>>;
using TwiceD = InFlight<InFlight<Decoding>>;
using DrainingTwice = InFlight<Draining>;

template <class T>
constexpr bool is_move_only = !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T> &&
                              std::is_nothrow_move_constructible_v<T> && std::is_nothrow_move_assignable_v<T>;
template <class... T>
constexpr bool all_move_only = (is_move_only<T> && ...);
static_assert(all_move_only<Waiting, Prefilling, Decoding, InFlightP, InFlightD, TwiceP, TwiceD, Draining,
                            DrainingTwice, Finished, RequestState>);
static_assert(all_move_only<Admit, PlanChunk, PlanLastChunk, PlanDecode>, "events carry leases");

// A state that holds leases cannot be conjured up without them.
static_assert(!std::is_default_constructible_v<Holding>);
static_assert(std::is_empty_v<Waiting> && std::is_empty_v<Finished>, "these hold nothing");

template <class State, class Event>
concept AcceptsLvalue = requires(State& state, Event&& event) { apply(state, std::move(event)); };

struct NoEdge {};
template <class State, class Event>
struct Edge {
  using To = NoEdge;
};
template <class State, class Event>
  requires Accepts<State, Event>
struct Edge<State, Event> {
  using To = decltype(apply(std::declval<State>(), std::declval<Event>()));
  static_assert(noexcept(apply(std::declval<State>(), std::declval<Event>())));
  static_assert(!AcceptsLvalue<State, Event>, "a transition consumes its state");
};
template <class State, class Event, class To>
constexpr bool edge = std::is_same_v<typename Edge<State, Event>::To, To>;

// The whole table: for each event, the next state from every state in the order of RequestState.
template <class Event, class... To>
constexpr bool row = []<class... State>(std::variant<State...>*) {
  return (edge<State, Event, To> && ...);
}(static_cast<RequestState*>(nullptr));

// clang-format off
using W = Waiting; using P = Prefilling; using D = Decoding; using F = Finished; using Dr = Draining; using o = NoEdge;
using IP = InFlightP; using ID = InFlightD; using IDr = DrainingTwice; using IIP = TwiceP; using IID = TwiceD;
//                               W  P   D   IP   ID   IIP  IID  Dr IDr F
static_assert(row<Admit,         P, o,  o,  o,   o,   o,   o,   o, o,  o>);
static_assert(row<PlanChunk,     o, IP, o,  IIP, o,   o,   o,   o, o,  o>);
static_assert(row<PlanLastChunk, o, ID, o,  IID, o,   o,   o,   o, o,  o>);
static_assert(row<PlanDecode,    o, o,  ID, o,   IID, o,   o,   o, o,  o>);
static_assert(row<Commit,        o, o,  o,  P,   D,   IP,  ID,  F, Dr, o>);
static_assert(row<Finish,        o, o,  o,  o,   F,   o,   Dr,  o, o,  o>);
static_assert(row<Fail,          o, o,  o,  F,   F,   Dr,  Dr,  o, o,  o>);
static_assert(row<Preempt,       o, W,  W,  o,   o,   o,   o,   o, o,  o>);
static_assert(row<Abort,         F, F,  F,  Dr,  Dr,  IDr, IDr, o, o,  o>);
// clang-format on

// Pools and a shorthand for acquiring from them.
struct Bench {
  PagePool pages{8};
  SlotPool slots{2};
  Admit admit(int32_t n) { return {std::move(*slots.acquire()), std::move(*pages.acquire(n))}; }
  tokenspeed::cache::PageLease more(int32_t n) { return std::move(*pages.acquire(n)); }
  bool is_all_free() const { return pages.num_free() == 8 && slots.num_free() == 2; }
};

}  // namespace

TEST(a_life_without_incident) {
  Bench b;
  RequestState s = Waiting{};
  follow(s, b.admit(1));
  follow(s, PlanChunk{b.more(0), 4});
  CHECK(is<Prefilling>(s) && num_steps_in_flight(s) == 1 && holding(s)->num_positions == 4);
  follow(s, Commit{});
  follow(s, PlanLastChunk{b.more(1), 2});
  CHECK(is<Decoding>(s) && holding(s)->num_positions == 6 && holding(s)->pages.num_pages() == 2);
  follow(s, Commit{});
  CHECK(num_steps_in_flight(s) == 0);
  follow(s, PlanDecode{b.more(0)});
  CHECK(holding(s)->num_positions == 7 && b.pages.num_free() == 6 && b.slots.num_free() == 1);
  follow(s, Finish{});
  CHECK(std::holds_alternative<Finished>(s) && holding(s) == nullptr && b.is_all_free());
}

TEST(an_end_with_a_second_step_in_flight_holds_the_pages) {
  Bench b;
  RequestState s = Waiting{};
  follow(s, b.admit(1));
  follow(s, PlanLastChunk{b.more(0), 2});
  follow(s, PlanDecode{b.more(1)});
  CHECK(num_steps_in_flight(s) == 2 && !has_ended(s));
  follow(s, Finish{});
  CHECK(has_ended(s) && std::holds_alternative<Draining>(s) && b.pages.num_free() == 6 && b.slots.num_free() == 1);
  follow(s, Commit{});
  CHECK(std::holds_alternative<Finished>(s) && b.is_all_free());
}

TEST(abort_with_two_steps_in_flight_waits_for_both) {
  Bench b;
  RequestState s = Waiting{};
  follow(s, b.admit(1));
  follow(s, PlanChunk{b.more(0), 2});
  follow(s, PlanChunk{b.more(1), 2});
  follow(s, Abort{});
  CHECK(has_ended(s) && num_steps_in_flight(s) == 2);
  follow(s, Commit{});
  CHECK(has_ended(s) && num_steps_in_flight(s) == 1 && b.pages.num_free() == 6);
  follow(s, Commit{});
  CHECK(std::holds_alternative<Finished>(s) && b.is_all_free());
}

TEST(abort_and_preempt_free_at_once_what_is_not_in_flight) {
  Bench b;
  RequestState s = Waiting{};
  follow(s, b.admit(3));
  follow(s, Preempt{});
  CHECK(std::holds_alternative<Waiting>(s) && b.is_all_free());
  follow(s, b.admit(3));
  CHECK(!b.is_all_free());
  follow(s, Abort{});
  CHECK(std::holds_alternative<Finished>(s) && b.is_all_free());
}

TEST(a_transition_called_directly_consumes_its_state) {
  Bench b;
  Prefilling prefilling = apply(Waiting{}, b.admit(2));
  InFlight<Decoding> decoding = apply(std::move(prefilling), PlanLastChunk{b.more(0), 1});
  CHECK(prefilling.held.pages.num_pages() == 0 && decoding.next.held.pages.num_pages() == 2);
  [[maybe_unused]] const Finished end = apply(std::move(decoding), Fail{});
  CHECK(b.is_all_free());  // although `decoding` is still in scope
}

TEST(an_edge_that_does_not_exist_aborts) {
  const char* text = "an event met a request in a state that has no edge for it";
  CHECK(aborts_with(text, [] {
    RequestState s = Waiting{};
    follow(s, Commit{});
  }));
  CHECK(aborts_with(text, [] {
    RequestState s = Finished{};
    follow(s, Abort{});
  }));
}

TEST_MAIN
