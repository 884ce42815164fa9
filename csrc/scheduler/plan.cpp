// How a step is put together: decodes first, then prefill chunks.
#include <algorithm>

#include "check/check.h"
#include "scheduler/scheduler.h"

namespace tokenspeed::scheduler {

using fsm::holding;

const Step* Scheduler::next_step(int64_t now_ns) {
  if (num_in_flight_ == config_.max_in_flight) return nullptr;
  const int64_t id = oldest_id_ + num_in_flight_;
  PlannedStep& plan = in_flight_[static_cast<size_t>(id % config_.max_in_flight)];
  Step& step = *plan.step;
  step.clear(id);
  step.decision.now_ns = now_ns_ = std::max(now_ns_, now_ns);
  plan.entries.clear();
  if (prefilling_ != nullptr || (!waiting_.empty() && slots_.num_free() > 0)) publish_noted();  // prompts may find them
  const bool has_room = plan_decodes(plan);
  plan_prefills(plan, has_room);
  if (step.num_seqs == 0) return nullptr;
  step.decision.num_evicted_pages = static_cast<int32_t>(prefixes_.num_evictions() - num_evictions_told_);
  num_evictions_told_ = prefixes_.num_evictions();
  step.finish();
  std::swap(step.decision.preempted, preempted_);
  prefixes_.take_copies(plan.copies_out, plan.copies_in);
  for (const cache::PageCopy& copy : plan.copies_out) step.moves_out.push_back({copy.device_page, copy.host_page});
  for (const cache::PageCopy& copy : plan.copies_in) step.moves_in.push_back({copy.device_page, copy.host_page});
  ++num_in_flight_;
  return &step;
}

// True: there were pages for all decodes, so that requests may be admitted.
bool Scheduler::plan_decodes(PlannedStep& plan) {
  if (!make_room(num_pages_due())) return plan_scarce_decodes(plan);
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (i + kPrefetchObject < lanes_.size()) lanes_[i + kPrefetchObject].request->prefetch();
    if (lanes_[i].position < lanes_[i].end) plan_decode(plan, lanes_[i]);
  }
  return true;
}

// In order of rank, since who is first takes pages of who is last. A decode without a page holds the line: were others
// behind it to run meanwhile, they would be in flight again when it next asks for one of their pages.
bool Scheduler::plan_scarce_decodes(PlannedStep& plan) {
  publish_noted();  // before anybody is preempted
  find_running_by_rank();
  for (Request* request : by_rank_) {
    if (request->lane < 0) continue;  // a prefill, or preempted in this very plan
    const auto lane = [&]() -> DecodeLane& { return lanes_[static_cast<size_t>(request->lane)]; };  // lanes move
    if (lane().position == lane().end) continue;
    while (lane().position == lane().covered && !make_room(1)) {
      if (!free_a_page(*request)) return false;
    }
    plan_decode(plan, lane());
  }
  return false;
}

void Scheduler::plan_decode(PlannedStep& plan, DecodeLane& lane) {
  Request& request = *lane.request;
  cache::PageLease page;
  if (lane.position == lane.covered) {
    page = acquire_pages(lane.slot, lane.num_pages, 1);
    lane.page = page.front();
    lane.num_pages += 1;
    lane.covered += config_.page_size;
    waiting_.charge(request, config_.page_size);  // for what the page has room for
  }
  fsm::follow(request.state, fsm::PlanDecode{std::move(page)});
  Step& step = *plan.step;
  step.add_decode(lane.tag, request.id, request.params, lane.slot, lane.position, page_row(lane.slot, 0).data(),
                  lane.num_pages, lane.page);
  const int32_t row = step.num_decodes - 1;
  if (lane.adjusts) step.add_adjustment(request.params, row, lane.slot, request.num_prompt);
  lane.position += 1;
  plan.entries.push_back({&request, row, lane.position});
}

void Scheduler::plan_prefills(PlannedStep& plan, bool may_admit) {
  Decision& decision = plan.step->decision;
  decision.num_decodes = plan.step->num_decodes;
  decision.num_decode_tokens = plan.step->num_tokens;
  Held held = may_admit ? Held::NothingWaits : Held::Decodes;
  // An incomplete prefill holds the line, so at most one exists.
  if (prefilling_ != nullptr && !plan_chunk(plan, *prefilling_)) {
    held = Held::ChunkFirst;
  } else if (may_admit) {
    while ((held = admit(plan)) == Held::NothingWaits && prefilling_ != nullptr) {
      if (!plan_chunk(plan, *prefilling_)) {
        held = Held::ChunkFirst;
        break;
      }
    }
  }
  describe(plan, held);
}

