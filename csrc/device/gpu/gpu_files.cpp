#include "device/gpu/gpu_files.h"

#include <fcntl.h>
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

constexpr int kMostThreads = 64;

std::vector<std::byte> read_range(const FileRange& file) {
  const int descriptor = open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
  int error = descriptor < 0 ? errno : 0;
  std::vector<std::byte> bytes(file.nbytes);
  for (uint64_t done = 0; error == 0 && done < file.nbytes;) {
    const ssize_t got =
        pread(descriptor, bytes.data() + done, file.nbytes - done, static_cast<off_t>(file.offset + done));
    if (got > 0) done += static_cast<uint64_t>(got);
    if (got == 0) error = ENODATA;
    if (got < 0 && errno != EINTR) error = errno;
  }
  if (descriptor >= 0) close(descriptor);
  if (error != 0) throw GraphError("it cannot be read: " + std::string(std::strerror(error)));
  return bytes;
}

// Calls load(i) for every i below `count`, by several threads; each ends with its first error.
template <typename Load>
void for_each(size_t count, int num_threads, const Load& load) {
  std::atomic<size_t> next{0};
  std::vector<std::exception_ptr> errors(count);
  const auto work = [&] {
    for (size_t i = next++; i < count; i = next++) {
      try {
        load(i);
      } catch (...) {
        errors[i] = std::current_exception();
        return;
      }
    }
  };
  std::vector<std::thread> threads;
  const auto wanted = std::min(count, static_cast<size_t>(std::clamp(num_threads, 1, kMostThreads)));
  try {
    for (size_t i = 1; i < wanted; ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {  // the system gives no more threads: those that there are do it
  }
  work();
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

template <typename Load>
auto labelled(const FileRange& file, const Load& load) {
  try {
    return load();
  } catch (const GraphError& error) {
    throw GraphError(file.label + " cannot be loaded: " + error.what());
  }
}

}  // namespace

void load_binaries(GpuDevice& device, std::span<const BinaryFile> files, int num_threads) {
  for_each(files.size(), num_threads, [&](size_t i) {
    labelled(files[i].file, [&] { device.load_binary(files[i].name, read_range(files[i].file)); });
  });
}

std::vector<int> load_graphs(GpuDevice& device, std::span<const FileRange> files, uint64_t kv_page_stride,
                             int num_threads) {
  std::vector<int> handles(files.size());
  for_each(files.size(), num_threads, [&](size_t i) {
    handles[i] = labelled(files[i], [&] { return device.load_graph(read_range(files[i]), kv_page_stride); });
  });
  return handles;
}

}  // namespace tokenspeed::device::gpu
