// Requests in and out: submit, commit, fail_step, abort. Planning is in plan.cpp.
#include "scheduler/scheduler.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "check/check.h"

namespace tokenspeed::scheduler {

namespace {

// Biases and masks go to the device as they are.
template <class Refuse>
void check_adjustments(const RequestParams& params, const SchedulerConfig& config, const Refuse& refuse) {
  const auto& ids = params.bias_ids;
  const std::string num_ids = std::to_string(ids.size());
  if (ids.size() > static_cast<size_t>(kMaxLogitBias)) {
    refuse("need at most " + std::to_string(kMaxLogitBias) + " logit biases, have " + num_ids);
  }
  if (params.bias_values.size() != ids.size()) {
    refuse("need a value per bias, have " + std::to_string(params.bias_values.size()) + " for " + num_ids + " ids");
  }
  const bool ascending = std::adjacent_find(ids.begin(), ids.end(), std::greater_equal<>()) == ids.end();
  if (!ids.empty() && (!ascending || ids.front() < 0 || ids.back() >= config.vocab_size)) {
    refuse("need bias_ids ascending and within a vocabulary of " + std::to_string(config.vocab_size));
  }
  const auto num_words = static_cast<size_t>(config.mask_words());
  if (!params.token_mask.empty() && params.token_mask.size() != num_words) {
    refuse("need a token mask of " + std::to_string(num_words) + " words, have " +
           std::to_string(params.token_mask.size()));
  }
}

SchedulerConfig validated(const SchedulerConfig& config) {
  config.validate();
  return config;
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config, const std::vector<StepMemory>& io)
    : config_(validated(config)),
      pages_(config.num_pages),
      prefixes_(pages_, {.page_size = config.page_size,
                         .num_host_pages = config.prefix_index ? config.num_host_pages : 0,
                         .salt = config.cache_salt,
                         .record_events = config.record_kv_events}),
      slots_(config.max_num_seqs),
      places_(config.max_num_seqs),
      recent_(config.max_num_seqs, config.page_size),
      waiting_(config.aging_ns) {
  const auto num_steps = static_cast<size_t>(config_.max_in_flight);
  if (!io.empty() && io.size() != num_steps) {
    throw std::invalid_argument("scheduler: need memory for each of max_in_flight " + std::to_string(num_steps) +
                                " steps, have it for " + std::to_string(io.size()));
  }
  const auto num_seqs = static_cast<size_t>(config_.max_num_seqs);
  page_rows_.resize(num_seqs * static_cast<size_t>(config_.pages_per_sequence()));
  lanes_.reserve(num_seqs);
  by_rank_.reserve(num_seqs);
  drawn_.reserve(num_seqs);
  ended_.reserve(num_seqs);
  preempted_.reserve(num_seqs);
  retired_.reserve(num_seqs);
  full_pages_.reserve(num_seqs);
  for (size_t i = 0; i < num_steps; ++i) {
    in_flight_[i].step = std::make_unique<Step>(config_, io.empty() ? nullptr : &io[i]);
    in_flight_[i].entries.reserve(num_seqs);
  }
}

Scheduler::~Scheduler() = default;

void Scheduler::check_request(int64_t request_id, const std::vector<int32_t>& prompt,
                              const RequestParams& params) const {
  const auto refuse = [request_id](const std::string& text) {
    throw std::invalid_argument("request " + std::to_string(request_id) + ": " + text);
  };
  const std::string lengths =
      std::to_string(prompt.size()) + " prompt + " + std::to_string(params.max_new_tokens) + " new tokens";
  if (requests_.contains(request_id)) refuse("need a new request_id, have one that is in use");
  if (prompt.empty()) refuse("need a prompt of 1 token or more, have 0");
  if (params.max_new_tokens < 1) refuse("need max_new_tokens 1 or more, have " + std::to_string(params.max_new_tokens));
  const auto negative = std::find_if(prompt.begin(), prompt.end(), [](int32_t token) { return token < 0; });
  if (negative != prompt.end()) refuse("need token ids 0 or more, have " + std::to_string(*negative));
  if (params.logprob_start_len < 0 || static_cast<size_t>(params.logprob_start_len) > prompt.size()) {
    refuse("need logprob_start_len 0 to " + std::to_string(prompt.size()) + ", the length of the prompt, have " +
           std::to_string(params.logprob_start_len));
  }
  check_adjustments(params, config_, refuse);
  if (params.priority < 0 || params.priority >= kNumPriorities) {
    refuse("need a priority of 0 to " + std::to_string(kNumPriorities - 1) + ", have " +
           std::to_string(params.priority));
  }
  if (params.tenant < 0) refuse("need a tenant of 0 or more, have " + std::to_string(params.tenant));
  const uint64_t num_tokens = prompt.size() + static_cast<uint64_t>(params.max_new_tokens);
  if (num_tokens > static_cast<uint64_t>(config_.max_model_len)) {
    refuse("need " + lengths + ", have max_model_len " + std::to_string(config_.max_model_len));
  }
  const int32_t need = config_.pages_for(static_cast<int32_t>(num_tokens));
  if (need > pages_.num_pages()) {
    refuse("need " + std::to_string(need) + " pages of " + std::to_string(config_.page_size) + " positions for " +
           lengths + ", have " + std::to_string(pages_.num_pages()));
  }
}

void Scheduler::submit(int64_t request_id, std::vector<int32_t> prompt, RequestParams params, int64_t now_ns) {
  check_request(request_id, prompt, params);
  if (num_waiting() - num_preempted() >= config_.max_waiting) {
    throw QueueFull("request " + std::to_string(request_id) + ": need a place in the queue, have max_waiting " +
                    std::to_string(config_.max_waiting) + " waiting already");
  }
  auto owned = request_pool_.make(request_id, std::move(prompt), std::move(params));
  Request& request = *owned;
  request.waits_since_ns = now_ns_ = std::max(now_ns_, now_ns);
  requests_.emplace(request_id, std::move(owned));
  if (request.params.deadline_ns != kNoDeadline) deadlines_.add(request_id, request.params.deadline_ns);
  waiting_.push(request, {request.params.priority, request.params.tenant, num_arrivals_++, now_ns});
}

Scheduler::PlannedStep& Scheduler::oldest(int64_t step_id, const char* verb) {
  if (num_in_flight_ == 0 || oldest_id_ != step_id) {
    const std::string need = num_in_flight_ == 0 ? "a step in flight, have none"
                                                 : "the oldest step in flight, " + std::to_string(oldest_id_);
    throw std::invalid_argument(std::string(verb) + " of step " + std::to_string(step_id) + ": need " + need);
  }
  return in_flight_[static_cast<size_t>(step_id % config_.max_in_flight)];
}

std::span<const DrawnToken> Scheduler::commit(int64_t step_id, std::span<const int32_t> tokens) {
  PlannedStep& plan = oldest(step_id, "commit");
  check_tokens(plan, tokens);
  drawn_.clear();
  publish_noted();
  const auto num_decodes = static_cast<size_t>(plan.step->num_decodes);
  for (size_t i = 0; i < plan.entries.size(); ++i) {
    if (i + kPrefetchObject < plan.entries.size()) plan.entries[i + kPrefetchObject].request->prefetch();
    if (i + kPrefetchContents < plan.entries.size()) recent_.prefetch(*plan.entries[i + kPrefetchContents].request);
    const Entry& entry = plan.entries[i];
    Request& request = *entry.request;
    if (fsm::has_ended(request.state)) {
      drain(request);
      continue;
    }
    if (i >= num_decodes) publish_full_pages(request, entry.end);
    if (entry.draw_row < 0) {
      fsm::follow(request.state, fsm::Commit{});
      continue;
    }
    const int32_t token = tokens[static_cast<size_t>(entry.draw_row)];
    const FinishReason finish = accept(request, token);
    drawn_.push_back({request.id, token, finish});
    if (finish == FinishReason::None) {
      const bool fills_page = i < num_decodes && entry.end % config_.page_size == 0;
      if (fills_page && config_.prefix_index) full_pages_.push_back({&request, entry.end});
      fsm::follow(request.state, fsm::Commit{});
    } else {
      publish_full_pages(request, entry.end);
      leave_everything(request);
      fsm::follow(request.state, fsm::Finish{});
      forget_if_finished(request);
    }
  }
  retire_oldest();
  return drawn_;
}

void Scheduler::check_tokens(const PlannedStep& plan, std::span<const int32_t> tokens) const {
  const auto refuse = [&](const std::string& text) {
    throw std::invalid_argument("commit of step " + std::to_string(plan.step->id) + ": " + text);
  };
  if (tokens.size() != static_cast<size_t>(plan.step->num_logit_rows)) {
    refuse("need " + std::to_string(plan.step->num_logit_rows) + " tokens, have " + std::to_string(tokens.size()));
  }
  if (std::all_of(tokens.begin(), tokens.end(), [](int32_t token) { return token >= 0; })) return;
  for (const Entry& entry : plan.entries) {
    if (entry.draw_row < 0) continue;
    const int32_t token = tokens[static_cast<size_t>(entry.draw_row)];
    if (token < 0) {
      refuse("need token ids 0 or more, have " + std::to_string(token) + " in row " + std::to_string(entry.draw_row));
    }
  }
}

FinishReason Scheduler::accept(Request& request, int32_t token) {
  recent_.push(request, token);
  if (request.stops_at(token)) return FinishReason::Stop;
  return request.num_tokens == request.most_tokens ? FinishReason::Length : FinishReason::None;
}

std::span<const int64_t> Scheduler::fail_step(int64_t step_id) {
  PlannedStep& plan = oldest(step_id, "fail_step");
  publish_noted();
  ended_.clear();
  for (const Entry& entry : plan.entries) {
    Request& request = *entry.request;
    if (fsm::has_ended(request.state)) {
      drain(request);
    } else {
      ended_.push_back(request.id);
      leave_everything(request);
      fsm::follow(request.state, fsm::Fail{});
      forget_if_finished(request);
    }
  }
  end_users_of_moves(plan);
  retire_oldest();
  return ended_;
}

// Pages that the step was to move hold nothing of use, nor do those of requests that went on from them meanwhile.
void Scheduler::end_users_of_moves(const PlannedStep& plan) {
  std::vector<cache::NodeId> nodes;
  for (const auto* copies : {&plan.copies_out, &plan.copies_in}) {
    for (const cache::PageCopy& copy : *copies) nodes.push_back(copy.node);
  }
  if (nodes.empty()) return;
  prefixes_.invalidate(nodes);
  find_running_by_rank();
  for (Request* request : by_rank_) {
    if (!fsm::holding(request->state)->prefix.is_broken()) continue;
    ended_.push_back(request->id);
    end(*request);
  }
}

// A step that still used an ended request is over.
void Scheduler::drain(Request& request) {
  fsm::follow(request.state, fsm::Commit{});
  forget_if_finished(request);
}

void Scheduler::forget_if_finished(const Request& request) {
  if (fsm::is<fsm::Finished>(request.state)) requests_.erase(request.id);
}

void Scheduler::retire_oldest() {
  in_flight_[static_cast<size_t>(oldest_id_ % config_.max_in_flight)].entries.clear();
  ++oldest_id_;
  --num_in_flight_;
  free_retired();
}

// The request has ended: it is in no list any more, though steps in flight may still use its pages.
void Scheduler::leave_everything(Request& request) noexcept {
  leave_place(request);
  waiting_.remove(request);
  if (request.params.deadline_ns != kNoDeadline) deadlines_.remove(request.id);
  if (short_of_pages_ == &request) short_of_pages_ = nullptr;
}

void Scheduler::end(Request& request) {
  leave_everything(request);
  fsm::follow(request.state, fsm::Abort{});
  forget_if_finished(request);
}

bool Scheduler::abort(int64_t request_id) {
  publish_noted();
  const auto found = requests_.find(request_id);
  if (found == requests_.end() || fsm::has_ended(found->second->state)) return false;
  end(*found->second);
  return true;
}

std::span<const int64_t> Scheduler::expire(int64_t now_ns) {
  publish_noted();
  ended_.clear();
  now_ns_ = std::max(now_ns_, now_ns);
  deadlines_.expired(now_ns, ended_);
  for (const int64_t id : ended_) end(*requests_.at(id));
  counters_.expired += static_cast<int64_t>(ended_.size());
  return ended_;
}

void Scheduler::flush_prefixes() {
  publish_noted();
  prefixes_.flush();
}

void Scheduler::drop_host_tier() {
  publish_noted();
  prefixes_.drop_host_tier();
}

void Scheduler::settle() {
  publish_noted();
  make_room(num_pages_due());  // if there are so many; else the next plan sees to it
}

void Scheduler::warm() {
  settle();
  const auto touch = [](const void* data, size_t bytes) {
    const auto* p = static_cast<const volatile char*>(data);
    for (size_t at = 0; at < bytes; at += 64) static_cast<void>(p[at]);
  };
  touch(lanes_.data(), lanes_.size() * sizeof(DecodeLane));
  for (const DecodeLane& lane : lanes_) {
    const Request& request = *lane.request;
    touch(&request, sizeof(HotRequest));
    recent_.prefetch(request);
  }
  for (int32_t i = 0; i < config_.max_in_flight; ++i) in_flight_[static_cast<size_t>(i)].step->warm(lanes_.size());
}

PageCounts Scheduler::count_pages() const noexcept {
  PageCounts counts{.free = num_free_pages(),
                    .cached = num_cached_pages(),
                    .shared = prefixes_.num_device_pages() - num_cached_pages(),
                    .own = 0,
                    .retired = static_cast<int32_t>(retired_.size())};
  for (const auto& [id, request] : requests_) {
    if (const fsm::Holding* held = fsm::holding(request->state)) counts.own += held->pages.num_pages();
  }
  return counts;
}

std::vector<RequestStatus> Scheduler::requests() const {
  std::vector<RequestStatus> all;
  all.reserve(requests_.size());
  for (const auto& [id, request] : requests_) {
    const fsm::Holding* held = fsm::holding(request->state);
    const int32_t num_pages = held != nullptr ? held->prefix.num_pages() + held->pages.num_pages() : 0;
    const int32_t position = request->lane >= 0 ? lanes_[static_cast<size_t>(request->lane)].position
                                                : request->num_positions;
    all.push_back({id, fsm::name(request->state), fsm::num_steps_in_flight(request->state), num_pages, position});
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.request_id < b.request_id; });
  return all;
}

}  // namespace tokenspeed::scheduler
