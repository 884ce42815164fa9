// Python's view of the scheduler. Nothing here releases the GIL: every call takes microseconds, and other threads may
// read counts at any time.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "fsm/table.h"
#include "scheduler/scheduler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace tokenspeed::scheduler;

// A read-only memoryview of the first `count` elements. It holds the Step, and so the scheduler, alive.
template <class T>
nb::object view_of(nb::handle step, const T* array, int64_t count) {
  using View = nb::ndarray<nb::memview, const T, nb::ndim<1>, nb::c_contig>;
  return nb::cast(View(array, {static_cast<size_t>(count)}, step), nb::rv_policy::reference);
}

template <class T>
void def_array(nb::class_<Step>& type, const char* name, T* Step::*array, int64_t (*count)(const Step&)) {
  type.def_prop_ro(
      name,
      [array, count](nb::handle self) {
        const Step& step = *nb::inst_ptr<Step>(self);
        return view_of(self, step.*array, count(step));
      },
      nb::sig(("def " + std::string(name) + "(self) -> memoryview").c_str()));
}

int64_t tokens_of(const Step& s) { return s.num_tokens; }
int64_t seqs_of(const Step& s) { return s.num_seqs; }
int64_t bounds_of(const Step& s) { return int64_t{s.num_seqs} + 1; }
int64_t pages_of(const Step& s) { return int64_t{s.num_seqs} * s.pages_per_sequence; }
int64_t rows_of(const Step& s) { return s.num_logit_rows; }
int64_t adjustments_of(const Step& s) { return s.num_adjustments; }
int64_t bias_bounds_of(const Step& s) { return int64_t{s.num_adjustments} + 1; }
int64_t biases_of(const Step& s) { return s.num_biases; }
int64_t masks_of(const Step& s) { return int64_t{s.num_masks} * s.mask_words; }

nb::list row_list(const Step& step) {
  nb::list list;
  for (int32_t i = 0; i < step.num_logit_rows; ++i) {
    const RowInfo& row = step.rows[static_cast<size_t>(i)];
    list.append(nb::make_tuple(row.request_id, row.is_prompt_row, step.draw_position[i]));
  }
  return list;
}

nb::list admissions_of(const Step& step) {
  nb::list list;
  for (const Admission& a : step.decision.admitted) {
    list.append(nb::make_tuple(a.request_id, a.num_cached_tokens, a.num_restored_tokens, a.waited_ns, a.is_resumed));
  }
  return list;
}

const char* held_name(Held held) {
  static constexpr const char* kNames[] = {"nothing waits", "tokens",      "logit rows", "pages",
                                           "slots",         "chunk first", "decodes"};
  return kNames[static_cast<size_t>(held)];
}

nb::dict decision_of(const Step& step) {
  const Decision& d = step.decision;
  nb::dict dict;
  dict["step"] = step.id;
  dict["now_ns"] = d.now_ns;
  dict["decodes"] = d.num_decodes;
  dict["chunks"] = d.num_chunks;
  dict["decode_tokens"] = d.num_decode_tokens;
  dict["prefill_tokens"] = d.num_prefill_tokens;
  dict["waiting"] = d.num_waiting;
  dict["running"] = d.num_running;
  dict["free_pages"] = d.num_free_pages;
  dict["cached_pages"] = d.num_cached_pages;
  dict["evicted_pages"] = d.num_evicted_pages;
  dict["moved_out"] = step.moves_out.size();
  dict["moved_in"] = step.moves_in.size();
  dict["held"] = held_name(d.held);
  nb::list admitted, preempted;
  for (const Admission& a : d.admitted) {
    nb::dict one;
    one["request"] = a.request_id;
    one["cached_tokens"] = a.num_cached_tokens;
    one["restored_tokens"] = a.num_restored_tokens;
    one["waited_ns"] = a.waited_ns;
    one["resumed"] = a.is_resumed;
    admitted.append(one);
  }
  for (const int64_t id : d.preempted) preempted.append(id);
  dict["admitted"] = admitted;
  dict["preempted"] = preempted;
  return dict;
}

std::vector<std::pair<int32_t, int32_t>> moves_of(const std::vector<PageMove>& moves) {
  std::vector<std::pair<int32_t, int32_t>> pairs;
  for (const PageMove& move : moves) pairs.emplace_back(move.device_page, move.host_page);
  return pairs;
}

