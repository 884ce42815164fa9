// What a step takes in virtual time: the seconds of its bucket, and of its attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tokenspeed::simulate {

// A bucket as tokenspeed/bucket.py has it, and what its LaunchGraph takes for a full step without context.
struct BucketCost {
  bool is_decode;
  int32_t num_tokens;
  int32_t num_seqs;
  int32_t num_logit_rows;
  double seconds;
};

// What of a step decides its time.
struct StepSize {
  int32_t num_tokens = 0;
  int32_t num_seqs = 0;
  int32_t num_logit_rows = 0;
  bool is_decode_only = true;
  int64_t context_tokens = 0;  // positions that its decodes read
  double pairs = 0;            // of its chunks: query tokens times the positions that each attends to
  int32_t num_page_moves = 0;  // between device and host
};

class StepCosts {
 public:
  // Throws std::invalid_argument for buckets of a kind that do not grow together, and for times that are none.
  StepCosts(std::vector<BucketCost> buckets, double per_context_token, double per_pair, double per_page_move);

  // The place in buckets() of the smallest one of the step's kind that covers it. Throws std::invalid_argument when
  // there is none.
  int32_t bucket_of(const StepSize& step) const;

  // Nanoseconds, 1 at least. Kernels read a step's sizes and skip most of what pads it, so a step takes a time between
  // that of its bucket and that of the next smaller one, by its tokens; in the smallest, that of the bucket.
  int64_t step_ns(const StepSize& step, int32_t bucket) const noexcept;

  // Decode buckets, then mixed ones, each in order of size.
  const std::vector<BucketCost>& buckets() const noexcept { return buckets_; }
  double per_page_move() const noexcept { return per_page_move_; }

 private:
  std::vector<BucketCost> buckets_;
  double base_seconds(int32_t num_tokens, size_t bucket) const noexcept;

  int32_t num_decode_ = 0;
  double per_context_token_, per_pair_, per_page_move_;
};

}  // namespace tokenspeed::simulate
