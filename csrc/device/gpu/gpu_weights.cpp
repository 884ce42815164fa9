#include "device/gpu/gpu_weights.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>

namespace tokenspeed::device::gpu {
namespace {

constexpr uint64_t kPieceBytes = uint64_t{4} << 20;
constexpr int kMaxThreads = 16, kMostThreads = 256;
constexpr int kShort = -1;  // the file ended early

int usable_cores() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

// One transfer: threads claim pieces in the order of the file.
class Transfer {
 public:
  Transfer(std::shared_ptr<const Context> context, const WeightsFile& file, Address to, uint64_t piece_bytes)
      : context_(std::move(context)), file_(file), to_(to), piece_bytes_(piece_bytes), stream_(context_) {}

  void run(int num_threads) {
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(num_threads));
    try {
      for (int i = 1; i < num_threads; ++i) threads.emplace_back([this] { work(); });
    } catch (const std::system_error&) {  // the system gives no more threads: those that there are do it
    }
    work();
    for (std::thread& thread : threads) thread.join();
    if (error_) std::rethrow_exception(error_);
  }
  int read_error() const noexcept { return read_error_.load(); }

 private:
  void work() noexcept {
    try {
      move_pieces();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      stop_ = true;
    }
  }

  // Two buffers: while the device copies from one, the thread reads into the other.
  void move_pieces() {
    if (next_.load() * piece_bytes_ >= file_.size()) return;  // nothing left to make buffers for
    const PinnedMemory buffers(context_, "streaming weights", 2 * piece_bytes_);
    const Event copied[2] = {Event(context_, kEventDisableTiming | kEventBlockingSync),
                             Event(context_, kEventDisableTiming | kEventBlockingSync)};
    const Drain drain{*this};  // the device must be done with the buffers before they go
    for (uint64_t turn = 0; !stop_; ++turn) {
      const uint64_t offset = next_.fetch_add(1) * piece_bytes_;
      if (offset >= file_.size()) break;
      const uint64_t size = std::min(piece_bytes_, file_.size() - offset);
      const size_t slot = turn % 2;
      if (turn >= 2 && to_ != 0) context_->check(context_->call().event_synchronize(copied[slot].get()), kCopying);
      std::byte* buffer = buffers.data() + slot * piece_bytes_;
      if (const int code = file_.read(buffer, offset, size); code != 0) {
        read_error_ = code;
        stop_ = true;
        break;
      }
      if (to_ == 0) continue;
      context_->check(context_->call().copy_to_device(to_ + offset, buffer, size, stream_.get()), kCopying);
      context_->check(context_->call().event_record(copied[slot].get(), stream_.get()), kCopying);
    }
    context_->check(context_->call().stream_synchronize(stream_.get()), kCopying);
  }

  struct Drain {
    const Transfer& transfer;
    ~Drain() { transfer.stream_.drain(kDrainSeconds); }
  };

  static constexpr const char* kCopying = "copy weights to the device";
  static constexpr double kDrainSeconds = 10;

  std::shared_ptr<const Context> context_;
  const WeightsFile& file_;
  const Address to_;
  const uint64_t piece_bytes_;
  Stream stream_;
  std::atomic<uint64_t> next_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int> read_error_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

WeightsFile::WeightsFile(const std::string& path, uint64_t file_offset, uint64_t nbytes)
    : path_(path), file_(open(path.c_str(), O_RDONLY | O_CLOEXEC)), file_offset_(file_offset), nbytes_(nbytes) {
  if (file_ < 0) throw DeviceError("cannot open the weights file " + path + ": " + std::strerror(errno));
  struct stat status {};
  const uint64_t size = fstat(file_, &status) == 0 ? static_cast<uint64_t>(status.st_size) : 0;
  if (file_offset <= size && nbytes <= size - file_offset) return;
  close(file_);
  throw DeviceError("the weights need " + std::to_string(nbytes) + " bytes at offset " + std::to_string(file_offset) +
                    " of " + path + ", but the file has " + std::to_string(size) +
                    ": copy it again or build the artifact again");
}

WeightsFile::~WeightsFile() { close(file_); }

int WeightsFile::read(std::byte* to, uint64_t offset, uint64_t size) const noexcept {
  while (size > 0) {
    const ssize_t got = pread(file_, to, size, static_cast<off_t>(file_offset_ + offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? errno : kShort;
    to += got;
    offset += static_cast<uint64_t>(got);
    size -= static_cast<uint64_t>(got);
  }
  return 0;
}

void WeightsFile::stream(const std::shared_ptr<const Context>& context, Address to,
                         const StreamOptions& options) const {
  const uint64_t piece = std::clamp<uint64_t>(nbytes_, 1, options.piece_bytes == 0 ? kPieceBytes : options.piece_bytes);
  const uint64_t pieces = (nbytes_ + piece - 1) / piece;
  const int wanted = options.num_threads > 0 ? std::min(options.num_threads, kMostThreads)
                                             : std::min(usable_cores(), kMaxThreads);
  Transfer transfer(context, *this, to, piece);
  transfer.run(static_cast<int>(std::min<uint64_t>(static_cast<uint64_t>(wanted), std::max<uint64_t>(pieces, 1))));
  if (const int code = transfer.read_error(); code != 0) {
    throw DeviceError("cannot read the weights from " + path_ + ": " +
                      (code == kShort ? "the file became shorter while it was read" : std::strerror(code)));
  }
}

}  // namespace tokenspeed::device::gpu
