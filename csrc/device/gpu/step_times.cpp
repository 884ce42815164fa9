#include "device/gpu/step_times.h"

#include <algorithm>

namespace tokenspeed::device::gpu {

StepTimes::StepTimes(const std::shared_ptr<const Context>& context, size_t num_steps)
    : context_(context), slots_(num_steps) {
  for (Slot& slot : slots_) {
    slot.begin = std::make_unique<Event>(context, kEventTiming);
    slot.end = std::make_unique<Event>(context, kEventTiming);
  }
}

void StepTimes::begin(uint64_t ticket, int64_t num_tokens, int64_t num_seqs, Handle stream) {
  Slot& s = slot(begun_);
  s.ticket = ticket;
  s.num_tokens = num_tokens;
  s.num_seqs = num_seqs;
  context_->check(context_->call().event_record(s.begin->get(), stream), "time a step");
}

void StepTimes::end(Handle stream) {
  context_->check(context_->call().event_record(slot(begun_).end->get(), stream), "time a step");
  ++begun_;
}

double StepTimes::elapsed(const Event& from, const Event& to) const {
  float milliseconds = 0;
  context_->check(context_->call().event_elapsed(&milliseconds, from.get(), to.get()), "tell the time of a step");
  return static_cast<double>(milliseconds) * 1e-3;
}

std::vector<StepTime> StepTimes::take(uint64_t done) {
  context_->bind();
  if (begun_ - taken_ > slots_.size()) taken_ = begun_ - slots_.size();
  std::vector<StepTime> times;
  for (; taken_ < begun_ && slot(taken_).ticket <= done; ++taken_) {
    const Slot& s = slot(taken_);
    // The step before it, if its events are still there.
    const bool has_previous = taken_ > 0 && begun_ - (taken_ - 1) <= slots_.size();
    const double gap = has_previous ? elapsed(*slot(taken_ - 1).end, *s.begin) : -1;
    times.push_back({s.ticket, s.num_tokens, s.num_seqs, elapsed(*s.begin, *s.end), gap});
  }
  return times;
}

}  // namespace tokenspeed::device::gpu
