// Python's view of the simulator. Runs release the GIL: they take seconds.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <tuple>
#include <utility>

#include "simulate/simulator.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace tokenspeed::simulate;
using tokenspeed::scheduler::SchedulerConfig;

using BucketTuple = std::tuple<bool, int32_t, int32_t, int32_t, double>;

StepCosts make_costs(const std::vector<BucketTuple>& buckets, double per_context_token, double per_pair,
                     double per_page_move) {
  std::vector<BucketCost> costs;
  for (const auto& [is_decode, tokens, seqs, rows, seconds] : buckets) {
    costs.push_back({is_decode, tokens, seqs, rows, seconds});
  }
  return {std::move(costs), per_context_token, per_pair, per_page_move};
}

void make_simulator(Simulator* self, const SchedulerConfig& scheduler, const StepCosts& costs, int32_t num_replicas,
                    const std::string& routing, uint64_t seed, int32_t load_tokens, int32_t block_tokens,
                    bool waits_when_full, bool keeps_delays, int64_t interval_ns, int32_t num_threads) {
  const SimulatorConfig config{
      .replica = {.scheduler = scheduler, .block_tokens = block_tokens, .waits_when_full = waits_when_full},
      .router = {.routing = routing_named(routing),
                 .num_replicas = num_replicas,
                 .seed = seed,
                 .load_tokens = load_tokens},
      .interval_ns = interval_ns,
      .keeps_delays = keeps_delays,
      .num_threads = num_threads};
  new (self) Simulator(config, costs);
}

void add(Simulator& self, int64_t timestamp_ns, int32_t num_input, int32_t num_output, std::vector<uint64_t> blocks,
         int32_t num_prompt_blocks, int32_t priority, int32_t tenant, int64_t deadline_ns, int64_t session,
         int64_t delay_ns) {
  self.add({.timestamp_ns = timestamp_ns,
            .delay_ns = delay_ns,
            .deadline_ns = deadline_ns,
            .session = session,
            .num_input = num_input,
            .num_output = num_output,
            .priority = priority,
            .tenant = tenant,
            .num_prompt_blocks = num_prompt_blocks,
            .blocks = std::move(blocks)});
}

// A copy: the simulator goes on, and its arrays move.
template <class T>
nb::bytes copy_of(const std::vector<T>& column) {
  return nb::bytes(static_cast<const void*>(column.data()), column.size() * sizeof(T));
}

nb::dict records(const Simulator& self) {
  const Records& all = self.records();
  nb::dict columns;
  for (const auto& [name, column] : {std::pair("arrival", &all.arrival), std::pair("admitted", &all.admitted),
                                     std::pair("first_token", &all.first_token), std::pair("end", &all.end)}) {
    columns[name] = copy_of(*column);
  }
  for (const auto& [name, column] :
       {std::pair("num_input", &all.num_input), std::pair("num_output", &all.num_output),
        std::pair("num_cached", &all.num_cached), std::pair("num_preemptions", &all.num_preemptions),
        std::pair("tenant", &all.tenant), std::pair("replica", &all.replica)}) {
    columns[name] = copy_of(*column);
  }
  columns["status"] = copy_of(all.status);
  return columns;
}

nb::list timeline(const Simulator& self) {
  nb::list samples;
  for (const Sample& s : self.timeline()) {
    samples.append(nb::make_tuple(s.time_ns, s.load.running, s.load.waiting, s.load.used_pages, s.load.cached_pages));
  }
  return samples;
}

nb::list totals(const Simulator& self) {
  nb::list replicas;
  for (const auto& replica : self.replicas()) {
    const ReplicaTotals& t = replica->totals();
    const auto& c = replica->counters();
    nb::dict one;
    one["steps"] = t.steps;
    one["busy_ns"] = t.busy_ns;
    one["step_tokens"] = t.step_tokens;
    one["bucket_tokens"] = t.bucket_tokens;
    one["steps_by_bucket"] = t.steps_by_bucket;
    one["preemptions"] = c.preemptions;
    one["prompt_tokens"] = c.prompt_tokens;
    one["cached_tokens"] = c.cached_tokens;
    one["restored_tokens"] = c.restored_tokens;
    one["computed_tokens"] = c.computed_tokens;
    one["expired"] = c.expired;
    replicas.append(one);
  }
  return replicas;
}

