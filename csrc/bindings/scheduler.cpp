// Python's view of the scheduler. Nothing here releases the GIL: every call takes microseconds.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "scheduler/scheduler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace tokenspeed::scheduler;

// A read-only memoryview of the first `count` elements. It holds the Step, and so the memory, alive.
template <class T>
nb::object view_of(nb::handle step, const std::vector<T>& array, int64_t count) {
  using View = nb::ndarray<nb::memview, const T, nb::ndim<1>, nb::c_contig>;
  return nb::cast(View(array.data(), {static_cast<size_t>(count)}, step), nb::rv_policy::reference);
}

template <class T>
void def_array(nb::class_<Step>& type, const char* name, std::vector<T> Step::*array, int64_t (*count)(const Step&)) {
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
int64_t adjustments_of(const Step& s) { return static_cast<int64_t>(s.adjust_seq.size()); }
int64_t bias_bounds_of(const Step& s) { return static_cast<int64_t>(s.cu_biases.size()); }
int64_t biases_of(const Step& s) { return static_cast<int64_t>(s.bias_ids.size()); }
int64_t masks_of(const Step& s) { return static_cast<int64_t>(s.token_masks.size()); }

nb::list row_list(const Step& step) {
  nb::list list;
  for (int32_t i = 0; i < step.num_logit_rows; ++i) {
    const RowInfo& row = step.rows[static_cast<size_t>(i)];
    list.append(nb::make_tuple(row.request_id, row.is_prompt_row, row.position));
  }
  return list;
}

void copy_to(const Step& step, nb::handle io, const std::vector<uint64_t>& offsets);

void bind_step(nb::module_& m) {
  nb::class_<Step> step(m, "Step",
                        "One forward pass. Arrays are read-only memoryviews named as tokenspeed/step.py INPUTS;\n"
                        "page_table and token_masks are flat. They keep the step's memory alive.");
  step.def_ro("id", &Step::id)
      .def_ro("num_tokens", &Step::num_tokens)
      .def_ro("num_seqs", &Step::num_seqs)
      .def_ro("num_logit_rows", &Step::num_logit_rows)
      .def_ro("is_decode_only", &Step::is_decode_only, "Every sequence is one decode: no prefill chunk.")
      .def_prop_ro("rows", &row_list, nb::sig("def rows(self) -> list[tuple[int, bool, int]]"),
                   "(request_id, is_prompt_row, position of the token asked for or drawn) of every logit row.")
      .def("copy_to", &copy_to, "io"_a, "offsets"_a,
           nb::sig("def copy_to(self, io: memoryview, offsets: Sequence[int]) -> None"),
           "Copy the inputs into a writable buffer: tensor i of tokenspeed/step.py INPUTS to byte offsets[i]; of a\n"
           "page_table row only the pages of its sequence. Raises ValueError when a tensor does not fit.");
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
  ~WritableBytes() { PyBuffer_Release(&view_); }
  WritableBytes(const WritableBytes&) = delete;
  WritableBytes& operator=(const WritableBytes&) = delete;

  std::span<std::byte> span() const { return {static_cast<std::byte*>(view_.buf), static_cast<size_t>(view_.len)}; }

 private:
  Py_buffer view_;
};

void copy_to(const Step& step, nb::handle io, const std::vector<uint64_t>& offsets) {
  const WritableBytes buffer(io);
  step.copy_to(buffer.span(), offsets);
}

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

Drawn commit(Scheduler& scheduler, int64_t step_id, nb::handle tokens) {
  const Int32Buffer buffer(tokens);
  const std::span<const DrawnToken> drawn = scheduler.commit(step_id, buffer.span());
  return {{drawn.begin(), drawn.end()}};
}

nb::list fail_step(Scheduler& scheduler, int64_t step_id) {
  nb::list list;
  for (const int64_t id : scheduler.fail_step(step_id)) list.append(id);
  return list;
}

nb::list requests(const Scheduler& scheduler) {
  nb::list list;
  for (const RequestStatus& r : scheduler.requests()) {
    list.append(nb::make_tuple(r.request_id, r.state, r.num_steps_in_flight, r.num_pages, r.num_positions));
  }
  return list;
}

void bind_config(nb::module_& m) {
  nb::class_<SchedulerConfig>(m, "SchedulerConfig", "The envelope's limits. Scheduler(config) checks them.")
      .def(
          "__init__",
          [](SchedulerConfig* self, int32_t max_num_seqs, int32_t max_prefill_tokens, int32_t max_logit_rows,
             int32_t max_model_len, int32_t page_size, int32_t num_pages, int32_t max_waiting, int32_t max_in_flight,
             int32_t vocab_size) {
            new (self) SchedulerConfig{max_num_seqs, max_prefill_tokens, max_logit_rows, max_model_len, page_size,
                                       num_pages,    max_waiting,        max_in_flight,  vocab_size};
          },
          "max_num_seqs"_a, "max_prefill_tokens"_a, "max_logit_rows"_a, "max_model_len"_a, "page_size"_a,
          "num_pages"_a, "max_waiting"_a, "max_in_flight"_a = 1, "vocab_size"_a = 0)
      .def_ro("max_num_seqs", &SchedulerConfig::max_num_seqs)
      .def_ro("max_prefill_tokens", &SchedulerConfig::max_prefill_tokens)
      .def_ro("max_logit_rows", &SchedulerConfig::max_logit_rows)
      .def_ro("max_model_len", &SchedulerConfig::max_model_len)
      .def_ro("page_size", &SchedulerConfig::page_size)
      .def_ro("num_pages", &SchedulerConfig::num_pages)
      .def_ro("max_waiting", &SchedulerConfig::max_waiting)
      .def_ro("max_in_flight", &SchedulerConfig::max_in_flight)
      .def_ro("vocab_size", &SchedulerConfig::vocab_size, "Of logit biases and token masks; 0: no request has any.");

  nb::class_<RequestParams>(m, "RequestParams",
                            "What one request asks of the scheduler. num_logprobs and num_prompt_logprobs: -1 is none.\n"
                            "bias_ids ascend; token_mask has a bit for each token of the vocabulary, or is empty.")
      .def(
          "__init__",
          [](RequestParams* self, int32_t max_new_tokens, float temperature, float top_p, int32_t top_k, float min_p,
             uint64_t seed, int32_t num_logprobs, int32_t num_prompt_logprobs, std::vector<int32_t> stop_token_ids,
             float repetition_penalty, float presence_penalty, float frequency_penalty, std::vector<int32_t> bias_ids,
             std::vector<float> bias_values, std::vector<int32_t> token_mask) {
            new (self) RequestParams{max_new_tokens,
                                     temperature,
                                     top_p,
                                     top_k,
                                     min_p,
                                     seed,
                                     num_logprobs,
                                     num_prompt_logprobs,
                                     std::move(stop_token_ids),
                                     repetition_penalty,
                                     presence_penalty,
                                     frequency_penalty,
                                     std::move(bias_ids),
                                     std::move(bias_values),
                                     std::move(token_mask)};
          },
          "max_new_tokens"_a, "temperature"_a, "top_p"_a, "top_k"_a, "min_p"_a, "seed"_a, "num_logprobs"_a = -1,
          "num_prompt_logprobs"_a = -1, "stop_token_ids"_a = nb::list(), "repetition_penalty"_a = 1.0f,
          "presence_penalty"_a = 0.0f, "frequency_penalty"_a = 0.0f, "bias_ids"_a = nb::list(),
          "bias_values"_a = nb::list(), "token_mask"_a = nb::list());
}

}  // namespace

