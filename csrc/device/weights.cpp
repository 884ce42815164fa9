#include "device/weights.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "device/errors.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif

namespace tokenspeed::device {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = Region::kHugePage;
constexpr uint64_t kKernelAlignment = 64;
constexpr uint64_t kStagingReserve = 256u << 20;  // that staging an update leaves to the rest of the system
constexpr int kShort = -1;  // the file ended early: it was cut while being read

// 0, an errno or kShort.
int read_all(int file, std::byte* destination, size_t nbytes, uint64_t file_offset) noexcept {
  while (nbytes > 0) {
    const ssize_t got = pread(file, destination, nbytes, static_cast<off_t>(file_offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? errno : kShort;
    destination += got;
    nbytes -= static_cast<size_t>(got);
    file_offset += static_cast<uint64_t>(got);
  }
  return 0;
}

// 0 or an errno; systems without the advice make the pages present when they are first read.
int populate(std::byte* pages, size_t nbytes) noexcept {
  while (madvise(pages, nbytes, MADV_POPULATE_READ) != 0) {
    if (errno == EINVAL) return 0;
    if (errno != EINTR && errno != EAGAIN) return errno;
  }
  return 0;
}

struct Range {
  std::byte* data;
  size_t nbytes;
  int file;              // to read from, or negative to populate what is mapped
  uint64_t file_offset;
  std::atomic<int> error{0};
};

// Args: p Range. An item is one huge page's worth, so that each page of a copy is made by one worker.
void fill_chunks(const kernels::Invocation& inv) noexcept {
  auto* range = inv.ptr<Range>(0);
  for (size_t at; (at = static_cast<size_t>(inv.claim()) * kHugePage) < range->nbytes;) {
    if (range->error.load(std::memory_order_relaxed) != 0) return;
    const size_t nbytes = std::min(kHugePage, range->nbytes - at);
    const int code = range->file < 0 ? populate(range->data + at, nbytes)
                                     : read_all(range->file, range->data + at, nbytes, range->file_offset + at);
    if (code != 0) range->error.store(code, std::memory_order_relaxed);
  }
}

int fill(ThreadPool& pool, Range& range) {
  std::array<kernels::ArgValue, 1> args{};
  args[0].pointer = &range;
  const Task task{fill_chunks, args.data(), static_cast<uint32_t>(args.size())};
  Job job;
  job.tasks = {&task, 1};
  pool.wait(pool.submit(job));
  return range.error.load();
}

int open_checked(const std::string& path, uint64_t file_offset, uint64_t nbytes) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw DeviceError("cannot open the weights file " + path + ": " + std::strerror(errno));
  struct stat status {};
  const uint64_t size = fstat(file, &status) == 0 ? static_cast<uint64_t>(status.st_size) : 0;
  if (file_offset <= size && nbytes <= size - file_offset) return file;
  close(file);
  throw DeviceError("the weights need " + std::to_string(nbytes) + " bytes at offset " + std::to_string(file_offset) +
                    " of " + path + ", but the file has " + std::to_string(size) +
                    ": copy it again or build the artifact again");
}

std::string reading_failed(const std::string& path, int code, bool was_cut) {
  return "cannot read the weights from " + path + ": " +
         (was_cut ? "the file became shorter while it was read" : std::strerror(code));
}

// Where a mapping of the file begins within its 2 MiB: the same as in the file, so that the page cache's own
// huge pages can be mapped whole.
size_t phase_of(uint64_t file_offset) noexcept { return file_offset / kPage * kPage % kHugePage; }

}  // namespace

Weights::Weights(ThreadPool& pool, const std::string& path, uint64_t file_offset, uint64_t nbytes)
    : file_(open_checked(path, file_offset, nbytes)), file_offset_(file_offset) {
  try {
    require_memory("region weights", nbytes);
    region_ = map(nbytes);
    settled_ = region_ == nullptr;
    if (settled_) region_ = std::make_shared<Region>("region weights", nbytes);
    Range range{settled_ ? region_->data() : region_->base(), settled_ ? nbytes : region_->mapped(),
                settled_ ? file_ : -1, file_offset};
    if (const int code = fill(pool, range); code != 0) {
      throw DeviceError(reading_failed(path, code, code == kShort || (code == EFAULT && !settled_)));
    }
  } catch (...) {
    close(file_);
    throw;
  }
  region_->make_read_only();
}

Weights::~Weights() { close(file_); }

std::shared_ptr<Region> Weights::map(uint64_t nbytes) const {
  if (file_offset_ % kKernelAlignment != 0) return nullptr;
  const size_t lead = file_offset_ % kPage, phase = phase_of(file_offset_);
  const size_t mapped = (lead + nbytes + kPage - 1) / kPage * kPage;
  std::byte* reserved = reserve_huge(phase + mapped, PROT_NONE);
  if (reserved == nullptr) return nullptr;
  std::byte* base = reserved + phase;
  const auto from = static_cast<off_t>(file_offset_ - lead);
  if (mmap(base, mapped, PROT_READ, MAP_SHARED | MAP_FIXED, file_, from) == MAP_FAILED) {
    munmap(reserved, phase + mapped);
    return nullptr;
  }
  if (phase != 0) munmap(reserved, phase);
  madvise(base, mapped, MADV_HUGEPAGE);  // lets a file system that can read the file into huge pages do so
  return std::make_shared<Region>(base, mapped, lead, nbytes);
}

bool Weights::settle(const std::atomic<bool>& stop) noexcept {
  if (settled_) return true;
  std::byte* const base = region_->base();
  const size_t mapped = region_->mapped(), lead = static_cast<size_t>(region_->data() - base);
  const size_t phase = phase_of(file_offset_), end = lead + region_->size();
  std::byte* reserved = reserve_huge(phase + mapped, PROT_READ | PROT_WRITE);
  if (reserved == nullptr) return false;
  if (phase != 0) munmap(reserved, phase);
  std::byte* const aside = reserved + phase;
  size_t at = 0;
  while (at < mapped && !stop.load(std::memory_order_relaxed)) {
    // Each huge page is filled aside and then takes the mapping's place. The kernel holds the address space for
    // as long as that takes, so a reader sees the file's page or the copy, which hold the same.
    std::byte* copy = aside + at;
    const size_t nbytes = std::min(kHugePage - (phase + at) % kHugePage, mapped - at);
    if (read_all(file_, copy, std::min(nbytes, end - at), file_offset_ - lead + at) != 0) break;
    if (mprotect(copy, nbytes, PROT_READ) != 0) break;
    if (mremap(copy, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, base + at) == MAP_FAILED) break;
    at += nbytes;
  }
  if (at < mapped) munmap(aside + at, mapped - at);  // where copies have left, others may have memory by now
  settled_ = at == mapped;
  return settled_;
}

WeightsUpdate::WeightsUpdate(ThreadPool& pool, Region& region, const std::string& path, uint64_t file_offset,
                             uint64_t available)
    : pool_(pool),
      region_(region),
      path_(path),
      file_offset_(file_offset),
      file_(open_checked(path, file_offset, region.size())) {
  if (available < kStagingReserve || region.mapped() > available - kStagingReserve) return;
  staged_ = reserve();
  if (staged_ == nullptr) return;
  try {
    read(staged_);
  } catch (...) {
    munmap(staged_, region_.mapped());
    close(file_);
    throw;
  }
}

WeightsUpdate::~WeightsUpdate() {
  if (staged_ != nullptr) munmap(staged_, region_.mapped());
  close(file_);
}

std::byte* WeightsUpdate::reserve() const noexcept {
  const size_t phase = reinterpret_cast<uintptr_t>(region_.base()) % kHugePage;
  std::byte* reserved = reserve_huge(phase + region_.mapped(), PROT_READ | PROT_WRITE);
  if (reserved != nullptr && phase != 0) munmap(reserved, phase);
  return reserved == nullptr ? nullptr : reserved + phase;
}

void WeightsUpdate::read(std::byte* mapping) {
  Range range{mapping + (region_.data() - region_.base()), region_.size(), file_, file_offset_};
  if (const int code = fill(pool_, range); code != 0) {
    throw DeviceError(reading_failed(path_, code, code == kShort));
  }
}

void WeightsUpdate::apply() {
  std::byte* const base = region_.base();
  const size_t mapped = region_.mapped();
  if (staged_ == nullptr) {
    // New pages in the place of the old ones, which are the system's again: a file's pages stay as they are.
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(base, mapped, PROT_READ | PROT_WRITE, kFlags, -1, 0) == MAP_FAILED) {
      throw DeviceError(std::string("cannot map memory for region weights: ") + std::strerror(errno));
    }
    if (mapped >= kHugePage) madvise(base, mapped, MADV_HUGEPAGE);
    read(base);
  } else if (mremap(staged_, mapped, mapped, MREMAP_MAYMOVE | MREMAP_FIXED, base) == MAP_FAILED) {
    throw DeviceError(std::string("cannot move memory to region weights: ") + std::strerror(errno));
  } else {
    staged_ = nullptr;
  }
  region_.make_read_only();
}

}  // namespace tokenspeed::device
