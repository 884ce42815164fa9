// A LaunchGraph on a GPU: rebuilt node by node through the driver, every argument checked and turned into bytes.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/gpu/gpu_module.h"
#include "device/graph.h"

namespace tokenspeed::device::gpu {

using Modules = std::map<std::string, std::unique_ptr<Module>, std::less<>>;
using DeviceRegions = std::array<std::unique_ptr<DeviceMemory>, kNumRegions>;

// Region host_io: the host's memory of inputs and outputs, a set for each step that may be in flight, one after another.
struct HostIo {
  Address address = 0;  // of set 0, to the device; 0 while there is none
  uint64_t nbytes = 0;  // of one set
  uint64_t stride = 0;  // bytes from a set to the next
  int num_sets = 1;
};

// What a graph may use.
struct GraphContext {
  std::shared_ptr<const Context> context;
  const DeviceRegions& regions;
  const Modules& modules;
  uint64_t kv_page_stride;  // bytes from a KV page to the next
  HostIo host_io;
};

class GpuGraph {
 public:
  // Checks and resolves the graph. Throws GraphError, naming node and argument, for an unknown binary or kernel,
  // parameters that are not the kernel's, a pointer outside of its region (for kv: of one page; for host_io: of one set),
  // or a launch beyond the device's limits.
  GpuGraph(const LaunchGraph& graph, const GraphContext& context);
  ~GpuGraph();
  GpuGraph(const GpuGraph&) = delete;
  GpuGraph& operator=(const GpuGraph&) = delete;

  // Makes the driver's graph for each io set in turn, from 0 on, and brings all onto the device. Throws DeviceError.
  void build(int io_set);
  void instantiate();
  void upload(Handle stream);

  Handle exec(int io_set) const noexcept { return execs_[static_cast<size_t>(io_set)]; }
  size_t num_nodes() const noexcept { return nodes_.size(); }
  uint64_t runs = 0;

  // Runs the nodes one after another on an io set and returns the seconds of each.
  std::vector<std::pair<std::string, double>> profile(int io_set, Handle stream);

 private:
  struct Node {
    std::string name;
    KernelLaunch launch;
    std::vector<uint32_t> predecessors;
    bool programmatic;
  };

  void point_to(int io_set) noexcept;

  std::shared_ptr<const Context> context_;
  std::vector<Node> nodes_;
  std::vector<uint64_t> values_;   // of parameters, each in the first bytes of its words
  std::vector<void*> pointers_;    // to the values: what the driver takes
  std::vector<size_t> io_values_;  // the values that point into region host_io: to set pointed_to_
  uint64_t io_stride_;
  int pointed_to_ = 0;
  Handle graph_ = nullptr;      // while it is built
  std::vector<Handle> execs_;   // one for each io set
};

}  // namespace tokenspeed::device::gpu
