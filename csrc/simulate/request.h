// A request of a trace, and what became of it.
#pragma once

#include <cstdint>
#include <vector>

namespace tokenspeed::simulate {

inline constexpr int64_t kNever = INT64_MAX;
inline constexpr int64_t kNone = -1;

enum class Status : uint8_t {
  Open,      // not at its end yet
  Finished,  // drew all its tokens
  Refused,   // the queue was full
  TooLong,   // could never be served: longer than max_model_len, or than all pages
  Expired,   // its deadline came first
};

// One line of a trace. Times in nanoseconds since the start of virtual time.
struct TraceRequest {
  int64_t timestamp_ns = 0;
  int64_t delay_ns = kNone;     // after the end of its session's request before it; kNone: it does not wait for that
  int64_t deadline_ns = kNone;  // after its arrival
  int64_t session = kNone;
  int32_t num_input = 0;
  int32_t num_output = 0;
  int32_t priority = 0;
  int32_t tenant = 0;
  int32_t num_prompt_blocks = 0;  // of `blocks`; the others hold what it draws
  std::vector<uint64_t> blocks;
};

// What became of all requests, one entry each in order of the trace. Times in nanoseconds, kNone: never.
struct Records {
  std::vector<int64_t> arrival, admitted, first_token, end;
  std::vector<int32_t> num_input, num_output, num_cached, num_preemptions, tenant, replica;
  std::vector<uint8_t> status;

  size_t size() const noexcept { return status.size(); }

  void add(const TraceRequest& request) {
    for (auto* times : {&arrival, &admitted, &first_token, &end}) times->push_back(kNone);
    num_input.push_back(request.num_input);
    num_output.push_back(request.num_output);
    num_cached.push_back(0);
    num_preemptions.push_back(0);
    tenant.push_back(request.tenant);
    replica.push_back(-1);
    status.push_back(static_cast<uint8_t>(Status::Open));
  }
};

}  // namespace tokenspeed::simulate
