// When the graphs of steps ran on the device, by events around each: a measurement that costs a step about a
// microsecond, so it is on only where somebody asked for it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "device/gpu/gpu_context.h"

namespace tokenspeed::device::gpu {

struct StepTime {
  uint64_t ticket;
  int64_t num_tokens, num_seqs;
  double seconds;  // from the start of the step's graph to its end
  double gap;      // from the end of the step before it to its start, in which no graph ran; negative for the first
};

// Keeps the latest steps in a ring of events made beforehand.
class StepTimes {
 public:
  // Throws DeviceError.
  StepTimes(const std::shared_ptr<const Context>& context, size_t num_steps);

  // Around the launch of a step's graph. Throw DeviceError.
  void begin(uint64_t ticket, int64_t num_tokens, int64_t num_seqs, Handle stream);
  void end(Handle stream);

  // The steps since the last call, oldest first, up to and with `done`, the last one known to be done. Where more
  // steps ran than the ring holds, the oldest are lost. Throws DeviceError.
  std::vector<StepTime> take(uint64_t done);

 private:
  struct Slot {
    std::unique_ptr<Event> begin, end;
    uint64_t ticket = 0;
    int64_t num_tokens = 0, num_seqs = 0;
  };
  Slot& slot(uint64_t number) noexcept { return slots_[number % slots_.size()]; }
  double elapsed(const Event& from, const Event& to) const;

  std::shared_ptr<const Context> context_;
  std::vector<Slot> slots_;
  uint64_t begun_ = 0, taken_ = 0;  // steps so far
};

}  // namespace tokenspeed::device::gpu