void bind_scheduler(nb::module_& m) {
  nb::exception<QueueFull>(m, "QueueFull");
  bind_config(m);
  bind_step(m);
  nb::class_<Drawn>(m, "Drawn",
                    "What a committed step drew: (request_id, token, finish) in row order, without requests that have\n"
                    "ended; finish is None, 'stop' or 'length'. Each iteration makes them anew.")
      .def("__len__", [](const Drawn& drawn) { return drawn.tokens.size(); })
      .def("__iter__", &Drawn::iterate, nb::sig("def __iter__(self) -> collections.abc.Iterator[tuple[int, int, str | None]]"));
  nb::class_<Scheduler>(m, "Scheduler",
                        "Decides what runs in the next step (docs/scheduler.md). Not thread-safe: one thread owns it.")
      .def(nb::init<const SchedulerConfig&>(), "config"_a)
      .def("submit", &Scheduler::submit, "request_id"_a, "prompt"_a, "params"_a,
           "Queues a request. QueueFull when max_waiting wait; ValueError for one that could never be served.")
      .def(
          "next_step",
          [](Scheduler& self) { return std::const_pointer_cast<Step>(self.next_step()); },
          nb::sig("def next_step(self) -> Step | None"),
          "Plans a step. None: nothing can run now; commit first if a step is in flight.")
      .def("commit", &commit, "step_id"_a, "tokens"_a,
           nb::sig("def commit(self, step_id: int, tokens: memoryview) -> Drawn"),
           "The oldest step has run; tokens is int32[num_logit_rows]. Returns what it drew.")
      .def("fail_step", &fail_step, "step_id"_a, nb::sig("def fail_step(self, step_id: int) -> list[int]"),
           "The oldest step failed on the device: returns the requests that end with it.")
      .def("warm", &Scheduler::warm,
           "Read what the next commit and next_step will read, and change nothing: keeps it in the processor's caches.")
      .def("abort", &Scheduler::abort, "request_id"_a,
           "Ends a request; False if it is unknown or has ended. Its pages are free at once, or when the last step\n"
           "in flight that uses them is over. No event of it follows.")
      .def("requests", &requests, nb::sig("def requests(self) -> list[tuple[int, str, int, int, int]]"),
           "(request_id, state, steps in flight, pages, positions) of every request, in order of id.")
      .def_prop_ro("num_waiting", &Scheduler::num_waiting)
      .def_prop_ro("num_running", &Scheduler::num_running)
      .def_prop_ro("num_in_flight", &Scheduler::num_in_flight, "Steps in flight.")
      .def_prop_ro("num_pages", &Scheduler::num_pages)
      .def_prop_ro("num_free_pages", &Scheduler::num_free_pages)
      .def_prop_ro("num_preemptions", &Scheduler::num_preemptions, "Since the start.")
      .def_prop_ro("is_idle", &Scheduler::is_idle, "No request is known and no step is in flight.");
}