void Scheduler::describe(PlannedStep& plan, Held held) {
  Step& step = *plan.step;
  Decision& d = step.decision;
  d.held = held;
  d.num_chunks = step.num_seqs - step.num_decodes;
  d.num_prefill_tokens = step.num_tokens - step.num_decodes;
  d.num_waiting = num_waiting();
  d.num_running = num_running();
  d.num_free_pages = num_free_pages();
  d.num_cached_pages = num_cached_pages();
  counters_.computed_tokens += d.num_prefill_tokens;
}

// What keeps `request`, which is next, from being admitted; NothingWaits when nothing does.
//
// A new request needs pages for the chunk at hand, and for its first decode where that chunk is the last; one that had
// been preempted needs them for all that it knows, so that nothing can keep it from drawing a token once it is back.
// And either leaves a page for each running request: else the next decodes would preempt what was just computed.
Held Scheduler::measure(const PlannedStep& plan, const Request& request, Candidate& candidate) {
  const int32_t tokens_left = config_.max_prefill_tokens - plan.step->num_tokens;
  if (tokens_left == 0) return Held::Tokens;
  if (plan.step->num_logit_rows == config_.max_logit_rows) return Held::LogitRows;
  if (slots_.num_free() == 0) return Held::Slots;
  const int32_t to_be_had = prefixes_.num_available();
  if (short_of_pages_ == &request && to_be_had <= pages_had_) return Held::Pages;

  const int32_t most = config_.prefix_index ? request.most_cached() / config_.page_size : 0;
  candidate.found = prefixes_.find(request.params.cache_key, request.tokens, most);
  const int32_t begin = candidate.found.num_pages * config_.page_size;
  const int32_t end = chunk_end(plan, request, begin);
  if (end <= begin) return Held::LogitRows;
  const bool needs_all = request.was_preempted() || end == request.num_tokens;
  candidate.num_positions = needs_all ? request.num_tokens + 1 : end;
  const int32_t on_device = candidate.found.num_pages - candidate.found.num_host_pages;
  const int32_t need = config_.pages_for(candidate.num_positions) - on_device + num_running();
  if (need <= to_be_had - candidate.found.num_unlocked_device_pages) return Held::NothingWaits;
  short_of_pages_ = &request;
  pages_had_ = to_be_had;
  return Held::Pages;
}

// The next waiting request now runs, and is prefilling_; or why none does.
Held Scheduler::admit(PlannedStep& plan) {
  const int64_t now_ns = plan.step->decision.now_ns;
  const QueueChoice choice = waiting_.front(now_ns);
  if (choice.entry == nullptr) return Held::NothingWaits;
  Request& request = static_cast<Request&>(*choice.entry);
  Candidate candidate;
  if (const Held held = measure(plan, request, candidate); held != Held::NothingWaits) return held;
  short_of_pages_ = nullptr;

  std::optional<cache::SlotLease> slot = slots_.acquire();
  std::optional<cache::PrefixRef> prefix = prefixes_.take(request.params.cache_key, candidate.found);
  TS_ASSERT(slot && prefix, "a request is admitted to a free slot and pages that are to be had");
  const int32_t num_found = candidate.found.num_pages;
  prefixes_.copy_pages(*prefix, page_row(slot->slot(), num_found));
  const int32_t num_own = config_.pages_for(candidate.num_positions) - num_found;
  const bool has_room = make_room(num_own);
  TS_ASSERT(has_room, "pages are counted before a request is admitted");
  cache::PageLease pages = acquire_pages(slot->slot(), num_found, num_own);
  request.slot = slot->slot();
  request.num_positions = num_found * config_.page_size;
  request.publishes = config_.prefix_index;
  request.tokens.reserve(static_cast<size_t>(request.most_tokens));

  const int32_t cached = request.num_positions, restored = candidate.found.num_host_pages * config_.page_size;
  plan.step->decision.admitted.push_back(
      {request.id, cached, restored, now_ns - request.waits_since_ns, request.was_preempted()});
  counters_.admissions += 1;
  if (!request.was_preempted()) {
    counters_.prompt_tokens += request.num_prompt;
    counters_.cached_tokens += cached;
    counters_.restored_tokens += restored;
  }
  waiting_.admit(request);
  waiting_.charge(request, request.num_tokens - cached);
  fsm::follow(request.state, fsm::Admit{places_.hold(std::move(*slot), std::move(*prefix), std::move(pages))});
  prefilling_ = &request;
  return Held::NothingWaits;
}

