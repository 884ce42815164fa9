#include "device/gpu/page_mover.h"

#include <algorithm>

namespace tokenspeed::device::gpu {

PageMover::PageMover(std::shared_ptr<const Context> context, const HostTier& tier)
    : context_(std::move(context)),
      tier_(tier),
      host_(context_, "the host tier", tier.nbytes()),
      stream_(context_),
      moved_(context_, kEventDisableTiming) {
  runs_.reserve(static_cast<size_t>(std::min(tier.num_device_pages, tier.num_host_pages)));
}

void PageMover::move(Address kv, std::span<const PageMove> out, std::span<const PageMove> in, const Stream& steps,
                     double patience) {
  tier_.check(out, "out");
  tier_.check(in, "in");
  if (out.empty() && in.empty()) return;
  context_->bind();
  try {
    queue(kv, out, true);
    queue(kv, in, false);
    context_->check(context_->call().event_record(moved_.get(), stream_.get()), "mark the end of moving pages");
    context_->check(context_->call().stream_wait(steps.get(), moved_.get(), 0), "have a step wait for its pages");
  } catch (...) {
    stream_.drain(patience);
    throw;
  }
}

// Pages that follow each other on both sides are one copy.
void PageMover::queue(Address kv, std::span<const PageMove> moves, bool is_out) {
  const EntryPoints& call = context_->call();
  merge_moves(moves, runs_);
  for (const PageRun& run : runs_) {
    const Address device = kv + static_cast<uint64_t>(run.device_page) * tier_.page_bytes;
    std::byte* host = host_.data() + static_cast<uint64_t>(run.host_page) * tier_.page_bytes;
    const size_t nbytes = static_cast<uint64_t>(run.num_pages) * tier_.page_bytes;
    context_->check(is_out ? call.copy_to_host(host, device, nbytes, stream_.get())
                           : call.copy_to_device(device, host, nbytes, stream_.get()),
                    is_out ? "copy pages to the host" : "copy pages to the device");
  }
}

}  // namespace tokenspeed::device::gpu
