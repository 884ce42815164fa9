#include "device/weights_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "device/errors.h"

namespace tokenspeed::device {
namespace {

constexpr int kShort = -1;  // the file ended early: it was cut while being read

// Args: i file descriptor, i file offset, i bytes, p destination, p std::atomic<int> error. An item is one huge
// page, so that each is made by one worker; reading into fresh memory beats copying from a mapping of the file.
void read_chunks(const kernels::Invocation& inv) noexcept {
  const int fd = static_cast<int>(inv.i64(0));
  const int64_t file_offset = inv.i64(1), nbytes = inv.i64(2);
  auto* destination = inv.ptr<std::byte>(3);
  auto* error = inv.ptr<std::atomic<int>>(4);
  constexpr int64_t kChunk = Region::kHugePage;
  for (int64_t at; (at = inv.claim() * kChunk) < nbytes && error->load(std::memory_order_relaxed) == 0;) {
    const int64_t end = std::min(at + kChunk, nbytes);
    while (at < end) {
      const ssize_t got = pread(fd, destination + at, static_cast<size_t>(end - at), file_offset + at);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        error->store(got < 0 ? errno : kShort, std::memory_order_relaxed);
        return;
      }
      at += got;
    }
  }
}

class File {
 public:
  explicit File(const std::string& path) : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd_ < 0) throw DeviceError("cannot open the weights file " + path + ": " + std::strerror(errno));
  }
  ~File() { close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const noexcept { return fd_; }
  uint64_t size() const noexcept {
    struct stat status {};
    return fstat(fd_, &status) == 0 ? static_cast<uint64_t>(status.st_size) : 0;
  }

 private:
  int fd_;
};

}  // namespace

void read_file(ThreadPool& pool, const std::string& path, uint64_t file_offset, uint64_t nbytes,
               const Region& region) {
  const File file(path);
  const uint64_t size = file.size();
  if (file_offset > size || nbytes > size - file_offset) {
    throw DeviceError("the weights need " + std::to_string(nbytes) + " bytes at offset " + std::to_string(file_offset) +
                      " of " + path + ", but the file has " + std::to_string(size) +
                      ": copy it again or build the artifact again");
  }
  std::atomic<int> error{0};
  std::array<kernels::ArgValue, 5> args{};
  args[0].i64 = file.fd();
  args[1].i64 = static_cast<int64_t>(file_offset);
  args[2].i64 = static_cast<int64_t>(nbytes);
  args[3].pointer = region.data();
  args[4].pointer = &error;
  const Task task{read_chunks, args.data(), static_cast<uint32_t>(args.size())};
  Job job;
  job.tasks = {&task, 1};
  pool.wait(pool.submit(job));
  const int code = error.load();
  if (code == 0) return;
  throw DeviceError("cannot read the weights from " + path + ": " +
                    (code == kShort ? "the file became shorter while it was read" : std::strerror(code)));
}

}  // namespace tokenspeed::device