void bind_step(nb::module_& m) {
  nb::class_<Step> step(m, "Step",
                        "One forward pass. Arrays are read-only memoryviews named as tokenspeed/step.py INPUTS;\n"
                        "page_table and token_masks are flat. They are the scheduler's, which writes them anew once the\n"
                        "step has committed or failed, and keep its memory alive.");
  step.def_ro("id", &Step::id)
      .def_ro("num_tokens", &Step::num_tokens)
      .def_ro("num_seqs", &Step::num_seqs)
      .def_ro("num_logit_rows", &Step::num_logit_rows)
      .def_prop_ro("is_decode_only", &Step::is_decode_only, "Every sequence is one decode: no prefill chunk.")
      .def_prop_ro("rows", &row_list, nb::sig("def rows(self) -> list[tuple[int, bool, int]]"),
                   "(request_id, is_prompt_row, position of the token asked for or drawn) of every logit row.")
      .def_prop_ro("num_admitted", [](const Step& s) { return s.decision.admitted.size(); })
      .def_prop_ro("admitted", &admissions_of, nb::sig("def admitted(self) -> list[tuple[int, int, int, int, bool]]"),
                   "Of each request that left the queue with this step: (request_id, tokens found in the prefix index,\n"
                   "tokens of these that come back from the host tier, nanoseconds waited, whether it was preempted).")
      .def_prop_ro("decision", &decision_of, nb::sig("def decision(self) -> dict[str, object]"),
                   "What was decided with the step, and why no more: counts, admitted and preempted requests.")
      .def_prop_ro("num_moves", [](const Step& s) { return s.moves_out.size() + s.moves_in.size(); })
      .def_prop_ro(
          "moves_out", [](const Step& s) { return moves_of(s.moves_out); },
          "(device page, host page) to copy from the device before the step runs, ahead of all moves_in.")
      .def_prop_ro(
          "moves_in", [](const Step& s) { return moves_of(s.moves_in); },
          "(device page, host page) to copy to the device before the step runs.");
  def_array(step, "token_ids", &Step::token_ids, tokens_of);
  def_array(step, "positions", &Step::positions, tokens_of);
  def_array(step, "slot_mapping", &Step::slot_mapping, tokens_of);
  def_array(step, "cu_seqlens", &Step::cu_seqlens, bounds_of);
  def_array(step, "context_lens", &Step::context_lens, seqs_of);
  def_array(step, "page_table", &Step::page_table, pages_of);
  def_array(step, "logit_rows", &Step::logit_rows, rows_of);
  def_array(step, "logit_target", &Step::logit_target, rows_of);
  def_array(step, "temperature", &Step::temperature, rows_of);
  def_array(step, "top_p", &Step::top_p, rows_of);
  def_array(step, "min_p", &Step::min_p, rows_of);
  def_array(step, "top_k", &Step::top_k, rows_of);
  def_array(step, "seed", &Step::seed, rows_of);
  def_array(step, "draw_position", &Step::draw_position, rows_of);
  def_array(step, "num_logprobs", &Step::num_logprobs, rows_of);
  def_array(step, "state_slot", &Step::state_slot, rows_of);
  def_array(step, "adjustment", &Step::adjustment, rows_of);
  def_array(step, "adjust_seq", &Step::adjust_seq, adjustments_of);
  def_array(step, "adjust_row", &Step::adjust_row, adjustments_of);
  def_array(step, "count_slot", &Step::count_slot, adjustments_of);
  def_array(step, "prompt_lens", &Step::prompt_lens, adjustments_of);
  def_array(step, "repetition_penalty", &Step::repetition_penalty, adjustments_of);
  def_array(step, "presence_penalty", &Step::presence_penalty, adjustments_of);
  def_array(step, "frequency_penalty", &Step::frequency_penalty, adjustments_of);
  def_array(step, "cu_biases", &Step::cu_biases, bias_bounds_of);
  def_array(step, "mask_row", &Step::mask_row, adjustments_of);
  def_array(step, "bias_ids", &Step::bias_ids, biases_of);
  def_array(step, "bias_values", &Step::bias_values, biases_of);
  def_array(step, "token_masks", &Step::token_masks, masks_of);
}

