// Cached prefixes: who hits what, when pages are published, duplicates, namespaces, flushes, and the host tier.
#include <set>
#include <string>
#include <vector>

#include "scheduler_fixture.h"
#include "test.h"

using namespace tokenspeed::scheduler;
using namespace tokenspeed::scheduler::testing;

namespace {

// Admits a request for `tokens` now; returns what it hit. It ends at once.
std::pair<int32_t, int32_t> hit_of(Scheduler& s, Ints tokens, RequestParams params = wants(1)) {
  static int64_t next_id = 1000;
  s.submit(++next_id, std::move(tokens), std::move(params));
  const Step* step = s.next_step();
  const auto found = hit(step);
  s.abort(next_id);
  commit(s, step);
  return found;
}
int32_t cached_tokens(Scheduler& s, Ints tokens, RequestParams params = wants(1)) {
  return hit_of(s, std::move(tokens), std::move(params)).first;
}

// A scheduler in which a request with this prompt has run and ended.
void serve(Scheduler& s, int64_t id, Ints tokens, RequestParams params = wants(1)) {
  s.submit(id, std::move(tokens), std::move(params));
  run_dry(s);
}

Ints joined(Ints first, const Ints& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

SchedulerConfig with_host(int32_t num_pages, int32_t num_host_pages) {
  SchedulerConfig config = cached();
  config.num_pages = num_pages;
  config.num_host_pages = num_host_pages;
  return config;
}

}  // namespace

TEST(whole_pages_are_hit_and_the_last_token_is_computed) {
  Scheduler s(cached());
  serve(s, 1, prompt(12));
  CHECK(s.num_cached_pages() == 3 && s.num_free_pages() == 13);
  CHECK(cached_tokens(s, prompt(14)) == 12);
  CHECK(cached_tokens(s, prompt(13)) == 12);
  CHECK(cached_tokens(s, prompt(12)) == 8);  // its last page holds the last token, which draws
  CHECK(cached_tokens(s, prompt(7)) == 4);
  CHECK(cached_tokens(s, prompt(4)) == 0 && cached_tokens(s, prompt(12, 101)) == 0);
  s.submit(2, prompt(14), wants(2));
  const Step* step = s.next_step();
  CHECK((tokens(step) == Ints{112, 113} && head(step->positions, 2) == Ints{12, 13} && lens(step) == Ints{14}));
  CHECK((bounds(step) == Ints{0, 2}) && step->slot_mapping[0] == int64_t{4} * pages(step, 0, 4)[3]);
  CHECK(s.counters().cached_tokens == 12 + 12 + 8 + 4 + 12);
  CHECK(s.counters().prompt_tokens == 12 + 14 + 13 + 12 + 7 + 4 + 12 + 14);
}

TEST(pages_are_published_by_chunks_decodes_and_at_the_end) {
  Scheduler s(cached());
  s.submit(1, prompt(11), wants(6));
  turn(s);
  CHECK(cached_tokens(s, prompt(9)) == 8);  // from the first chunk, while 1 prefills: in this step it draws its first
  const Ints known = joined(prompt(11), {1, 5});
  CHECK(cached_tokens(s, known) == 8);   // which is computed in this step,
  CHECK(cached_tokens(s, known) == 12);  // and found while 1 decodes
  run_dry(s);
  CHECK(s.is_idle());
  // Of its 17 tokens the last was drawn, not computed.
  CHECK(cached_tokens(s, joined(prompt(11), {1, 1, 1, 1, 1, 1})) == 16);
  CHECK(cached_tokens(s, joined(prompt(11), {1, 1, 1, 7, 1, 1})) == 12);
}

TEST(nothing_is_published_before_its_step_is_over) {
  SchedulerConfig config = cached();
  config.max_in_flight = 2;
  Scheduler s(config);
  s.submit(1, prompt(8), wants(4));
  const Step* one = s.next_step();
  s.submit(2, prompt(9), wants(4));
  const Step* two = s.next_step();
  CHECK(hit(two).first == 0);
  commit(s, one), commit(s, two);
  CHECK(cached_tokens(s, prompt(9)) == 8);
}

TEST(a_preempted_request_hits_its_own_pages) {
  Scheduler s(cached());
  s.submit(1, prompt(7), wants(8));
  turn(s, 300), turn(s, 301), turn(s, 302);
  CHECK(s.preempt(1) && s.num_running() == 0 && s.num_preempted() == 1);
  const Step* step = s.next_step();
  CHECK(hit(step) == std::pair(8, 0) && step->decision.admitted[0].is_resumed && step->decision.preempted == Ids{1});
  CHECK((tokens(step) == Ints{301, 302} && head(step->positions, 2) == Ints{8, 9}));
  CHECK(s.counters().prompt_tokens == 7 && s.counters().cached_tokens == 0);  // these are of first admissions
  CHECK(commit(s, step, 303)[0].token == 303);
}

// What is cached is skipped up to the first token whose logits are needed: one before logprob_start_len.
TEST(prompt_rows_begin_behind_cached_pages) {
  Scheduler s(cached());
  serve(s, 1, prompt(14));
  RequestParams rows = wants(1);
  rows.num_prompt_logprobs = 0;
  const auto cached_from = [&](int32_t start) {
    rows.logprob_start_len = start;
    return cached_tokens(s, prompt(14), rows);
  };
  CHECK(cached_from(0) == 0 && cached_from(1) == 0 && cached_from(4) == 0 && cached_from(5) == 4);
  CHECK(cached_from(8) == 4 && cached_from(9) == 8 && cached_from(12) == 8 && cached_from(13) == 12);
  CHECK(cached_from(14) == 12);  // none is asked: the token that draws is computed, as ever
  rows.logprob_start_len = 10;
  rows.max_new_tokens = 2;
  s.submit(2, prompt(14), rows);
  const Step* step = s.next_step();
  CHECK(hit(step) == std::pair(8, 0) && (head(step->positions, 6) == Ints{8, 9, 10, 11, 12, 13}));
  CHECK(step->num_logit_rows == 5 && (head(step->logit_rows, 5) == Ints{1, 2, 3, 4, 5}));
  CHECK((head(step->logit_target, 5) == Ints{110, 111, 112, 113, -1}));
}

TEST(who_asks_for_prompt_rows_publishes_its_pages) {
  Scheduler s(cached());
  RequestParams rows = wants(1);
  rows.num_prompt_logprobs = 3;
  serve(s, 1, prompt(9), rows);
  CHECK(cached_tokens(s, prompt(9)) == 8);
}

// Preempted halfway through its prompt rows, a request goes on from the next one, behind what is cached.
TEST(prompt_rows_go_on_where_they_were) {
  SchedulerConfig config = cached();
  config.max_logit_rows = 6;
  Scheduler s(config);
  RequestParams rows = wants(2);
  rows.num_prompt_logprobs = 0;
  s.submit(1, prompt(10), rows);
  const Step* step = s.next_step();
  CHECK(step->num_logit_rows == 6 && (lens(step) == Ints{6}));
  commit(s, step, 0);
  CHECK(s.preempt(1));
  step = s.next_step();
  CHECK(hit(step) == std::pair(4, 0) && (head(step->positions, 6) == Ints{4, 5, 6, 7, 8, 9}));
  CHECK((head(step->logit_target, 4) == Ints{107, 108, 109, -1}) && (head(step->logit_rows, 4) == Ints{2, 3, 4, 5}));
}

TEST(prompt_logprobs_and_penalties_compute_the_whole_prompt) {
  SchedulerConfig config = cached();
  config.vocab_size = 1000;
  Scheduler s(config);
  serve(s, 1, prompt(6));
  RequestParams rows = wants(1), penalties = wants(1), biased = wants(1);
  rows.num_prompt_logprobs = 0;
  penalties.frequency_penalty = 0.5f;
  biased.bias_ids = {3}, biased.bias_values = {1};
  CHECK(cached_tokens(s, prompt(6), rows) == 0 && cached_tokens(s, prompt(6), penalties) == 0);
  CHECK(cached_tokens(s, prompt(6), biased) == 4);
  serve(s, 2, prompt(6, 500), penalties);  // but what they computed is found
  CHECK(cached_tokens(s, prompt(6, 500)) == 4);
}

TEST(without_an_index_nothing_is_cached) {
  Scheduler s(small());
  serve(s, 1, prompt(12));
  CHECK(s.num_cached_pages() == 0 && cached_tokens(s, prompt(13)) == 0 && s.num_free_pages() == 16);
}

// Two requests with one prompt side by side: each computes it, one page is kept, and the other is freed when no step
// can read it any more.
TEST(a_duplicate_is_swapped_and_freed_behind_the_steps_in_flight) {
  SchedulerConfig config = cached();
  config.max_in_flight = 3;
  Scheduler s(config);
  s.submit(1, prompt(4), wants(9));
  s.submit(2, prompt(4), wants(9));
  const Step* one = s.next_step();
  CHECK(pages(one, 0, 1) != pages(one, 1, 1));
  const Ints kept = pages(one, 0, 1), duplicate = pages(one, 1, 1);
  const Step* two = s.next_step();
  const Step* three = s.next_step();
  commit(s, one, 50);
  CHECK(s.count_pages().retired == 1 && s.count_pages().shared == 1);
  CHECK(pages(two, 1, 1) == duplicate && pages(three, 1, 1) == duplicate);  // what is in flight stays as it was
  const Step* four = s.next_step();
  CHECK(pages(four, 0, 1) == kept && pages(four, 1, 1) == kept && pages(four, 0, 2) != pages(four, 1, 2));
  CHECK((head(four->positions, 2) == Ints{6, 6}) && four->slot_mapping[1] == int64_t{4} * pages(four, 1, 2)[1] + 2);
  commit(s, two, 51);
  CHECK(s.count_pages().retired == 1);
  commit(s, three, 52);
  CHECK(s.count_pages().retired == 0 && s.count_pages().shared == 1);
  s.abort(1), s.abort(2), commit(s, four);
  CHECK(s.is_idle() && to_be_had(s) == 16 && s.num_cached_pages() == 1);
}

TEST(a_swap_reaches_rows_that_are_reused) {
  Scheduler s(cached());
  s.submit(1, prompt(3), wants(9));
  s.submit(2, prompt(3), wants(9));
  turn(s, 60);
  const Step* step = s.next_step();  // both fill their first page
  const Ints kept = pages(step, 0, 1);
  CHECK(pages(step, 1, 1) != kept);
  commit(s, step, 61);
  CHECK(s.count_pages().shared == 0);
  s.settle();
  CHECK(s.count_pages().retired == 0 && s.count_pages().shared == 1);
  step = s.next_step();
  CHECK(pages(step, 0, 1) == kept && pages(step, 1, 1) == kept);
  commit(s, step, 62);
}

TEST(settling_frees_the_pages_that_the_next_decodes_need) {
  SchedulerConfig config = cached();
  config.num_pages = 3;
  Scheduler s(config);
  s.submit(1, prompt(8), wants(1));
  turn(s, 60);  // ends, and leaves two cached pages of 4
  s.submit(2, {7, 7, 7}, wants(9));
  turn(s, 61);
  CHECK(s.num_free_pages() == 0 && s.num_cached_pages() == 2);
  const Step* step = s.next_step();  // fills its page
  CHECK(s.num_evictions() == 0);
  s.settle();
  CHECK(s.num_evictions() == 1 && s.num_free_pages() == 1);
  commit(s, step, 62);
  step = s.next_step();
  CHECK(s.num_evictions() == 1 && s.num_free_pages() == 0 && step->decision.num_evicted_pages == 1);
  commit(s, step, 63);
}

TEST(keys_and_salts_are_namespaces) {
  Scheduler s(cached());
  RequestParams a = wants(1), b = wants(1);
  a.cache_key = "a", b.cache_key = "b";
  serve(s, 1, prompt(9), a);
  CHECK(cached_tokens(s, prompt(9), a) == 8 && cached_tokens(s, prompt(9), b) == 0 && cached_tokens(s, prompt(9)) == 0);

  const auto hashes = [](const char* salt) {
    SchedulerConfig config = cached();
    config.cache_salt = salt;
    config.record_kv_events = true;
    Scheduler t(config);
    serve(t, 1, prompt(9));
    std::vector<tokenspeed::cache::PrefixEvent> events;
    t.take_events(events);
    std::vector<uint64_t> all;
    for (const auto& event : events) all.push_back(event.hash);
    return all;
  };
  CHECK(hashes("x").size() == 2 && hashes("x") == hashes("x") && hashes("x") != hashes("y"));
}

TEST(after_a_flush_nothing_of_before_is_used) {
  SchedulerConfig config = cached();
  config.max_in_flight = 2;
  Scheduler s(config);
  serve(s, 1, prompt(9));
  s.submit(2, prompt(14), wants(4));
  const Step* one = s.next_step();
  CHECK(hit(one).first == 8);
  s.flush_prefixes();
  CHECK(s.num_cached_pages() == 0);
  s.submit(3, prompt(14), wants(4));
  const Step* two = s.next_step();
  CHECK(hit(two).first == 0);
  commit(s, one), commit(s, two);
  for (int i = 0; i < 2; ++i) turn(s);
  CHECK(cached_tokens(s, prompt(15)) == 12);  // of 3; what 2 computed behind old pages is not found
  run_dry(s);
  CHECK(s.is_idle() && to_be_had(s) == 16);
}

// What an update of weights does to requests that shall go on: none of their pages is read again.
TEST(all_may_be_preempted_before_a_flush) {
  Scheduler s(cached());
  serve(s, 1, prompt(9));
  s.submit(2, prompt(9), wants(6));
  turn(s);
  CHECK(s.preempt(2));  // which no new request could make it do again at once
  turn(s);
  s.submit(3, prompt(14, 500), wants(4));
  const Step* step = s.next_step();
  commit(s, step);
  for (const int64_t id : {2, 3}) s.preempt(id, true);
  CHECK(s.num_running() == 0 && s.num_preempted() == 2 && s.num_in_flight() == 0);
  s.flush_prefixes();
  CHECK(s.num_cached_pages() == 0 && s.num_free_pages() == s.num_pages());
  step = s.next_step();
  CHECK(hit(step).first == 0);
  commit(s, step);
  CHECK(!s.preempt(99, true));
  run_dry(s);
  CHECK(s.is_idle());
}

TEST(a_cold_prefix_goes_to_the_host_and_comes_back) {
  Scheduler s(with_host(4, 8));
  serve(s, 1, prompt(8));
  CHECK(s.num_cached_pages() == 2 && s.num_host_pages_used() == 0);
  s.submit(2, prompt(8, 500), wants(5));
  const Step* step = s.next_step();
  CHECK(step->moves_out.size() == 1 && step->moves_in.empty() && step->decision.num_evicted_pages == 1);
  CHECK(s.num_host_pages_used() == 1);
  const PageMove out = step->moves_out[0];
  commit(s, step);
  run_dry(s);
  s.submit(3, prompt(9), wants(1));
  step = s.next_step();
  CHECK(hit(step) == std::pair(8, 4) && step->moves_in.size() == 1 && step->moves_in[0].host_page == out.host_page);
  CHECK(pages(step, 0, 2)[1] == step->moves_in[0].device_page);
  CHECK(s.counters().restored_tokens == 4 && s.counters().cached_tokens == 8);
  commit(s, step);
}

// Every step has moves of its own: those of the step that lay in the same memory before are not repeated.
TEST(moves_are_made_once) {
  Scheduler s(with_host(4, 8));
  serve(s, 1, prompt(8));
  serve(s, 2, prompt(12, 500));
  s.submit(3, prompt(9), wants(1));
  const Step* step = s.next_step();
  CHECK(step->moves_in.size() == 2);
  commit(s, step);
  CHECK(s.next_step() == nullptr);  // an empty plan behind a step that brought pages in
  s.submit(4, prompt(9), wants(3));
  step = s.next_step();
  CHECK(hit(step) == std::pair(8, 0) && step->moves_in.empty() && step->moves_out.empty());
  commit(s, step);
}

TEST(a_failed_step_with_moves_ends_whoever_uses_their_pages) {
  SchedulerConfig config = with_host(8, 8);
  config.max_in_flight = 2;
  config.max_prefill_tokens = 3;
  Scheduler s(config);
  serve(s, 1, prompt(8));
  serve(s, 2, prompt(28, 500));  // takes all pages
  CHECK(s.num_host_pages_used() >= 2);
  s.submit(3, prompt(10), wants(9));
  s.submit(4, prompt(11), wants(9));
  s.submit(5, prompt(3, 900), wants(9));
  const Step* one = s.next_step();
  CHECK(hit(one) == std::pair(8, 8) && one->moves_in.size() == 2 && one->num_seqs == 2);
  const Step* two = s.next_step();
  CHECK(two->num_seqs >= 2);
  const Ids ended = fail(s, one);
  CHECK((ended == Ids{3, 4}));
  CHECK(commit(s, two).empty());
  CHECK(cached_tokens(s, prompt(10)) == 0);  // what did not arrive is not found
  run_dry(s);
  CHECK(s.is_idle() && to_be_had(s) == 8);
}

TEST(a_request_in_a_later_step_ends_with_the_pages_that_it_hit) {
  SchedulerConfig config = with_host(8, 8);
  config.max_in_flight = 2;
  config.max_num_seqs = 2;
  config.max_prefill_tokens = 2;
  Scheduler s(config);
  serve(s, 1, prompt(8));
  serve(s, 2, prompt(28, 500));
  s.submit(3, prompt(10), wants(9));
  const Step* one = s.next_step();
  CHECK(hit(one) == std::pair(8, 8));
  s.submit(4, prompt(9), wants(9));
  const Step* two = s.next_step();
  CHECK(hit(two) == std::pair(8, 0));  // brought in by the step before, which is in flight
  CHECK((fail(s, one) == Ids{3, 4}));
  CHECK(commit(s, two).empty() && s.is_idle() && to_be_had(s) == 8);
}

TEST(a_failed_step_without_moves_ends_its_requests_alone) {
  SchedulerConfig config = cached();
  config.max_in_flight = 2;
  Scheduler s(config);
  serve(s, 1, prompt(8));
  s.submit(2, prompt(9), wants(3));
  const Step* one = s.next_step();
  s.submit(3, prompt(10), wants(3));
  const Step* two = s.next_step();
  CHECK((ids(two) == Ids{2, 3}) && hit(two).first == 8);
  CHECK((fail(s, one) == Ids{2}));
  CHECK(commit(s, two).size() == 1 && cached_tokens(s, prompt(10)) == 8);
}

TEST(without_the_host_tier_what_was_there_is_computed) {
  Scheduler s(with_host(4, 8));
  serve(s, 1, prompt(8));
  serve(s, 2, prompt(12, 500));
  CHECK(s.num_host_pages_used() == 2);
  s.drop_host_tier();
  CHECK(s.num_host_pages_used() == 0 && hit_of(s, prompt(9)) == std::pair(0, 0));
  serve(s, 3, prompt(12, 700));
  CHECK(s.num_host_pages_used() == 0 && s.is_idle() && to_be_had(s) == 4);
}

TEST_MAIN
