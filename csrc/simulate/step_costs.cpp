#include "simulate/step_costs.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace tokenspeed::simulate {

namespace {

constexpr double kMostSeconds = 1e4;

std::string shown(const BucketCost& b) {
  return std::string(b.is_decode ? "decode-" : "mixed-") + std::to_string(b.num_tokens);
}

void require_time(double seconds, const std::string& what) {
  if (!(seconds >= 0 && seconds <= kMostSeconds)) {
    throw std::invalid_argument("step costs: need " + what + " of 0 to 10000 seconds, have " + std::to_string(seconds));
  }
}

}  // namespace

StepCosts::StepCosts(std::vector<BucketCost> buckets, double per_context_token, double per_pair, double per_page_move)
    : buckets_(std::move(buckets)),
      per_context_token_(per_context_token),
      per_pair_(per_pair),
      per_page_move_(per_page_move) {
  const auto key = [](const BucketCost& b) { return std::make_tuple(!b.is_decode, b.num_tokens); };
  std::sort(buckets_.begin(), buckets_.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  for (const BucketCost& bucket : buckets_) {
    require_time(bucket.seconds, "a time for " + shown(bucket));
    num_decode_ += bucket.is_decode;
  }
  for (size_t i = 1; i < buckets_.size(); ++i) {
    const BucketCost &low = buckets_[i - 1], &high = buckets_[i];
    if (low.is_decode != high.is_decode) continue;
    if (low.num_tokens == high.num_tokens || low.num_seqs > high.num_seqs || low.num_logit_rows > high.num_logit_rows) {
      throw std::invalid_argument("step costs: need buckets that grow together, have " + shown(low) + " before " +
                                  shown(high));
    }
  }
  require_time(per_context_token, "a time per context token");
  require_time(per_pair, "a time per pair");
  require_time(per_page_move, "a time per page move");
}

int32_t StepCosts::bucket_of(const StepSize& step) const {
  const auto begin = buckets_.begin() + (step.is_decode_only ? 0 : num_decode_);
  const auto end = step.is_decode_only ? buckets_.begin() + num_decode_ : buckets_.end();
  auto found = std::lower_bound(begin, end, step.num_tokens,
                                [](const BucketCost& b, int32_t num_tokens) { return b.num_tokens < num_tokens; });
  while (found != end && (found->num_seqs < step.num_seqs || found->num_logit_rows < step.num_logit_rows)) ++found;
  if (found == end) {
    throw std::invalid_argument("step costs: need a bucket for a " +
                                std::string(step.is_decode_only ? "decode" : "mixed") + " step of " +
                                std::to_string(step.num_tokens) + " tokens, " + std::to_string(step.num_seqs) +
                                " sequences and " + std::to_string(step.num_logit_rows) + " logit rows, have none");
  }
  return static_cast<int32_t>(found - buckets_.begin());
}

double StepCosts::base_seconds(int32_t num_tokens, size_t bucket) const noexcept {
  const BucketCost& high = buckets_[bucket];
  if (bucket == 0 || buckets_[bucket - 1].is_decode != high.is_decode) return high.seconds;
  const BucketCost& low = buckets_[bucket - 1];
  const double share = static_cast<double>(num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens);
  return low.seconds + std::max(0.0, share) * (high.seconds - low.seconds);
}

int64_t StepCosts::step_ns(const StepSize& step, int32_t bucket) const noexcept {
  const double seconds = base_seconds(step.num_tokens, static_cast<size_t>(bucket)) +
                         per_context_token_ * static_cast<double>(step.context_tokens) + per_pair_ * step.pairs +
                         per_page_move_ * step.num_page_moves;
  return std::max<int64_t>(1, std::llround(seconds * 1e9));
}

}  // namespace tokenspeed::simulate