// A borrowed writable buffer of bytes, from any object with the buffer protocol.
class WritableBytes {
 public:
  explicit WritableBytes(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_WRITABLE) != 0) throw nb::python_error();
  }
  WritableBytes(WritableBytes&& other) noexcept : view_(other.view_) { other.view_ = {}; }
  ~WritableBytes() { PyBuffer_Release(&view_); }
  WritableBytes(const WritableBytes&) = delete;
  WritableBytes& operator=(const WritableBytes&) = delete;

  std::span<std::byte> span() const { return {static_cast<std::byte*>(view_.buf), static_cast<size_t>(view_.len)}; }

 private:
  Py_buffer view_{};
};

struct Buffers {
  std::vector<WritableBytes> buffers;
};

// Keeps the buffers that its steps are written to.
class BoundScheduler : Buffers, public Scheduler {
 public:
  BoundScheduler(const SchedulerConfig& config, const std::vector<nb::object>& io, const std::vector<uint64_t>& offsets)
      : Buffers(borrowed(io)), Scheduler(config, memory(buffers, offsets)) {}

 private:
  static Buffers borrowed(const std::vector<nb::object>& io) {
    Buffers all;
    for (const nb::object& object : io) all.buffers.emplace_back(object);
    return all;
  }
  static std::vector<StepMemory> memory(const std::vector<WritableBytes>& io, const std::vector<uint64_t>& offsets) {
    std::vector<StepMemory> memory;
    for (const WritableBytes& buffer : io) memory.push_back({buffer.span(), offsets});
    return memory;
  }
};

// A borrowed int32 buffer of one dimension, from any object with the buffer protocol.
class Int32Buffer {
 public:
  explicit Int32Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
    const bool is_int32 = view_.ndim == 1 && view_.itemsize == 4 && view_.format != nullptr &&
                          (std::strcmp(view_.format, "i") == 0 || std::strcmp(view_.format, "l") == 0);
    if (!is_int32) {
      const std::string have = std::to_string(view_.ndim) + " dimensions of format '" +
                               (view_.format != nullptr ? view_.format : "B") + "'";
      PyBuffer_Release(&view_);
      throw nb::type_error(("tokens: need a buffer of one dimension of int32 (format 'i'), have " + have).c_str());
    }
  }
  ~Int32Buffer() { PyBuffer_Release(&view_); }
  Int32Buffer(const Int32Buffer&) = delete;
  Int32Buffer& operator=(const Int32Buffer&) = delete;

  std::span<const int32_t> span() const {
    return {static_cast<const int32_t*>(view_.buf), static_cast<size_t>(view_.len) / sizeof(int32_t)};
  }

 private:
  Py_buffer view_;
};

nb::object finish_name(FinishReason finish) {
  static constexpr const char* kNames[] = {nullptr, "stop", "length"};
  const char* name = kNames[static_cast<size_t>(finish)];
  return name == nullptr ? nb::none() : nb::steal(PyUnicode_InternFromString(name));
}

// What a step drew, as the scheduler told it: Python objects are made when somebody looks, not while the device waits.
struct Drawn {
  std::vector<DrawnToken> tokens;

  nb::object iterate() const {
    const nb::object finishes[] = {finish_name(FinishReason::None), finish_name(FinishReason::Stop),
                                   finish_name(FinishReason::Length)};
    nb::list list;
    for (const DrawnToken& drawn : tokens) {
      list.append(nb::make_tuple(drawn.request_id, drawn.token, finishes[static_cast<size_t>(drawn.finish)]));
    }
    return nb::iter(list);
  }
};

Drawn commit(BoundScheduler& scheduler, int64_t step_id, nb::handle tokens) {
  const Int32Buffer buffer(tokens);
  const std::span<const DrawnToken> drawn = scheduler.commit(step_id, buffer.span());
  return {{drawn.begin(), drawn.end()}};
}

std::vector<int64_t> fail_step(BoundScheduler& scheduler, int64_t step_id) {
  const std::span<const int64_t> ended = scheduler.fail_step(step_id);
  return {ended.begin(), ended.end()};
}

std::vector<int64_t> expire(BoundScheduler& scheduler, int64_t now_ns) {
  const std::span<const int64_t> ended = scheduler.expire(now_ns);
  return {ended.begin(), ended.end()};
}

nb::list requests(const BoundScheduler& scheduler) {
  nb::list list;
  for (const RequestStatus& r : scheduler.requests()) {
    list.append(nb::make_tuple(r.request_id, r.state, r.num_steps_in_flight, r.num_pages, r.num_positions));
  }
  return list;
}

