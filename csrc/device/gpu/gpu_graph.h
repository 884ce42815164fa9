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

// What a graph may use.
struct GraphContext {
  std::shared_ptr<const Context> context;
  const DeviceRegions& regions;
  const Modules& modules;
  uint64_t kv_page_stride;  // bytes from a KV page to the next
};

class GpuGraph {
 public:
  // Checks and resolves the graph. Throws GraphError, naming node and argument, for an unknown binary or kernel,
  // parameters that are not the kernel's, a pointer outside of its region (for kv: of one page), or a launch beyond
  // the device's limits.
  GpuGraph(const LaunchGraph& graph, const GraphContext& context);
  ~GpuGraph();
  GpuGraph(const GpuGraph&) = delete;
  GpuGraph& operator=(const GpuGraph&) = delete;

  // Makes the driver's graph, and brings it onto the device. Called once. Throws DeviceError.
  void build();
  void instantiate();
  void upload(Handle stream);

  Handle exec() const noexcept { return exec_; }
  size_t num_nodes() const noexcept { return nodes_.size(); }
  uint64_t runs = 0;

  // Runs the nodes one after another and returns the seconds of each.
  std::vector<std::pair<std::string, double>> profile(Handle stream) const;

 private:
  struct Node {
    std::string name;
    KernelLaunch launch;
    std::vector<uint32_t> predecessors;
    bool programmatic;
  };

  std::shared_ptr<const Context> context_;
  std::vector<Node> nodes_;
  std::vector<uint64_t> values_;   // of parameters, each in the first bytes of its words
  std::vector<void*> pointers_;    // to the values: what the driver takes
  Handle graph_ = nullptr, exec_ = nullptr;
};

}  // namespace tokenspeed::device::gpu
