// Pages of region kv on their way between a GPU and the host tier, beside the steps in flight.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/gpu/gpu_context.h"
#include "device/host_tier.h"

namespace tokenspeed::device::gpu {

// Copies pass through one stream of their own, which waits for nothing but its own order:
// - A page that leaves was written by steps that have committed: the host has waited for them, so its bytes are there.
//   Steps in flight do not write it. They may read it at most, as a copy does.
// - A page that comes lands where no step in flight reads or writes: whoever plans steps gives pages away only when no
//   step in flight uses them. The page that it replaces may be on its way out, in the same stream and ahead of it.
// - A host page that is read, or written anew, may be the target of an earlier copy: ahead of it in the stream as well.
// Steps do wait: the graph that is started next, and all behind it, for every copy queued so far.
class PageMover {
 public:
  // Pins the host's memory. Throws DeviceError.
  PageMover(std::shared_ptr<const Context> context, const HostTier& tier);

  // Queues copies of all pages of `out`, then of all pages of `in`, and has `steps` wait for them. `kv` is the region's
  // address. Throws DeviceError for moves that do not fit, having queued nothing; and where the driver fails, once what
  // was queued is over, as nobody will wait for it (it is given `patience` seconds).
  void move(Address kv, std::span<const PageMove> out, std::span<const PageMove> in, const Stream& steps,
            double patience);

  const HostTier& tier() const noexcept { return tier_; }
  const std::shared_ptr<Region>& pages() const noexcept { return host_.region(); }
  const Stream& stream() const noexcept { return stream_; }

 private:
  void queue(Address kv, std::span<const PageMove> moves, bool is_out);

  std::shared_ptr<const Context> context_;
  const HostTier tier_;
  PinnedMemory host_;
  Stream stream_;
  Event moved_;
  std::vector<PageRun> runs_;  // of one direction
};

}  // namespace tokenspeed::device::gpu