nb::dict counters(const BoundScheduler& scheduler) {
  const SchedulerCounters& c = scheduler.counters();
  nb::dict dict;
  dict["preemptions"] = c.preemptions;
  dict["admissions"] = c.admissions;
  dict["prompt_tokens"] = c.prompt_tokens;
  dict["cached_tokens"] = c.cached_tokens;
  dict["restored_tokens"] = c.restored_tokens;
  dict["computed_tokens"] = c.computed_tokens;
  dict["evicted_pages"] = scheduler.num_evictions();
  dict["expired"] = c.expired;
  return dict;
}

nb::list take_events(BoundScheduler& scheduler) {
  using Kind = tokenspeed::cache::PrefixEvent::Kind;
  std::vector<tokenspeed::cache::PrefixEvent> events;
  scheduler.take_events(events);
  nb::list list;
  for (const auto& e : events) {
    if (e.kind == Kind::Stored) {
      const nb::object parent = e.parent_hash ? nb::cast(*e.parent_hash) : nb::none();
      list.append(nb::make_tuple("stored", e.hash, parent, e.key, e.tokens));
    } else if (e.kind == Kind::Removed) {
      list.append(nb::make_tuple("removed", e.hash));
    } else {
      list.append(nb::make_tuple("cleared"));
    }
  }
  return list;
}

nb::list transitions() {
  nb::list list;
  for (const auto& edge : tokenspeed::fsm::transition_table()) {
    list.append(nb::make_tuple(edge.from, edge.event, edge.to));
  }
  return list;
}

void bind_config(nb::module_& m) {
  nb::class_<SchedulerConfig>(m, "SchedulerConfig", "The envelope's limits, and policy. Scheduler(config) checks them.")
      .def(
          "__init__",
          [](SchedulerConfig* self, int32_t max_num_seqs, int32_t max_prefill_tokens, int32_t max_logit_rows,
             int32_t max_model_len, int32_t page_size, int32_t num_pages, int32_t max_waiting, int32_t max_in_flight,
             int32_t vocab_size, bool prefix_index, int32_t num_host_pages, std::string cache_salt,
             bool record_kv_events, int64_t aging_ns) {
            new (self) SchedulerConfig{max_num_seqs,  max_prefill_tokens, max_logit_rows, max_model_len,
                                       page_size,     num_pages,          max_waiting,    max_in_flight,
                                       vocab_size,    prefix_index,       num_host_pages, std::move(cache_salt),
                                       record_kv_events, aging_ns};
          },
          "max_num_seqs"_a, "max_prefill_tokens"_a, "max_logit_rows"_a, "max_model_len"_a, "page_size"_a,
          "num_pages"_a, "max_waiting"_a, "max_in_flight"_a = 1, "vocab_size"_a = 0, "prefix_index"_a = true,
          "num_host_pages"_a = 0, "cache_salt"_a = "", "record_kv_events"_a = false, "aging_ns"_a = 0)
      .def_ro("max_num_seqs", &SchedulerConfig::max_num_seqs)
      .def_ro("max_prefill_tokens", &SchedulerConfig::max_prefill_tokens)
      .def_ro("max_logit_rows", &SchedulerConfig::max_logit_rows)
      .def_ro("max_model_len", &SchedulerConfig::max_model_len)
      .def_ro("page_size", &SchedulerConfig::page_size)
      .def_ro("num_pages", &SchedulerConfig::num_pages)
      .def_ro("max_waiting", &SchedulerConfig::max_waiting)
      .def_ro("max_in_flight", &SchedulerConfig::max_in_flight)
      .def_ro("vocab_size", &SchedulerConfig::vocab_size, "Of logit biases and token masks; 0: no request has any.")
      .def_ro("prefix_index", &SchedulerConfig::prefix_index, "Whether pages of one request are found by the next.")
      .def_ro("num_host_pages", &SchedulerConfig::num_host_pages, "Of the host tier; 0: there is none.")
      .def_ro("cache_salt", &SchedulerConfig::cache_salt, "Of the prefix index: the artifact's digest.")
      .def_ro("record_kv_events", &SchedulerConfig::record_kv_events)
      .def_ro("aging_ns", &SchedulerConfig::aging_ns, "Waiting that long makes up for one priority class; 0: never.");

  nb::class_<RequestParams>(m, "RequestParams",
                            "What one request asks of the scheduler. num_logprobs and num_prompt_logprobs: -1 is none;\n"
                            "logprob_start_len: positions of the prompt from here on have log-probabilities.\n"
                            "bias_ids ascend; token_mask has a bit for each token of the vocabulary, or is empty.\n"
                            "priority: class 0 (first) to 9. tenant: whose fair share it counts for. deadline_ns: on the\n"
                            "clock of now_ns; None: none. cache_key: prefixes are shared within one.")
      .def(
          "__init__",
          [](RequestParams* self, int32_t max_new_tokens, float temperature, float top_p, int32_t top_k, float min_p,
             uint64_t seed, int32_t num_logprobs, int32_t num_prompt_logprobs, std::vector<int32_t> stop_token_ids,
             float repetition_penalty, float presence_penalty, float frequency_penalty, std::vector<int32_t> bias_ids,
             std::vector<float> bias_values, std::vector<int32_t> token_mask, int32_t priority, int32_t tenant,
             std::optional<int64_t> deadline_ns, std::string cache_key, int32_t logprob_start_len) {
            new (self) RequestParams{max_new_tokens,
                                     temperature,
                                     top_p,
                                     top_k,
                                     min_p,
                                     seed,
                                     num_logprobs,
                                     num_prompt_logprobs,
                                     logprob_start_len,
                                     std::move(stop_token_ids),
                                     repetition_penalty,
                                     presence_penalty,
                                     frequency_penalty,
                                     std::move(bias_ids),
                                     std::move(bias_values),
                                     std::move(token_mask),
                                     priority,
                                     tenant,
                                     deadline_ns.value_or(kNoDeadline),
                                     std::move(cache_key)};
          },
          "max_new_tokens"_a, "temperature"_a, "top_p"_a, "top_k"_a, "min_p"_a, "seed"_a, "num_logprobs"_a = -1,
          "num_prompt_logprobs"_a = -1, "stop_token_ids"_a = nb::list(), "repetition_penalty"_a = 1.0f,
          "presence_penalty"_a = 0.0f, "frequency_penalty"_a = 0.0f, "bias_ids"_a = nb::list(),
          "bias_values"_a = nb::list(), "token_mask"_a = nb::list(), "priority"_a = 0, "tenant"_a = 0,
          "deadline_ns"_a = nb::none(), "cache_key"_a = "", "logprob_start_len"_a = 0);
}

}  // namespace

