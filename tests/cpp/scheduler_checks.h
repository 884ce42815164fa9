// The rules of SchedulerModel, which includes this: what a plan may hold, and what is always true between two calls.
#pragma once

#include "scheduler_model.h"

namespace tokenspeed::scheduler::testing {

inline void SchedulerModel::check_step(const Step& step, Flying& flying, const std::vector<RequestStatus>& after) {
  flying.step = &step;
  flying.step_id = step.id;
  flying.weights = weights_;
  require(step.id == ++last_step_, "steps are counted");
  require(step.num_seqs > 0 && step.num_seqs <= config_.max_num_seqs, "a step has 1 to max_num_seqs sequences");
  require(step.num_tokens <= config_.max_prefill_tokens, "a step has at most max_prefill_tokens tokens");
  require(step.num_logit_rows <= config_.max_logit_rows, "a step has at most max_logit_rows rows");
  const int32_t sizes[] = {step.num_tokens,      step.num_seqs,   step.num_logit_rows,
                           step.num_adjustments, step.num_biases, step.num_masks};
  require(std::equal(std::begin(sizes), std::end(sizes), step.step_sizes), "step_sizes has the step's sizes");
  require(step.cu_seqlens[0] == 0 && step.cu_seqlens[step.num_seqs] == step.num_tokens, "cu_seqlens spans the step");

  check_preemptions(step.decision);
  for (const Admission& admission : step.decision.admitted) check_admission(admission);
  int32_t row = 0, adjusted = 0;
  for (int32_t seq = 0; seq < step.num_seqs; ++seq) {
    int64_t id = -1;
    if (row < step.num_logit_rows && step.logit_rows[row] < step.cu_seqlens[seq + 1]) {
      id = step.rows[static_cast<size_t>(row)].request_id;
    } else {  // a chunk without rows leaves its request prefilling
      for (const RequestStatus& s : after) id = std::string(s.state) == "prefilling" ? s.request_id : id;
    }
    ModelRequest& r = at(id);
    require(r.state == State::Running, "who is in a step runs");
    require(std::find(flying.members.begin(), flying.members.end(), id) == flying.members.end(),
            "a request is in a step once");
    check_sequence(step, seq, r, row, adjusted);
    flying.members.push_back(id);
    flying.sequences.push_back({r.key, r.oldest_weights});
  }
  require(row == step.num_logit_rows && adjusted == step.num_adjustments, "rows and adjustments are of sequences");
  check_pages(step);
  check_order(step, flying);
  stats.moves += static_cast<int64_t>(step.moves_out.size() + step.moves_in.size());
}

inline void SchedulerModel::check_preemptions(const Decision& decision) {
  for (const int64_t id : decision.preempted) {
    const auto found = requests_.find(id);
    if (found != requests_.end() && found->second.state == State::Running) preempted(found->second);
  }
  std::vector<int64_t> told = decision.preempted;
  std::sort(told.begin(), told.end());
  std::sort(preempted_since_.begin(), preempted_since_.end());
  require(told == preempted_since_, "a step tells who was preempted since the one before");
  preempted_since_.clear();
}

inline void SchedulerModel::check_admission(const Admission& a) {
  ModelRequest& r = at(a.request_id);
  require(r.state == State::Waiting || r.state == State::Preempted, "who waits is admitted");
  require(a.is_resumed == (r.state == State::Preempted), "an admission tells whether it is the first");
  require(a.waited_ns == now_ns_ - r.since_ns, "an admission tells how long the request has waited");
  const int32_t cached = a.num_cached_tokens, restored = a.num_restored_tokens;
  require(cached % config_.page_size == 0 && cached <= r.next_row(), "whole pages are hit, and no token with a logit row");
  require(restored % config_.page_size == 0 && restored <= cached, "what is restored is part of the hit");
  require(cached == 0 || (config_.prefix_index && r.params.may_skip_prompt()), "a hit is for those who may have it");
  require(restored == 0 || config_.num_host_pages > 0, "pages are restored from a host tier");
  r.state = State::Running;
  r.is_prefilling = true;
  r.planned = cached;
  r.oldest_weights = weights_;
  stats.hits += cached > 0;
  stats.hits_with_rows += cached > 0 && r.next_row() < r.num_prompt - 1;
  stats.restored += restored > 0;
}

inline void SchedulerModel::check_sequence(const Step& s, int32_t seq, ModelRequest& r, int32_t& row,
                                           int32_t& adjusted) {
  const int32_t begin = s.cu_seqlens[seq], end = s.cu_seqlens[seq + 1], count = end - begin;
  const int32_t first = s.positions[begin], reached = first + count;
  const bool is_decode = s.token_ids[begin] < 0;
  require(count >= 1 && s.context_lens[seq] == reached, "a sequence has tokens, up to its context's end");
  require(is_decode == (seq < s.num_decodes), "decodes come first, then chunks");
  require(first == r.planned, "a sequence goes on where it was planned to");
  for (int32_t t = begin; t < end; ++t) require(s.positions[t] == first + t - begin, "positions follow one another");
  bool draws = true;
  if (is_decode) {
    require(count == 1 && r.can_decode(), "a decode is one token, of a request that decodes");
    require(first == r.num_known() + r.drawing - 1, "a decode is of the newest token");
  } else {
    require(r.is_prefilling, "a chunk is of a request that prefills");
    require(reached <= r.num_known() && std::equal(s.token_ids + begin, s.token_ids + end, r.known.begin() + first),
            "a chunk has the tokens that are known");
    draws = reached == r.num_known();
    const int32_t rows_end = r.params.num_prompt_logprobs >= 0 ? std::min(reached, r.num_prompt - 1) : 0;
    for (; r.rows_planned < rows_end; ++r.rows_planned) {
      const int32_t p = r.rows_planned;
      require(p >= first, "prompt rows are planned when their token is");
      check_row(s, row++, r, true, begin + p - first, p + 1);
    }
    if (draws) r.is_prefilling = false;
  }
  int32_t draw_row = -1;
  if (draws) {
    if (r.slot < 0) r.slot = s.state_slot[row];
    check_row(s, draw_row = row++, r, false, end - 1, reached);
    require(!is_decode || s.token_ids[begin] == -1 - r.slot, "a decode reads the token that was drawn last");
  }
  check_adjustment(s, seq, r, draw_row, adjusted);
  r.planned = reached;
  r.drawing += draws;
  r.flying += 1;
}

inline void SchedulerModel::check_row(const Step& s, int32_t row, const ModelRequest& r, bool is_prompt_row,
                                      int32_t token_row, int32_t position) const {
  const RowInfo& info = s.rows[static_cast<size_t>(row)];
  require(row < s.num_logit_rows && info.request_id == r.id, "rows come in the order of sequences");
  require(info.is_prompt_row == is_prompt_row, "a row is of a prompt, or draws");
  require(s.logit_rows[row] == token_row && s.draw_position[row] == position, "a row is of its token");
  require(s.logit_target[row] == (is_prompt_row ? r.known[static_cast<size_t>(position)] : -1), "a row has its target");
  require(s.num_logprobs[row] == (is_prompt_row ? r.params.num_prompt_logprobs : r.params.num_logprobs),
          "a row has as many log-probabilities as were asked for");
  require(s.state_slot[row] == (is_prompt_row ? -1 : r.slot) && (is_prompt_row || r.slot >= 0),
          "what is drawn goes to the slot of its request");
}

inline void SchedulerModel::check_adjustment(const Step& s, int32_t seq, const ModelRequest& r, int32_t draw_row,
                                             int32_t& adjusted) const {
  const bool counts = r.params.has_penalties();
  if (!(draw_row >= 0 ? r.params.adjusts_draws() : counts)) {
    require(draw_row < 0 || s.adjustment[draw_row] == -1, "who asks for no adjustment has none");
    return;
  }
  const int32_t a = adjusted++;
  require(a < s.num_adjustments && s.adjust_seq[a] == seq && s.adjust_row[a] == draw_row, "adjustments are in order");
  require(draw_row < 0 || s.adjustment[draw_row] == a, "a row has its adjustment");
  require(s.prompt_lens[a] == r.num_prompt, "penalties know the prompt's length");
  require((s.count_slot[a] >= 0) == counts && (!counts || r.slot < 0 || s.count_slot[a] == r.slot),
          "penalties count under the request's slot");
}

// What the step writes, nobody else has: not in it, and not in a step in flight.
inline void SchedulerModel::check_pages(const Step& step) const {
  std::map<int32_t, int64_t> writers;
  const auto page_of = [](const Step& s, int32_t seq, int32_t i) {
    return s.page_table[int64_t{seq} * s.pages_per_sequence + i];
  };
  const auto& members = flying_.back().members;
  for (int32_t seq = 0; seq < step.num_seqs; ++seq) {
    const int32_t first = step.positions[step.cu_seqlens[seq]] / config_.page_size;
    for (int32_t i = first; i < config_.pages_for(step.context_lens[seq]); ++i) {
      const int32_t page = page_of(step, seq, i);
      require(page >= 0 && page < config_.num_pages, "pages are of the pool");
      require(writers.emplace(page, members[static_cast<size_t>(seq)]).second, "a page is written for one request");
    }
  }
  for (const Flying& flying : flying_) {
    for (int32_t seq = 0; seq < flying.step->num_seqs; ++seq) {
      for (int32_t i = 0; i < config_.pages_for(flying.step->context_lens[seq]); ++i) {
        const auto found = writers.find(page_of(*flying.step, seq, i));
        require(found == writers.end() || found->second == flying.members[static_cast<size_t>(seq)],
                "what a step writes, nobody else reads");
      }
    }
  }
}

// Who comes first, and who may be kept out.
inline void SchedulerModel::check_order(const Step& step, const Flying& flying) const {
  const Decision& d = step.decision;
  const int32_t to_be_had = scheduler_.num_free_pages() + scheduler_.num_cached_pages();
  const auto is_member = [&](const ModelRequest& r) {
    return std::find(flying.members.begin(), flying.members.end(), r.id) != flying.members.end();
  };
  const ModelRequest* prefill = nullptr;
  for (const auto& [id, r] : requests_) {
    if (r.state == State::Running && r.is_prefilling) {
      require(prefill == nullptr, "at most one prefill is incomplete");
      prefill = &r;
    }
    if (r.can_decode() && !is_member(r)) {
      require(d.held == Held::Decodes || d.held == Held::ChunkFirst, "a decode is kept out by a want of pages alone");
      require(to_be_had == 0 || !d.preempted.empty(), "a decode is kept out while no page is to be had");
    }
  }
  if (prefill != nullptr) {
    require(d.held == Held::ChunkFirst || d.held == Held::Decodes, "an incomplete prefill holds the line");
    const bool is_in = is_member(*prefill);
    require(!is_in || flying.members.back() == prefill->id, "an incomplete prefill comes last");
    const bool wants_rows = prefill->params.num_prompt_logprobs >= 0 || step.num_logit_rows == config_.max_logit_rows;
    const bool lacks_pages = to_be_had <= (config_.page_size == 1);  // the last chunk needs one for its draw, too
    if (!lacks_pages && !wants_rows) {
      require(is_in && step.num_tokens == config_.max_prefill_tokens, "a prefill takes what tokens are left");
    }
  }
  const int64_t waiting = count(State::Waiting) + count(State::Preempted);
  require(d.held != Held::NothingWaits || waiting == 0, "nothing waits when it is said so");
  require(d.held != Held::Tokens || step.num_tokens == config_.max_prefill_tokens, "tokens are short if it is said");
  require(d.num_decodes == step.num_decodes && d.num_decodes + d.num_chunks == step.num_seqs, "a decision has counts");
  require(d.num_decode_tokens + d.num_prefill_tokens == step.num_tokens && d.num_waiting == waiting, "and sums");
}

inline void SchedulerModel::check_events() {
  using Kind = cache::PrefixEvent::Kind;
  scheduler_.take_events(events_);
  for (const cache::PrefixEvent& e : events_) {
    if (e.kind == Kind::Stored) {
      require(cached_hashes_.insert(e.hash).second, "a page is stored once");
      require(!e.parent_hash || cached_hashes_.contains(*e.parent_hash), "a page is stored behind its parent");
    } else if (e.kind == Kind::Removed) {
      require(cached_hashes_.erase(e.hash) == 1, "a page is removed that was stored");
    } else {
      cached_hashes_.clear();
    }
  }
}

inline void SchedulerModel::check(const std::vector<RequestStatus>& statuses) {
  ++stats.operations;
  require(statuses.size() == requests_.size(), "the scheduler knows whom the model knows");
  auto known = requests_.begin();
  std::set<int32_t> slots;
  for (const RequestStatus& s : statuses) {
    const ModelRequest& r = (known++)->second;
    const char* state = r.state == State::Waiting     ? "waiting"
                        : r.state == State::Preempted ? "preempted"
                        : r.state == State::Draining  ? "draining"
                        : r.is_prefilling             ? "prefilling"
                                                      : "decoding";
    require(s.request_id == r.id && std::string(s.state) == state, "a request is in the state that the model has");
    require(s.num_steps_in_flight == r.flying, "a request is in so many steps in flight");
    if (r.state == State::Running) {
      require(s.num_positions == r.planned, "a request has so many positions");
      require(s.num_pages >= config_.pages_for(r.planned), "positions that are planned have pages");
    }
    require(r.slot < 0 || slots.insert(r.slot).second, "a slot is of one request");
  }
  const PageCounts pages = scheduler_.count_pages();
  require(pages.free + pages.cached + pages.shared + pages.own + pages.retired == config_.num_pages,
          "every page is in one place");
  require(std::min({pages.free, pages.cached, pages.shared, pages.own, pages.retired}) >= 0, "in which there is some");
  require(config_.prefix_index || pages.cached + pages.shared == 0, "without an index no page is cached");
  require(pages.retired == 0 || !flying_.empty(), "pages are retired for steps in flight");
  stats.retired += pages.retired > 0;
  require(scheduler_.num_in_flight() == static_cast<int32_t>(flying_.size()), "so many steps are in flight");
  require(scheduler_.num_preempted() == count(State::Preempted), "so many are preempted");
  require(scheduler_.num_waiting() == count(State::Waiting) + count(State::Preempted), "so many wait");
  require(scheduler_.num_running() == count(State::Running), "so many run");
  require(scheduler_.is_idle() == (requests_.empty() && flying_.empty()), "it is idle when nothing is left");
  if (config_.record_kv_events) check_events();
}

}  // namespace tokenspeed::scheduler::testing