// Adds the request's next chunk, if there is room for any of it. True: it was the last one, so that younger requests
// may follow in the step.
bool Scheduler::plan_chunk(PlannedStep& plan, Request& request) {
  const int32_t begin = request.num_positions;
  const int32_t whole_end = chunk_end(plan, request, begin);
  if (whole_end <= begin) return false;
  const fsm::Holding& held = *holding(request.state);
  const int32_t slot = held.slot.slot();
  const int32_t num_held = held.prefix.num_pages() + held.pages.num_pages();

  // Cut to the pages that are to be had, of which the last chunk needs one for the first decode too. Where not one
  // token fits, it takes the pages of a request behind it.
  int32_t end = whole_end;
  for (bool ranked = false;; ranked = true) {
    const int64_t room = int64_t{num_held + prefixes_.num_available()} * config_.page_size;
    const bool is_whole = room >= whole_end + (whole_end == request.num_tokens);
    end = is_whole ? whole_end : static_cast<int32_t>(std::min<int64_t>(room, request.num_tokens - 1));
    if (end > begin) break;
    if (!ranked) find_running_by_rank();
    if (!free_a_page(request)) return false;
  }
  const int32_t covers = end + (end == request.num_tokens);
  const int32_t num_more = std::max(0, config_.pages_for(covers) - num_held);
  const bool has_room = make_room(num_more);
  TS_ASSERT(has_room, "a chunk is cut to the pages that are to be had");
  const bool is_last = end == request.num_tokens;
  cache::PageLease pages = acquire_pages(slot, num_held, num_more);
  if (is_last) {
    fsm::follow(request.state, fsm::PlanLastChunk{std::move(pages)});
  } else {
    fsm::follow(request.state, fsm::PlanChunk{std::move(pages)});
  }
  request.num_positions = end;
  add_chunk(plan, request, begin, end);
  if (is_last) {
    prefilling_ = nullptr;
    enter_lane(request);
  }
  return is_last;
}

// Where a chunk from `begin` on must end: by the request's known tokens, and by the tokens and logit rows left.
int32_t Scheduler::chunk_end(const PlannedStep& plan, const Request& request, int32_t begin) const noexcept {
  const int32_t num_tokens = request.num_tokens;
  const int32_t by_tokens = begin + config_.max_prefill_tokens - plan.step->num_tokens;

  // Prompt rows stand at positions next_prompt_row .. num_prompt-2, the draw at the last known token.
  const int32_t rows_left = config_.max_logit_rows - plan.step->num_logit_rows;
  const int32_t num_prompt_rows = request.num_prompt - 1 - request.next_prompt_row;
  int32_t by_rows = num_tokens;
  if (rows_left == num_prompt_rows) by_rows = num_tokens - 1;
  if (rows_left < num_prompt_rows) by_rows = request.next_prompt_row + rows_left;
  return std::min({num_tokens, by_tokens, by_rows});
}

void Scheduler::add_chunk(PlannedStep& plan, Request& request, int32_t begin, int32_t end) {
  const fsm::Holding& held = *holding(request.state);
  const int32_t slot = held.slot.slot();
  Step& step = *plan.step;
  const int32_t first_token_row = step.num_tokens;
  step.add_chunk(std::span(request.tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)), begin,
                 page_row(slot, config_.pages_for(end)));
  const int32_t rows_end = std::min(end, request.num_prompt - 1);
  for (int32_t& p = request.next_prompt_row; p < rows_end; ++p) {
    step.add_prompt_row(request.id, request.params, first_token_row + p - begin, p + 1,
                        request.tokens[static_cast<size_t>(p + 1)]);
  }
  int32_t draw_row = -1;
  if (end == request.num_tokens) draw_row = step.add_draw_row(request.id, request.params, end, slot);
  if (draw_row >= 0 ? request.params.adjusts_draws() : request.params.has_penalties()) {  // penalties count every chunk
    step.add_adjustment(request.params, draw_row, slot, request.num_prompt);
  }
  plan.entries.push_back({&request, draw_row, end});
}

}  // namespace tokenspeed::scheduler
