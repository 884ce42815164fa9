// What the tests of the GPU device share: a driver for tests, code objects, and a graph whose results are known.
#pragma once

#include <dlfcn.h>
#include <elf.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/gpu/gpu_device.h"
#include "gpu_double/gpu_double.h"
#include "graph_bytes.h"
#include "test.h"

namespace tokenspeed::device::gpu {

inline constexpr Backend kBackends[] = {Backend::Cuda, Backend::Hip};

// The driver for tests, freshly reset, with one device of `memory_bytes`.
class Double {
 public:
  explicit Double(Backend backend, uint64_t memory_bytes = 64 << 20)
      : path(backend == Backend::Cuda ? GPU_DOUBLE_CUDA : GPU_DOUBLE_HIP), handle_(dlopen(path.c_str(), RTLD_NOW)) {
    if (handle_ == nullptr) {
      std::printf("cannot open %s: %s\n", path.c_str(), dlerror());
      std::abort();
    }
    entry<decltype(double_reset)>("double_reset")();
    version = backend == Backend::Cuda ? 13000 : 70000000;
    set_device(backend == Backend::Cuda ? "9.0" : "gfx950:sramecc+:xnack-", memory_bytes);
  }
  void set_device(const char* arch, uint64_t memory_bytes) const {
    entry<decltype(double_device)>("double_device")(arch, version, memory_bytes);
  }
  std::string log() const { return entry<decltype(double_log)>("double_log")(); }
  void fail(const char* name, int nth, int code) const { entry<decltype(double_fail)>("double_fail")(name, nth, code); }
  void hang(bool hangs) const { entry<decltype(double_hang)>("double_hang")(hangs); }
  bool work(int stream) const { return entry<decltype(double_work)>("double_work")(stream); }
  void kernel(const char* symbol, void (*run)(void**), const std::vector<size_t>& sizes) const {
    entry<decltype(double_kernel)>("double_kernel")(symbol, run, sizes.data(), sizes.size());
  }

  // Lines of the log that begin with one of `entries`, from byte `from` of the log on.
  std::vector<std::string> lines(const std::vector<std::string>& entries, size_t from = 0) const {
    std::vector<std::string> found;
    const std::string text = log();
    for (size_t at = from; at < text.size();) {
      const size_t end = text.find('\n', at);
      const std::string line = text.substr(at, end - at), name = line.substr(0, line.find(' '));
      for (const std::string& entry : entries) {
        if (entry == name) found.push_back(line);
      }
      at = end + 1;
    }
    return found;
  }

  const std::string path;
  int version;

 private:
  template <typename Function>
  Function* entry(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(handle_, name));
  }
  void* handle_;
};

inline std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}
template <typename Error>
bool throws(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error&) {
    return true;
  } catch (const std::exception&) {
  }
  return false;
}
inline bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::printf("  '%s' lacks '%s'\n", text.c_str(), part.c_str());
  return false;
}

// A code object that names these kernels: an ELF file of one section.
inline std::vector<std::byte> code_object(Backend backend, const std::string& kernels) {
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = ELFCLASS64;
  header.e_machine = backend == Backend::Cuda ? 190 : 224;
  header.e_shoff = sizeof(header);
  header.e_shentsize = sizeof(Elf64_Shdr);
  header.e_shnum = 1;
  Elf64_Shdr section{};
  section.sh_type = SHT_PROGBITS;
  section.sh_offset = sizeof(header) + sizeof(section);
  section.sh_size = kernels.size();
  std::vector<std::byte> bytes(section.sh_offset + kernels.size());
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::memcpy(bytes.data() + sizeof(header), &section, sizeof(section));
  std::memcpy(bytes.data() + section.sh_offset, kernels.data(), kernels.size());
  return bytes;
}

// "add": y[i] = x[i] * scale + add for the first step_sizes[0] items.
inline void run_add(void** p) {
  const auto pointer = [&](int i) { return *static_cast<int32_t**>(p[i]); };
  for (int32_t i = 0; i < pointer(2)[0]; ++i) {
    pointer(1)[i] = static_cast<int32_t>(static_cast<float>(pointer(0)[i]) * *static_cast<float*>(p[4])) +
                    *static_cast<int32_t*>(p[3]);
  }
}
inline const std::vector<size_t> kAddSizes = {8, 8, 8, 4, 4};

// An io set of the tests: step sizes, 64 inputs, 64 outputs.
inline constexpr uint64_t kIn = 64, kInputBytes = kIn + 256, kIoBytes = kInputBytes + 256, kStride = 4096;

inline TestArg small_int(int32_t value) {
  TestArg arg = int_arg(value);
  arg.size = 4;
  return arg;
}
inline TestArg small_float(float value) {
  TestArg arg = float_arg(static_cast<double>(value));
  arg.size = 4;
  return arg;
}

inline TestNode add_node(const std::string& name, TestArg x, TestArg y, int32_t add, float scale,
                         std::vector<uint32_t> after, uint32_t flags = 0) {
  TestNode node{name, 0,
                {x, y, pointer_arg(RegionKind::HostIo, 0, 16, kAccessRead), small_int(add), small_float(scale)},
                std::move(after)};
  node.launch.flags = flags;
  return node;
}

// y = (x * 2 + 1) * 1 + 10, by way of the arena; the second node is programmatic if `flags` says so.
inline TestGraph two_nodes(uint32_t flags = 0) {
  const TestArg x = pointer_arg(RegionKind::HostIo, kIn, 256, kAccessRead);
  const TestArg y = pointer_arg(RegionKind::HostIo, kInputBytes, 256, kAccessWrite);
  TestGraph graph{{"add"},
                  {add_node("double", x, pointer_arg(RegionKind::Arena, 512, 256, kAccessWrite), 1, 2.0f, {}),
                   add_node("shift", pointer_arg(RegionKind::Arena, 512, 256, kAccessRead), y, 10, 1.0f, {0}, flags)}};
  graph.binaries = {"kernels"};
  return graph;
}

// A device with regions, the code object "kernels" and the graph above.
struct Ready {
  explicit Ready(Backend backend, uint64_t memory_bytes = 64 << 20, double close_seconds = 10)
      : driver(backend, memory_bytes) {
    driver.kernel("add", run_add, kAddSizes);
    device = std::make_unique<GpuDevice>(backend, 0, GpuOptions{2, 0, driver.path, close_seconds});
    device->allocate(RegionKind::Arena, 4096);
    device->allocate_io(kIoBytes, 0);
    device->load_binary("kernels", code_object(backend, "add"));
    graph = device->load_graph(two_nodes().encode(), 0);
  }
  int32_t* io(int set, uint64_t offset) {
    return reinterpret_cast<int32_t*>(device->host_io()->data() + static_cast<uint64_t>(set) * kStride + offset);
  }
  int32_t* input(int set) { return io(set, kIn); }
  int32_t* output(int set) { return io(set, kInputBytes); }

  Double driver;
  std::unique_ptr<GpuDevice> device;
  int graph;
};

}  // namespace tokenspeed::device::gpu
