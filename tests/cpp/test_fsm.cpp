// The states and edges of a request: exactly the ones that transitions.h has, what they free, and that none can fail.
#include "fsm/request_state.h"

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "death.h"
#include "fsm/table.h"
#include "test.h"

using namespace tokenspeed::fsm;
using tokenspeed::cache::PageLease;
using tokenspeed::cache::PagePool;
using tokenspeed::cache::PrefixIndex;
using tokenspeed::cache::PrefixRef;
using tokenspeed::cache::SlotPool;
using tokenspeed::testing::aborts_with;

namespace {

template <class T>
constexpr bool is_move_only = !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T> &&
                              std::is_nothrow_move_constructible_v<T> && std::is_nothrow_move_assignable_v<T>;
template <class... State>
constexpr bool all_move_only(OneOf<State...>*) {
  return (is_move_only<State> && ...);
}
static_assert(all_move_only(static_cast<RequestState*>(nullptr)));
static_assert(!std::is_copy_constructible_v<RequestState> && !std::is_copy_assignable_v<RequestState>);
static_assert(is_move_only<Admit> && is_move_only<PlanChunk> && is_move_only<PlanLastChunk> && is_move_only<PlanDecode>,
              "events carry leases");
static_assert(!std::is_default_constructible_v<Holding>, "a place cannot be conjured up without a slot");
static_assert(std::is_empty_v<Waiting> && std::is_empty_v<Preempted> && std::is_empty_v<Finished>);  // of no place
static_assert(sizeof(RequestState) == 2 * sizeof(void*), "states change at every step, and must be small");

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

// The whole table: for each event, the next state from every state in the order of RequestState.
template <class Event, class... To>
constexpr bool row = []<class... State>(OneOf<State...>*) {
  return (std::is_same_v<typename Edge<State, Event>::To, To> && ...);
}(static_cast<RequestState*>(nullptr));

// clang-format off
using W = Waiting; using V = Preempted; using P = Prefilling; using D = Decoding; using F = Finished; using o = NoEdge;
using P1 = InFlight<P, 1>; using P2 = InFlight<P, 2>; using P3 = InFlight<P, 3>;
using D1 = InFlight<D, 1>; using D2 = InFlight<D, 2>; using D3 = InFlight<D, 3>;
using E1 = InFlight<Draining, 1>; using E2 = InFlight<Draining, 2>; using E3 = InFlight<Draining, 3>;
static_assert(kMaxInFlight == 3);
//                               D   D1  D2  D3  P   P1  P2  P3  E1  E2  E3  W  V  F
static_assert(row<Admit,         o,  o,  o,  o,  o,  o,  o,  o,  o,  o,  o,  P, P, o>);
static_assert(row<PlanChunk,     o,  o,  o,  o,  P1, P2, P3, o,  o,  o,  o,  o, o, o>);
static_assert(row<PlanLastChunk, o,  o,  o,  o,  D1, D2, D3, o,  o,  o,  o,  o, o, o>);
static_assert(row<PlanDecode,    D1, D2, D3, o,  o,  o,  o,  o,  o,  o,  o,  o, o, o>);
static_assert(row<Commit,        o,  D,  D1, D2, o,  P,  P1, P2, F,  E1, E2, o, o, o>);
static_assert(row<Finish,        o,  F,  E1, E2, o,  o,  o,  o,  o,  o,  o,  o, o, o>);
static_assert(row<Fail,          o,  F,  E1, E2, o,  F,  E1, E2, o,  o,  o,  o, o, o>);
static_assert(row<Preempt,       V,  o,  o,  o,  V,  o,  o,  o,  o,  o,  o,  o, o, o>);
static_assert(row<Abort,         F,  E1, E2, E3, F,  E1, E2, E3, o,  o,  o,  F, F, o>);
// clang-format on

// Pools, and shorthands for acquiring from them.
struct Bench {
  PagePool pages{8};
  PrefixIndex index{pages, {.page_size = 2}};
  SlotPool slots{2};
  PlaceStore places{2};

  PageLease more(int32_t n) { return std::move(*pages.acquire(n)); }
  Admit admit(int32_t n) { return {places.hold(std::move(*slots.acquire()), PrefixRef{}, more(n))}; }
  bool is_all_free() const { return pages.num_free() == 8 && slots.num_free() == 2; }
};

}  // namespace

TEST(a_life_without_incident) {
  Bench b;
  RequestState s = Waiting{};
  CHECK(std::string(name(s)) == "waiting" && holding(s) == nullptr && !has_ended(s));
  follow(s, b.admit(1));
  follow(s, PlanChunk{b.more(0)});
  CHECK(is<Prefilling>(s) && num_steps_in_flight(s) == 1 && holding(s)->pages.num_pages() == 1);
  follow(s, Commit{});
  CHECK(std::string(name(s)) == "prefilling" && num_steps_in_flight(s) == 0);
  follow(s, PlanLastChunk{b.more(1)});
  CHECK(is<Decoding>(s) && !is<Prefilling>(s) && holding(s)->pages.num_pages() == 2);
  follow(s, Commit{});
  CHECK(num_steps_in_flight(s) == 0);
  follow(s, PlanDecode{b.more(0)});
  CHECK(std::string(name(s)) == "decoding" && b.pages.num_free() == 6 && b.slots.num_free() == 1);
  follow(s, Finish{});
  CHECK(is<Finished>(s) && has_ended(s) && holding(s) == nullptr && b.is_all_free());
}