std::tuple<int32_t, int64_t> step_ns(const StepCosts& self, int32_t num_tokens, int32_t num_seqs,
                                     int32_t num_logit_rows, bool decode_only, int64_t context_tokens, double pairs,
                                     int32_t num_page_moves) {
  const StepSize step{num_tokens, num_seqs, num_logit_rows, decode_only, context_tokens, pairs, num_page_moves};
  const int32_t bucket = self.bucket_of(step);
  return {bucket, self.step_ns(step, bucket)};
}

}  // namespace

void bind_simulate(nb::module_& m) {
  nb::class_<StepCosts>(m, "StepCosts", "What a step takes in the simulator: seconds of its bucket and its attention.")
      .def(
          "__init__",
          [](StepCosts* self, const std::vector<BucketTuple>& buckets, double per_context_token, double per_pair,
             double per_page_move) {
            new (self) StepCosts(make_costs(buckets, per_context_token, per_pair, per_page_move));
          },
          "buckets"_a, "per_context_token"_a, "per_pair"_a, "per_page_move"_a,
          "buckets: (is_decode, num_tokens, num_seqs, num_logit_rows, seconds). ValueError for senseless ones.")
      .def("step_ns", &step_ns, "num_tokens"_a, "num_seqs"_a, "num_logit_rows"_a, "decode_only"_a,
           "context_tokens"_a = 0, "pairs"_a = 0.0, "num_page_moves"_a = 0,
           "(place of its bucket, nanoseconds) of a step. Buckets are numbered decode first, then by size.\n"
           "ValueError when none covers it.");

  nb::class_<Simulator>(m, "Simulator",
                        "Replicas that run the real scheduler in virtual time (docs/simulator.md). Times are\n"
                        "nanoseconds; -1 stands for none or never.")
      .def("__init__", &make_simulator, "scheduler"_a, "costs"_a, nb::kw_only(), "num_replicas"_a, "routing"_a,
           "seed"_a, "load_tokens"_a, "block_tokens"_a, "waits_when_full"_a, "keeps_delays"_a, "interval_ns"_a,
           "num_threads"_a)
      .def("add", &add, "timestamp_ns"_a, "num_input"_a, "num_output"_a, "blocks"_a, "num_prompt_blocks"_a,
           "priority"_a = 0, "tenant"_a = 0, "deadline_ns"_a = -1, "session"_a = -1, "delay_ns"_a = -1,
           "The next request of the trace, in order of timestamps.")
      .def(
          "run", [](Simulator& self, int64_t until_ns, int64_t max_rounds) { return self.run(until_ns, max_rounds); },
          "until_ns"_a, "max_rounds"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Runs the rounds that end by until_ns, max_rounds at most; whatever arrives before until_ns must have been\n"
          "added. False: rounds are left.")
      .def("records", &records, nb::sig("def records(self) -> dict[str, bytes]"),
           "What became of every request: int64 arrival, admitted, first_token, end; int32 num_input, num_output,\n"
           "num_cached, num_preemptions, tenant, replica; uint8 status (open, finished, refused, too long, expired).")
      .def("timeline", &timeline, nb::sig("def timeline(self) -> list[tuple[int, int, int, int, int]]"),
           "(time, running, waiting, used pages, cached pages) of the whole fleet, every so often.")
      .def("totals", &totals, nb::sig("def totals(self) -> list[dict[str, typing.Any]]"), "Sums of every replica.")
      .def_prop_ro("num_added", &Simulator::num_added)
      .def_prop_ro("num_ended", &Simulator::num_ended)
      .def_prop_ro("now_ns", &Simulator::now_ns);
}
