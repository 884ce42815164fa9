#include "scheduler/config.h"

#include <stdexcept>
#include <string>

#include "fsm/states.h"

namespace tokenspeed::scheduler {

namespace {

void require(bool holds, const char* name, const std::string& need, int32_t have) {
  if (!holds) {
    throw std::invalid_argument(std::string("scheduler config: ") + name + " needs " + need + ", have " +
                                std::to_string(have));
  }
}

}  // namespace

void SchedulerConfig::validate() const {
  require(max_num_seqs >= 1, "max_num_seqs", "1 or more", max_num_seqs);
  require(max_prefill_tokens >= max_num_seqs, "max_prefill_tokens",
          "max_num_seqs (" + std::to_string(max_num_seqs) + ") or more", max_prefill_tokens);
  require(max_logit_rows >= max_num_seqs, "max_logit_rows",
          "max_num_seqs (" + std::to_string(max_num_seqs) + ") or more", max_logit_rows);
  require(max_model_len >= 2, "max_model_len", "2 or more", max_model_len);
  require(page_size >= 1, "page_size", "1 or more", page_size);
  require(num_pages >= 1, "num_pages", "1 or more", num_pages);
  require(max_waiting >= 1, "max_waiting", "1 or more", max_waiting);
  require(max_in_flight >= 1 && max_in_flight <= fsm::kMaxInFlight, "max_in_flight",
          "1 to " + std::to_string(fsm::kMaxInFlight), max_in_flight);
  require(vocab_size >= 0, "vocab_size", "0 or more", vocab_size);
  require(num_host_pages >= 0, "num_host_pages", "0 or more", num_host_pages);
  require(aging_ns >= 0, "aging_ns", "0 or more", static_cast<int32_t>(aging_ns < 0 ? -1 : 0));
}

}  // namespace tokenspeed::scheduler
