#include "simulate/replica.h"

#include <algorithm>
#include <span>
#include <stdexcept>
#include <utility>

#include "check/check.h"

namespace tokenspeed::simulate {

namespace {

StepSize size_of(const scheduler::Step& step) {
  StepSize size{.num_tokens = step.num_tokens,
                .num_seqs = step.num_seqs,
                .num_logit_rows = step.num_logit_rows,
                .is_decode_only = step.is_decode_only(),
                .num_page_moves = static_cast<int32_t>(step.moves_out.size() + step.moves_in.size())};
  for (int32_t i = 0; i < step.num_decodes; ++i) size.context_tokens += step.context_lens[i];
  for (int32_t i = step.num_decodes; i < step.num_seqs; ++i) {
    const double count = step.cu_seqlens[i + 1] - step.cu_seqlens[i];
    size.pairs += count * (step.context_lens[i] - count / 2);  // the first attends to the fewest positions
  }
  return size;
}

}  // namespace

void ReplicaTotals::add(const ReplicaTotals& other) {
  steps += other.steps;
  busy_ns += other.busy_ns;
  step_tokens += other.step_tokens;
  bucket_tokens += other.bucket_tokens;
  steps_by_bucket.resize(std::max(steps_by_bucket.size(), other.steps_by_bucket.size()));
  for (size_t i = 0; i < other.steps_by_bucket.size(); ++i) steps_by_bucket[i] += other.steps_by_bucket[i];
}

Replica::Replica(const ReplicaConfig& config, const StepCosts& costs, Records& records)
    : config_(config), costs_(costs), records_(records), scheduler_(config.scheduler) {
  totals_.steps_by_bucket.resize(costs.buckets().size());
}

void Replica::send(const TraceRequest& request, int64_t index) {
  inbox_.push_back({&request, index});
  ++num_open_;
}

void Replica::advance(int64_t until_ns) {
  for (;;) {
    const int64_t step_end = in_flight_.empty() ? kNever : in_flight_.front().end_ns;
    const int64_t arrival =
        inbox_.empty() ? kNever : records_.arrival[static_cast<size_t>(inbox_.front().index)];
    if (std::min(step_end, arrival) >= until_ns) return;
    if (step_end <= arrival) {
      finish_step();
      plan(step_end);
    } else {
      take_arrivals(arrival);
      if (in_flight_.empty()) plan(arrival);
    }
  }
}

Load Replica::load() const noexcept {
  const int64_t cached = scheduler_.num_cached_pages();
  return {.running = scheduler_.num_running(),
          .waiting = scheduler_.num_waiting() + static_cast<int64_t>(door_.size()),
          .used_pages = scheduler_.num_pages() - scheduler_.num_free_pages() - cached,
          .cached_pages = cached};
}

int64_t Replica::deadline_of(const Arrival& arrival) const noexcept {
  const int64_t after = arrival.request->deadline_ns;
  return after == kNone ? scheduler::kNoDeadline : records_.arrival[static_cast<size_t>(arrival.index)] + after;
}

// All that arrive at this very time, so that one plan sees them together.
void Replica::take_arrivals(int64_t now_ns) {
  while (!inbox_.empty() && records_.arrival[static_cast<size_t>(inbox_.front().index)] == now_ns) {
    const Arrival arrival = inbox_.front();
    inbox_.pop_front();
    if (door_.empty() && submit(arrival, now_ns)) continue;
    if (config_.waits_when_full) {
      door_.push_back(arrival);
    } else {
      end_unserved(arrival.index, Status::Refused, now_ns);
    }
  }
}

void Replica::enter_from_the_door(int64_t now_ns) {
  while (!door_.empty()) {
    if (deadline_of(door_.front()) <= now_ns) {
      end_unserved(door_.front().index, Status::Expired, now_ns);
    } else if (!submit(door_.front(), now_ns)) {
      return;
    }
    door_.pop_front();
  }
}

bool Replica::submit(const Arrival& arrival, int64_t now_ns) {
  const TraceRequest& request = *arrival.request;
  const scheduler::SchedulerConfig& limits = config_.scheduler;
  if (scheduler_.num_waiting() - scheduler_.num_preempted() >= limits.max_waiting) return false;
  const int64_t length = int64_t{request.num_input} + request.num_output;
  if (length > limits.max_model_len || limits.pages_for(static_cast<int32_t>(length)) > limits.num_pages) {
    end_unserved(arrival.index, Status::TooLong, now_ns);
    return true;
  }
  if (free_places_.empty()) {
    free_places_.push_back(open_.size());
    open_.emplace_back();
  }
  const size_t place = free_places_.back();
  TS_ASSERT(place <= static_cast<size_t>(kPlaceMask), "a queue has fewer places than that");
  const TokenStream stream(request.blocks, config_.block_tokens, arrival.index);
  scheduler::RequestParams params{.max_new_tokens = request.num_output,
                                  .temperature = 0,
                                  .top_p = 1,
                                  .top_k = 0,
                                  .min_p = 0,
                                  .seed = 0};
  params.priority = request.priority;
  params.tenant = request.tenant;
  params.deadline_ns = deadline_of(arrival);
  const int64_t request_id = num_submitted_++ << kPlaceBits | static_cast<int64_t>(place);
  scheduler_.submit(request_id, stream.first(request.num_input, request.num_output), std::move(params), now_ns);
  free_places_.pop_back();
  open_[place] = {arrival.index, stream};
  return true;
}

void Replica::plan(int64_t now_ns) {
  for (const int64_t id : scheduler_.expire(now_ns)) {
    end(static_cast<size_t>(id & kPlaceMask), Status::Expired, now_ns);
  }
  enter_from_the_door(now_ns);
  const auto depth = static_cast<size_t>(config_.scheduler.max_in_flight);
  while (in_flight_.size() < depth) {
    const scheduler::Step* step = scheduler_.next_step(now_ns);
    if (step == nullptr) break;
    start(*step, now_ns);
  }
  TS_ASSERT(!in_flight_.empty() || scheduler_.is_idle(), "a scheduler with requests always has a step to run");
}

void Replica::start(const scheduler::Step& step, int64_t now_ns) {
  for (const scheduler::Admission& admission : step.decision.admitted) {
    const auto index = static_cast<size_t>(open(admission.request_id).index);
    if (admission.is_resumed) {
      records_.num_preemptions[index] += 1;
    } else {
      records_.admitted[index] = now_ns;
      records_.num_cached[index] = admission.num_cached_tokens;
    }
  }
  const StepSize size = size_of(step);
  const int32_t bucket = costs_.bucket_of(size);
  const int64_t step_ns = costs_.step_ns(size, bucket);
  device_free_ns_ = std::max(device_free_ns_, now_ns) + step_ns;
  in_flight_.push_back({&step, device_free_ns_});
  totals_.steps += 1;
  totals_.busy_ns += step_ns;
  totals_.step_tokens += step.num_tokens;
  totals_.bucket_tokens += costs_.buckets()[static_cast<size_t>(bucket)].num_tokens;
  totals_.steps_by_bucket[static_cast<size_t>(bucket)] += 1;
}

void Replica::finish_step() {
  const auto [step, now_ns] = in_flight_.front();
  in_flight_.pop_front();
  drawn_.resize(static_cast<size_t>(step->num_logit_rows));
  for (size_t row = 0; row < drawn_.size(); ++row) {
    drawn_[row] = open(step->rows[row].request_id).stream.at(step->draw_position[row]);
  }
  for (const scheduler::DrawnToken& drawn : scheduler_.commit(step->id, drawn_)) {
    const auto index = static_cast<size_t>(open(drawn.request_id).index);
    if (records_.first_token[index] == kNone) records_.first_token[index] = now_ns;
    if (drawn.finish != scheduler::FinishReason::None) {
      end(static_cast<size_t>(drawn.request_id & kPlaceMask), Status::Finished, now_ns);
    }
  }
}

void Replica::end(size_t place, Status status, int64_t now_ns) {
  end_unserved(open_[place].index, status, now_ns);
  open_[place] = {};
  free_places_.push_back(place);
}

void Replica::end_unserved(int64_t index, Status status, int64_t now_ns) {
  records_.status[static_cast<size_t>(index)] = static_cast<uint8_t>(status);
  records_.end[static_cast<size_t>(index)] = now_ns;
  ended_.push_back({now_ns, index});
  --num_open_;
}

}  // namespace tokenspeed::simulate
