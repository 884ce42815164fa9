// How a step is put together: decodes first, then prefill chunks, both in arrival order.
#include <algorithm>

#include "check/check.h"
#include "scheduler/scheduler.h"

namespace tokenspeed::scheduler {

using fsm::holding;

std::shared_ptr<const Step> Scheduler::next_step() {
  if (num_in_flight_ == config_.max_in_flight) return nullptr;
  PlannedStep& plan = in_flight_[static_cast<size_t>((oldest_ + num_in_flight_) % kMaxInFlight)];
  plan.step = blank_step();
  plan.step->clear(next_step_id_);
  plan.entries.clear();
  if (plan_decodes(plan)) plan_prefills(plan);
  if (plan.step->num_seqs == 0) {
    plan.step.reset();
    return nullptr;
  }
  ++next_step_id_;
  ++num_in_flight_;
  return plan.step;
}

bool Scheduler::plan_decodes(PlannedStep& plan) {
  for (size_t i = 0; i < running_.size(); ++i) {  // preemption may shorten the list behind i
    prefetch_decode(i, *plan.step);
    Request& request = *running_[i];
    if (!fsm::is<fsm::Decoding>(request.state)) continue;
    if (request.num_new() == request.params.max_new_tokens) continue;  // its last draw is in flight
    if (!plan_decode(plan, request)) return false;
  }
  return true;
}

// Of the requests that come a little later than `index`: their objects, and of nearer ones also their pages and where
// `step` will have these.
void Scheduler::prefetch_decode(size_t index, const Step& step) const noexcept {
  if (index + kPrefetchObject < running_.size()) running_[index + kPrefetchObject]->prefetch();
  if (index + kPrefetchContents >= running_.size()) return;
  const fsm::Holding* held = holding(running_[index + kPrefetchContents]->state);
  if (held == nullptr) return;
  const auto width = static_cast<size_t>(config_.pages_per_sequence());
  const size_t row = static_cast<size_t>(step.num_seqs) + kPrefetchContents;
  __builtin_prefetch(page_rows_.data() + static_cast<size_t>(held->slot.slot()) * width);
  if (row < static_cast<size_t>(config_.max_num_seqs)) __builtin_prefetch(step.page_table.data() + row * width, 1);
}

// A decode without a page holds the line: were younger requests to run meanwhile, they would be in flight
// again when it next asks for one of their pages.
bool Scheduler::plan_decode(PlannedStep& plan, Request& request) {
  const int32_t position = holding(request.state)->num_positions;
  TS_ASSERT(request.num_tokens() + request.num_drawing == position + 1, "a decode's newest token alone is unwritten");
  while (config_.pages_for(position + 1) - holding(request.state)->pages.num_pages() > pages_.num_free()) {
    if (!free_a_page(request)) return false;
  }
  fsm::follow(request.state, fsm::PlanDecode{acquire_pages(*holding(request.state), position + 1)});

  const fsm::Holding& held = *holding(request.state);
  plan.step->add_decode(held.slot.slot(), position, page_row(held));
  const int32_t row = plan.step->add_draw_row(request.id, request.params, position + 1, held.slot.slot());
  if (request.params.adjusts_draws()) {
    plan.step->add_adjustment(request.params, row, held.slot.slot(), request.num_prompt);
  }
  request.num_drawing += 1;
  plan.entries.push_back({&request, row});
  return true;
}

// Preempts the youngest running request. Not the one in need itself: it may as well keep its pages until an
// older one ends or takes them. Nor one in flight: its pages are in use until that step commits.
bool Scheduler::free_a_page(const Request& needy) {
  Request& youngest = *running_.back();
  if (&youngest == &needy || fsm::num_steps_in_flight(youngest.state) > 0) return false;
  fsm::follow(youngest.state, fsm::Preempt{});
  running_.pop_back();
  waiting_.push_front(&youngest);
  ++num_preemptions_;
  return true;
}

void Scheduler::plan_prefills(PlannedStep& plan) {
  // An incomplete prefill holds the line, so at most one exists, and it is the youngest.
  if (!running_.empty() && fsm::is<fsm::Prefilling>(running_.back()->state)) {
    if (!plan_chunk(plan, *running_.back())) return;
  }
  while (admit(plan) && plan_chunk(plan, *running_.back())) {
  }
}

// Pages are acquired chunk by chunk, but a request enters only once the free pages cover all its known tokens
// and one more page for every running request: else the next decodes would preempt what was just computed.
bool Scheduler::admit(const PlannedStep& plan) {
  if (waiting_.empty()) return false;
  Request& request = *waiting_.front();
  if (config_.pages_for(request.num_tokens()) + num_running() > pages_.num_free()) return false;
  const int32_t end = chunk_end(plan, request);
  if (end == 0) return false;
  std::optional<cache::SlotLease> slot = slots_.acquire();
  if (!slot) return false;
  std::optional<cache::PageLease> pages = pages_.acquire(config_.pages_for(end));
  TS_ASSERT(pages.has_value(), "a first chunk is cut to the free pages");
  enter_pages(slot->slot(), 0, *pages);
  request.tokens.reserve(static_cast<size_t>(request.num_prompt + request.params.max_new_tokens));
  fsm::follow(request.state, fsm::Admit{std::move(*slot), std::move(*pages)});
  waiting_.pop_front();
  running_.push_back(&request);
  return true;
}

bool Scheduler::plan_chunk(PlannedStep& plan, Request& request) {
  const int32_t begin = holding(request.state)->num_positions;
  const int32_t end = chunk_end(plan, request);
  if (end <= begin) return false;
  const bool is_last = end == request.num_tokens();
  cache::PageLease pages = acquire_pages(*holding(request.state), end);
  if (is_last) {
    fsm::follow(request.state, fsm::PlanLastChunk{std::move(pages), end - begin});
  } else {
    fsm::follow(request.state, fsm::PlanChunk{std::move(pages), end - begin});
  }
  add_chunk(plan, request, begin, end);
  return is_last;
}

// Where the request's next chunk must end: by its known tokens, and by the tokens, pages and logit rows left.
int32_t Scheduler::chunk_end(const PlannedStep& plan, const Request& request) const noexcept {
  const fsm::Holding* held = holding(request.state);
  const int32_t begin = held != nullptr ? held->num_positions : 0;
  const int32_t num_held = held != nullptr ? held->pages.num_pages() : 0;
  const int32_t num_tokens = request.num_tokens();
  const int32_t by_tokens = begin + config_.max_prefill_tokens - plan.step->num_tokens;
  const int64_t by_pages = int64_t{num_held + pages_.num_free()} * config_.page_size;

  // Prompt rows stand at positions first_row .. num_prompt-2, the draw at the last known token.
  const int32_t rows_left = config_.max_logit_rows - plan.step->num_logit_rows;
  const int32_t first_row = request.params.num_prompt_logprobs >= 0 ? request.num_prompt_rows : request.num_prompt - 1;
  const int32_t num_prompt_rows = request.num_prompt - 1 - first_row;
  int32_t by_rows = num_tokens;
  if (rows_left == num_prompt_rows) by_rows = num_tokens - 1;
  if (rows_left < num_prompt_rows) by_rows = first_row + rows_left;

  return static_cast<int32_t>(std::min<int64_t>({num_tokens, by_tokens, by_pages, by_rows}));
}

void Scheduler::add_chunk(PlannedStep& plan, Request& request, int32_t begin, int32_t end) {
  const fsm::Holding& held = *holding(request.state);
  Step& step = *plan.step;
  const int32_t first_token_row = step.num_tokens;
  step.add_chunk(std::span(request.tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
                 begin, page_row(held));
  if (request.params.num_prompt_logprobs >= 0) {
    const int32_t rows_end = std::min(end, request.num_prompt - 1);
    for (int32_t p = request.num_prompt_rows; p < rows_end; ++p) {
      step.add_prompt_row(request.id, request.params, first_token_row + p - begin, p + 1,
                          request.tokens[static_cast<size_t>(p + 1)]);
    }
    request.num_prompt_rows = std::max(request.num_prompt_rows, rows_end);
  }
  int32_t draw_row = -1;
  if (end == request.num_tokens()) {
    draw_row = step.add_draw_row(request.id, request.params, end, held.slot.slot());
    request.num_drawing += 1;
  }
  if (draw_row >= 0 ? request.params.adjusts_draws() : request.params.has_penalties()) {  // penalties count every chunk
    step.add_adjustment(request.params, draw_row, held.slot.slot(), request.num_prompt);
  }
  plan.entries.push_back({&request, draw_row});
}

// The pages that `held` lacks for its first `num_positions` positions. The caller made sure that they are free.
cache::PageLease Scheduler::acquire_pages(const fsm::Holding& held, int32_t num_positions) {
  std::optional<cache::PageLease> more = pages_.acquire(config_.pages_for(num_positions) - held.pages.num_pages());
  TS_ASSERT(more.has_value(), "pages are planned before they are acquired");
  enter_pages(held.slot.slot(), held.pages.num_pages(), *more);
  return std::move(*more);
}

void Scheduler::enter_pages(int32_t slot, int32_t num_held, const cache::PageLease& more) noexcept {
  auto at = page_rows_.begin() + int64_t{slot} * config_.pages_per_sequence() + num_held;
  for (const int32_t page : more) *at++ = page;
}

std::span<const int32_t> Scheduler::page_row(const fsm::Holding& held) const noexcept {
  const auto first = static_cast<size_t>(held.slot.slot()) * static_cast<size_t>(config_.pages_per_sequence());
  return std::span(page_rows_).subspan(first, static_cast<size_t>(held.pages.num_pages()));
}

// A Step that nobody looks at any more, or a new one where all are held (by Python, say).
std::shared_ptr<Step> Scheduler::blank_step() {
  for (const std::shared_ptr<Step>& spare : spare_steps_) {
    if (spare.use_count() == 1) return spare;
  }
  std::shared_ptr<Step>& replaced = spare_steps_[next_spare_];
  next_spare_ = (next_spare_ + 1) % spare_steps_.size();
  replaced = std::make_shared<Step>(config_);
  return replaced;
}

}  // namespace tokenspeed::scheduler
