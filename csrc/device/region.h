// Regions: the device's memory, each one address range that never moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tokenspeed::device {

// The numbers are those of LaunchGraph arguments. HostIo is a GPU's alone: the host's memory of a step's inputs and
// outputs, which the GPU reads and writes where it lies.
enum class RegionKind : uint8_t { Weights = 0, Kv = 1, Arena = 2, Io = 3, State = 4, HostIo = 5 };
inline constexpr uint32_t kNumRegions = 6;

const char* region_name(RegionKind kind) noexcept;

// Throws DeviceError for a name that is none of weights, kv, arena, io, state, host_io.
RegionKind region_by_name(std::string_view name);

// A range of addresses that stays the same as long as the region lives.
class Region {
 public:
  static constexpr size_t kHugePage = size_t{2} << 20;

  // Anonymous memory at a 2 MiB boundary, zeroed by the system when first touched; on huge pages where it is
  // large enough. `what` names it in errors. Throws DeviceError when the system has less memory available than
  // `nbytes`, or refuses the mapping.
  Region(std::string_view what, uint64_t nbytes);
  // `nbytes` that begin `lead` bytes into the mapping at `base`, which the region unmaps at its end.
  Region(std::byte* base, size_t mapped, size_t lead, uint64_t nbytes) noexcept
      : base_(base), data_(base + lead), size_(nbytes), mapped_(mapped) {}
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return size_; }
  bool read_only() const noexcept { return read_only_; }
  std::byte* base() const noexcept { return base_; }  // of the mapping, whole pages, that holds the region
  size_t mapped() const noexcept { return mapped_; }

  // From here on a stray write faults instead of changing the contents silently.
  void make_read_only() noexcept;

 private:
  std::byte* base_ = nullptr;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;
  bool read_only_ = false;
};

// What devices of either kind say of their regions. Throw DeviceError: for a range beyond the region's end, and for an
// update of region weights by another number of bytes than it has.
void require_within(RegionKind kind, uint64_t size, uint64_t offset, uint64_t nbytes);
void require_size_of_weights(uint64_t size, uint64_t nbytes);
inline constexpr const char* kWeightsAreReadOnly = "region weights is not written to: use update_weights";
inline constexpr const char* kWeightsUnknown =
    "what region weights holds is unknown since an update of it failed: call update_weights again";

// Bytes that this process can still use: the system's estimate, less where its control group allows less.
uint64_t available_memory() noexcept;

// Throws DeviceError unless the system has `nbytes` (at least 1) available for `what`.
void require_memory(std::string_view what, uint64_t nbytes);

// Reserves addresses for `nbytes` that begin at a multiple of 2 MiB; nullptr when the system refuses. The
// protection is mmap's. Memory comes with the first touch, on huge pages where the system has them.
std::byte* reserve_huge(size_t nbytes, int protection) noexcept;

}  // namespace tokenspeed::device