void bind_scheduler(nb::module_& m) {
  nb::exception<QueueFull>(m, "QueueFull");
  bind_config(m);
  bind_step(m);
  m.def("transitions", &transitions, nb::sig("def transitions() -> list[tuple[str, str, str]]"),
        "Every legal edge of a request's life: (state, event, next state), as csrc/fsm/transitions.h has them.");
  nb::class_<Drawn>(m, "Drawn",
                    "What a committed step drew: (request_id, token, finish) in row order, without requests that have\n"
                    "ended; finish is None, 'stop' or 'length'. Each iteration makes them anew.")
      .def("__len__", [](const Drawn& drawn) { return drawn.tokens.size(); })
      .def("__iter__", &Drawn::iterate, nb::sig("def __iter__(self) -> collections.abc.Iterator[tuple[int, int, str | None]]"));
  using S = BoundScheduler;
  nb::class_<S>(m, "Scheduler",
                "Decides what runs in the next step (docs/scheduler.md). Not thread-safe: one thread owns it. Times are\n"
                "nanoseconds since any fixed start.")
      .def(nb::init<const SchedulerConfig&, const std::vector<nb::object>&, const std::vector<uint64_t>&>(),
           "config"_a, "io"_a = nb::list(), "offsets"_a = nb::list(),
           nb::sig("def __init__(self, config: SchedulerConfig, io: Sequence[memoryview] = ..., offsets: Sequence[int] = "
                   "...) -> None"),
           "io: a writable buffer for each of max_in_flight steps, where the inputs of step i are written to number i\n"
           "modulo max_in_flight: tensor j of STEP_SIZES and INPUTS in tokenspeed/step.py at byte offsets[j]. Without\n"
           "it steps have memory of their own. Raises ValueError.")
      .def(
          "submit",
          [](S& self, int64_t id, std::vector<int32_t> prompt, RequestParams params, int64_t now_ns) {
            self.submit(id, std::move(prompt), std::move(params), now_ns);
          },
          "request_id"_a, "prompt"_a, "params"_a, "now_ns"_a = 0,
          "Queues a request. QueueFull when max_waiting wait; ValueError for one that could never be served.")
      .def(
          "next_step", [](S& self, int64_t now_ns) { return const_cast<Step*>(self.next_step(now_ns)); },
          "now_ns"_a = 0, nb::rv_policy::reference_internal,
          nb::sig("def next_step(self, now_ns: int = 0) -> Step | None"),
          "Plans a step. None: nothing can run now; commit first if a step is in flight.")
      .def("commit", &commit, "step_id"_a, "tokens"_a,
           nb::sig("def commit(self, step_id: int, tokens: memoryview) -> Drawn"),
           "The oldest step has run; tokens is int32[num_logit_rows]. Returns what it drew.")
      .def("fail_step", &fail_step, "step_id"_a,
           "The oldest step failed on the device: returns the requests that end with it.")
      .def("settle", [](S& self) { self.settle(); },
           "Do what can wait until the device is busy: pages that the last commit filled go to the prefix index, and those\n"
           "that the next decodes need are freed. Where nobody calls it, it is done when it is needed.")
      .def("warm", [](S& self) { self.warm(); },
           "Settle, and read what the next commit and next_step will read: keeps it in the processor's caches.")
      .def("abort", [](S& self, int64_t id) { return self.abort(id); }, "request_id"_a,
           "Ends a request; False if it is unknown or has ended. Its pages are free at once, or when the last step\n"
           "in flight that uses them is over. No event of it follows.")
      .def("expire", &expire, "now_ns"_a, "Ends the requests whose deadline has come; returns them.")
      .def("preempt", [](S& self, int64_t id, bool always) { return self.preempt(id, always); }, "request_id"_a,
           "always"_a = false,
           "Has a request give its place up and wait before all new ones. False where it cannot: it has no place, a step\n"
           "in flight uses it, or, unless `always`, it has drawn nothing since the last time.")
      .def("flush_prefixes", [](S& self) { self.flush_prefixes(); },
           "The weights have changed: nothing cached is used by requests admitted from here on.")
      .def("drop_host_tier", [](S& self) { self.drop_host_tier(); }, "The host's memory of pages is not used any more.")
      .def("take_events", &take_events, nb::sig("def take_events(self) -> list[tuple[object, ...]]"),
           "What happened to cached pages since the last call, in order: ('stored', hash, parent hash or None, key,\n"
           "tokens), ('removed', hash), ('cleared',).")
      .def("requests", &requests, nb::sig("def requests(self) -> list[tuple[int, str, int, int, int]]"),
           "(request_id, state, steps in flight, pages, positions) of every request, in order of id.")
      .def("counters", &counters, nb::sig("def counters(self) -> dict[str, int]"),
           "Since the start: preemptions, admissions, prompt_tokens (of requests admitted for the first time), of these\n"
           "cached_tokens and restored_tokens (from the host tier), computed_tokens (planned in chunks),\n"
           "evicted_pages, expired.")
      .def("oldest_wait", [](const S& self, int64_t now_ns) { return self.oldest_wait(now_ns); }, "now_ns"_a,
           "Nanoseconds that the oldest request which never ran has waited; 0 when none waits.")
      .def_prop_ro("num_waiting", [](const S& s) { return s.num_waiting(); }, "Also those that were preempted.")
      .def_prop_ro("num_preempted", [](const S& s) { return s.num_preempted(); }, "Of those that wait.")
      .def_prop_ro("num_running", [](const S& s) { return s.num_running(); })
      .def_prop_ro("num_in_flight", [](const S& s) { return s.num_in_flight(); }, "Steps in flight.")
      .def_prop_ro("num_pages", [](const S& s) { return s.num_pages(); })
      .def_prop_ro("num_free_pages", [](const S& s) { return s.num_free_pages(); })
      .def_prop_ro("num_cached_pages", [](const S& s) { return s.num_cached_pages(); },
                   "Of the device, that hold a prefix and no request uses: as good as free.")
      .def_prop_ro("num_host_pages_used", [](const S& s) { return s.num_host_pages_used(); })
      .def_prop_ro("num_preemptions", [](const S& s) { return s.counters().preemptions; }, "Since the start.")
      .def_prop_ro("is_idle", [](const S& s) { return s.is_idle(); }, "No request is known and no step is in flight.");
}
