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

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(validated(config)), pages_(config.num_pages), slots_(config.max_num_seqs) {
  const auto num_seqs = static_cast<size_t>(config_.max_num_seqs);
  page_rows_.resize(num_seqs * static_cast<size_t>(config_.pages_per_sequence()));
  running_.reserve(num_seqs);
  drawn_.reserve(num_seqs);
  failed_.reserve(num_seqs);
  for (PlannedStep& plan : in_flight_) plan.entries.reserve(num_seqs);
}

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
  check_adjustments(params, config_, refuse);
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

void Scheduler::submit(int64_t request_id, std::vector<int32_t> prompt, RequestParams params) {
  check_request(request_id, prompt, params);
  if (num_waiting() >= config_.max_waiting) {
    throw QueueFull("request " + std::to_string(request_id) + ": need a place in the queue, have max_waiting " +
                    std::to_string(config_.max_waiting) + " waiting already");
  }
  const auto num_prompt = static_cast<int32_t>(prompt.size());
  auto request = std::make_unique<Request>(
      Request{.id = request_id, .params = std::move(params), .tokens = std::move(prompt), .num_prompt = num_prompt,
              .state = fsm::Waiting{}});
  waiting_.push_back(request.get());
  requests_.emplace(request_id, std::move(request));
}

Scheduler::PlannedStep& Scheduler::oldest(int64_t step_id, const char* verb) {
  PlannedStep& plan = in_flight_[static_cast<size_t>(oldest_)];
  if (num_in_flight_ == 0 || plan.step->id != step_id) {
    const std::string need = num_in_flight_ == 0 ? "a step in flight, have none"
                                                 : "the oldest step in flight, " + std::to_string(plan.step->id);
    throw std::invalid_argument(std::string(verb) + " of step " + std::to_string(step_id) + ": need " + need);
  }
  return plan;
}

void Scheduler::warm() const noexcept {
  const auto touch = [](const void* data, size_t bytes) {
    const auto* p = static_cast<const volatile char*>(data);
    for (size_t at = 0; at < bytes; at += 64) static_cast<void>(p[at]);
  };
  for (const Request* request : running_) {
    touch(request, sizeof(Request));
    touch(request->tokens.data() + request->tokens.size() - 1, sizeof(int32_t));
    touch(request->params.stop_token_ids.data(), request->params.stop_token_ids.size() * sizeof(int32_t));
    if (const fsm::Holding* held = holding(request->state)) {
      const std::span<const int32_t> pages = page_row(*held);
      touch(pages.data(), pages.size_bytes());
    }
  }
  for (const std::shared_ptr<Step>& spare : spare_steps_) {
    if (spare.use_count() == 1) spare->warm(running_.size());
  }
}

std::span<const DrawnToken> Scheduler::commit(int64_t step_id, std::span<const int32_t> tokens) {
  PlannedStep& plan = oldest(step_id, "commit");
  if (tokens.size() != static_cast<size_t>(plan.step->num_logit_rows)) {
    throw std::invalid_argument("commit of step " + std::to_string(step_id) + ": need " +
                                std::to_string(plan.step->num_logit_rows) + " tokens, have " +
                                std::to_string(tokens.size()));
  }
  for (const Entry& entry : plan.entries) {
    if (entry.draw_row >= 0 && tokens[static_cast<size_t>(entry.draw_row)] < 0) {
      throw std::invalid_argument("commit of step " + std::to_string(step_id) + ": need token ids 0 or more, have " +
                                  std::to_string(tokens[static_cast<size_t>(entry.draw_row)]) + " in row " +
                                  std::to_string(entry.draw_row));
    }
  }
  drawn_.clear();
  for (size_t i = 0; i < plan.entries.size(); ++i) {
    if (i + kPrefetchObject < plan.entries.size()) plan.entries[i + kPrefetchObject].request->prefetch();
    if (i + kPrefetchContents < plan.entries.size()) plan.entries[i + kPrefetchContents].request->prefetch_tokens();
    const Entry& entry = plan.entries[i];
    Request& request = *entry.request;
    if (fsm::has_ended(request.state) || entry.draw_row < 0) {
      fsm::follow(request.state, fsm::Commit{});
      continue;
    }
    const int32_t token = tokens[static_cast<size_t>(entry.draw_row)];
    const FinishReason finish = accept(request, token);
    if (finish == FinishReason::None) {
      fsm::follow(request.state, fsm::Commit{});
    } else {
      fsm::follow(request.state, fsm::Finish{});
    }
    drawn_.push_back({request.id, token, finish});
  }
  retire_oldest();
  return drawn_;
}

FinishReason Scheduler::accept(Request& request, int32_t token) {
  request.tokens.push_back(token);  // capacity was reserved at admission
  request.num_drawing -= 1;
  const std::vector<int32_t>& stops = request.params.stop_token_ids;
  if (std::find(stops.begin(), stops.end(), token) != stops.end()) return FinishReason::Stop;
  const bool is_full = request.num_tokens() - request.num_prompt == request.params.max_new_tokens;
  return is_full ? FinishReason::Length : FinishReason::None;
}

std::span<const int64_t> Scheduler::fail_step(int64_t step_id) {
  PlannedStep& plan = oldest(step_id, "fail_step");
  failed_.clear();
  for (const Entry& entry : plan.entries) {
    Request& request = *entry.request;
    if (fsm::has_ended(request.state)) {
      fsm::follow(request.state, fsm::Commit{});
    } else {
      fsm::follow(request.state, fsm::Fail{});
      failed_.push_back(request.id);
    }
  }
  retire_oldest();
  return failed_;
}

// Forgets the requests that ended with the step, and the step.
void Scheduler::retire_oldest() {
  PlannedStep& plan = in_flight_[static_cast<size_t>(oldest_)];
  std::erase_if(running_, [](const Request* request) { return fsm::has_ended(request->state); });
  for (const Entry& entry : plan.entries) {
    if (fsm::is<fsm::Finished>(entry.request->state)) requests_.erase(entry.request->id);
  }
  plan.entries.clear();
  plan.step.reset();
  oldest_ = (oldest_ + 1) % kMaxInFlight;
  --num_in_flight_;
}

bool Scheduler::abort(int64_t request_id) {
  const auto found = requests_.find(request_id);
  if (found == requests_.end() || fsm::has_ended(found->second->state)) return false;
  Request* request = found->second.get();
  if (fsm::is<fsm::Waiting>(request->state)) {
    std::erase(waiting_, request);
  } else {
    std::erase(running_, request);
  }
  fsm::follow(request->state, fsm::Abort{});
  if (fsm::is<fsm::Finished>(request->state)) requests_.erase(found);
  return true;
}

std::vector<RequestStatus> Scheduler::requests() const {
  std::vector<RequestStatus> all;
  all.reserve(requests_.size());
  for (const auto& [id, request] : requests_) {
    const fsm::Holding* held = fsm::holding(request->state);
    all.push_back({id, fsm::name(request->state), fsm::num_steps_in_flight(request->state),
                   held != nullptr ? held->pages.num_pages() : 0, held != nullptr ? held->num_positions : 0});
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.request_id < b.request_id; });
  return all;
}

}  // namespace tokenspeed::scheduler