TEST(an_end_holds_the_pages_for_the_steps_that_are_left) {
  for (const bool fails : {false, true}) {
    Bench b;
    RequestState s = Waiting{};
    follow(s, b.admit(1));
    follow(s, PlanLastChunk{b.more(0)});
    follow(s, PlanDecode{b.more(1)});
    follow(s, PlanDecode{b.more(1)});
    CHECK(num_steps_in_flight(s) == 3 && !has_ended(s));
    fails ? follow(s, Fail{}) : follow(s, Finish{});
    CHECK(has_ended(s) && is<Draining>(s) && num_steps_in_flight(s) == 2 && b.pages.num_free() == 5);
    follow(s, Commit{});
    CHECK(is<Draining>(s) && b.pages.num_free() == 5 && b.slots.num_free() == 1);
    follow(s, Commit{});
    CHECK(is<Finished>(s) && b.is_all_free());
  }
}

TEST(abort_waits_for_every_step_in_flight) {
  Bench b;
  RequestState s = Waiting{};
  follow(s, b.admit(1));
  for (int i = 0; i < 3; ++i) follow(s, PlanChunk{b.more(1)});
  follow(s, Abort{});
  for (int left = 3; left > 0; --left) {
    CHECK(has_ended(s) && std::string(name(s)) == "draining" && num_steps_in_flight(s) == left);
    CHECK(b.pages.num_free() == 4 && holding(s) != nullptr);
    follow(s, Commit{});
  }
  CHECK(is<Finished>(s) && b.is_all_free());
}

TEST(abort_and_preempt_free_at_once_what_is_not_in_flight) {
  Bench b;
  RequestState s = Waiting{};
  follow(s, b.admit(3));
  follow(s, Preempt{});
  CHECK(is<Preempted>(s) && std::string(name(s)) == "preempted" && b.is_all_free());
  follow(s, b.admit(3));
  CHECK(!b.is_all_free());
  follow(s, Abort{});
  CHECK(is<Finished>(s) && b.is_all_free());
  RequestState waiting = Waiting{}, preempted = Preempted{};
  follow(waiting, Abort{});
  follow(preempted, Abort{});
  CHECK(is<Finished>(waiting) && is<Finished>(preempted));
}

TEST(a_place_keeps_its_cached_path_and_lets_go_of_it) {
  Bench b;
  const int32_t tokens[] = {4, 5};
  {
    RequestState s = Waiting{};
    PrefixRef root = std::move(*b.index.take("", b.index.find("", {}, 0)));
    follow(s, Admit{b.places.hold(std::move(*b.slots.acquire()), std::move(root), b.more(2))});
    Holding& held = *holding(s);
    CHECK(!b.index.publish(held.prefix, tokens, held.pages.take_front()).duplicate);
    CHECK(held.prefix.num_pages() == 1 && held.pages.num_pages() == 1 && b.index.num_evictable() == 0);
    follow(s, Preempt{});
    CHECK(b.index.num_evictable() == 1 && b.pages.num_free() == 7);  // what was published outlives its request
  }
  CHECK(b.index.find("", tokens, 1).num_pages == 1);
}

TEST(a_transition_called_directly_consumes_its_state) {
  Bench b;
  Prefilling prefilling = apply(Waiting{}, b.admit(2));
  InFlight<Decoding, 1> decoding = apply(std::move(prefilling), PlanLastChunk{b.more(0)});
  CHECK(prefilling.place == nullptr && decoding.phase.place->pages.num_pages() == 2);
  [[maybe_unused]] const Finished end = apply(std::move(decoding), Fail{});
  CHECK(decoding.phase.place == nullptr && b.is_all_free());  // although `decoding` is still in scope
}

TEST(an_edge_that_does_not_exist_aborts) {
  const char* text = "an event met a request in a state that has no edge for it";
  CHECK(aborts_with(text, [] {
    RequestState s = Waiting{};
    follow(s, Commit{});
  }));
  CHECK(aborts_with(text, [] {
    RequestState s = Preempted{};
    follow(s, Preempt{});
  }));
  CHECK(aborts_with(text, [] {
    RequestState s = Finished{};
    follow(s, Abort{});
  }));
}

// What docs and Python see is read off the same overloads.
TEST(the_table_as_data_has_every_edge) {
  const auto edges = transition_table();
  const auto has = [&](const char* from, const char* event, const char* to) {
    return std::count_if(edges.begin(), edges.end(), [&](const TableEdge& e) {
             return e.from == from && e.event == event && e.to == to;
           }) == 1;
  };
  CHECK(edges.size() == 2 + 3 + 3 + 3 + 9 + 3 + 6 + 2 + 10);  // admit, three ways to plan, commit, finish, fail, ...
  CHECK(has("waiting", "admit", "prefilling") && has("preempted", "admit", "prefilling"));
  CHECK(has("prefilling+2", "plan_last_chunk", "decoding+3") && has("decoding", "plan_decode", "decoding+1"));
  CHECK(has("decoding+3", "finish", "draining+2") && has("draining+1", "commit", "finished"));
  CHECK(has("decoding", "preempt", "preempted") && has("decoding+3", "abort", "draining+3"));
}

TEST_MAIN
