#include "device/region.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "device/errors.h"

namespace tokenspeed::device {
namespace {

constexpr const char* kNames[kNumRegions] = {"weights", "kv", "arena", "io", "state", "host_io"};
constexpr const char* kAdvice = ": lower max_model_len, max_num_seqs or the number of pages, or free memory";
constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();

// The number after `key` in a file of "key value" lines, or of the file's first word for an empty key.
uint64_t read_number(const char* path, std::string_view key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    if (!key.empty() && word != key) continue;
    if (!key.empty() && !(file >> word)) return kUnknown;
    const bool digits = !word.empty() && word.find_first_not_of("0123456789") == std::string::npos;
    return digits && word.size() < 20 ? std::stoull(word) : kUnknown;
  }
  return kUnknown;
}

// What the control group (version 2) still allows; pages of files can be dropped, so they do not count.
uint64_t group_allowance() {
  const uint64_t limit = read_number("/sys/fs/cgroup/memory.max", "");
  const uint64_t used = read_number("/sys/fs/cgroup/memory.current", "");
  if (limit == kUnknown || used == kUnknown) return kUnknown;
  const uint64_t files = read_number("/sys/fs/cgroup/memory.stat", "file");
  const uint64_t held = files == kUnknown ? used : used - std::min(used, files);
  return limit - std::min(limit, held);
}

size_t round_up(uint64_t nbytes, size_t to) { return (nbytes + to - 1) / to * to; }

}  // namespace

const char* region_name(RegionKind kind) noexcept { return kNames[static_cast<uint32_t>(kind)]; }

RegionKind region_by_name(std::string_view name) {
  for (uint32_t i = 0; i < kNumRegions; ++i) {
    if (name == kNames[i]) return static_cast<RegionKind>(i);
  }
  throw DeviceError("no region is called '" + std::string(name) + "': use one of weights, kv, arena, io, state");
}

void require_within(RegionKind kind, uint64_t size, uint64_t offset, uint64_t nbytes) {
  if (offset <= size && nbytes <= size - offset) return;
  throw DeviceError(std::string("region ") + region_name(kind) + " has " + std::to_string(size) + " bytes, but " +
                    std::to_string(nbytes) + " at offset " + std::to_string(offset) +
                    " were asked for: stay within the region");
}

void require_size_of_weights(uint64_t size, uint64_t nbytes) {
  if (nbytes == size) return;
  throw DeviceError("region weights has " + std::to_string(size) + " bytes, but the update has " +
                    std::to_string(nbytes) + ": pack the weights for this artifact");
}

uint64_t available_memory() noexcept {
  try {
    const uint64_t kib = read_number("/proc/meminfo", "MemAvailable:");
    return std::min(kib == kUnknown ? kUnknown : kib * 1024, group_allowance());
  } catch (...) {
    return kUnknown;  // an unreadable estimate refuses nothing: the mapping itself decides
  }
}

void require_memory(std::string_view what, uint64_t nbytes) {
  const std::string name(what);
  if (nbytes == 0) throw DeviceError(name + " needs at least 1 byte, but 0 were asked for");
  const uint64_t available = available_memory();
  if (nbytes <= available) return;
  throw DeviceError(name + " needs " + std::to_string(nbytes) + " bytes of memory, but " + std::to_string(available) +
                    " are available" + kAdvice);
}

std::byte* reserve_huge(size_t nbytes, int protection) noexcept {
  const size_t span = round_up(nbytes, 4096), asked = span + Region::kHugePage;
  void* base = mmap(nullptr, asked, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  // Give back what lies before and after the aligned range.
  const auto start = reinterpret_cast<uintptr_t>(base);
  const uintptr_t aligned = round_up(start, Region::kHugePage);
  if (aligned != start) munmap(base, aligned - start);
  const uintptr_t end = start + asked;
  if (end != aligned + span) munmap(reinterpret_cast<void*>(aligned + span), end - aligned - span);
  auto* data = reinterpret_cast<std::byte*>(aligned);
  if (nbytes >= Region::kHugePage) madvise(data, span, MADV_HUGEPAGE);  // advice: slower without, not wrong
  return data;
}

Region::Region(std::string_view what, uint64_t nbytes) {
  require_memory(what, nbytes);
  size_ = nbytes;
  mapped_ = round_up(size_, size_ >= kHugePage ? kHugePage : 4096);
  base_ = data_ = reserve_huge(mapped_, PROT_READ | PROT_WRITE);
  if (data_ != nullptr) return;
  const int code = errno;
  throw DeviceError(std::string(what) + " needs " + std::to_string(nbytes) +
                    " bytes of memory, but the system refused to map them (" + std::strerror(code) + "; " +
                    std::to_string(available_memory()) + " are available)" + kAdvice);
}

Region::~Region() { munmap(base_, mapped_); }

void Region::make_read_only() noexcept { read_only_ = mprotect(base_, mapped_, PROT_READ) == 0; }

}  // namespace tokenspeed::device
