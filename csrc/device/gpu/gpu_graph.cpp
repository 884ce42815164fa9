#include "device/gpu/gpu_graph.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace tokenspeed::device::gpu {
namespace {

constexpr uint64_t kMaxThreads = 1024, kMaxCluster = 16;
constexpr std::array<uint64_t, 3> kMaxGrid = {0x7fffffff, 0xffff, 0xffff};

std::string number(uint64_t n) { return std::to_string(n); }

std::string triple(const std::array<uint32_t, 3>& n) {
  return number(n[0]) + " x " + number(n[1]) + " x " + number(n[2]);
}

// No overflow: each factor is checked against its limit first where it matters.
uint64_t product(const std::array<uint32_t, 3>& n, uint64_t most) {
  uint64_t all = 1;
  for (const uint32_t x : n) all = std::min(all * x, most + 1);
  return all;
}

// Checks and resolves one node after another.
class Binder {
 public:
  Binder(const LaunchGraph& graph, const GraphContext& context) : graph_(graph), context_(context) {}

  Function& function_of(size_t node) const {
    const GraphNode& n = graph_.nodes[node];
    if (!n.launch) fail(node, "is for a CPU: need a graph built for a GPU target");
    const std::string& binary = graph_.binaries[n.launch->binary];
    const auto module = context_.modules.find(binary);
    if (module == context_.modules.end() || module->second == nullptr) {
      fail(node, "needs the code object '" + binary + "', which is not loaded: load it first");
    }
    Function* function = module->second->find(graph_.symbols[n.symbol]);
    if (function == nullptr) {
      fail(node, "the code object '" + binary + "' has no such kernel: copy or build the artifact again");
    }
    check_parameters(node, *function);
    check_launch(node, *n.launch);
    return *function;
  }

  // Appends the words of a parameter, whose bytes are the first of them, and the places of those that point into
  // region host_io.
  void append_words(size_t node, size_t arg, std::vector<uint64_t>& words, std::vector<size_t>& io_words) const {
    const GraphNode& n = graph_.nodes[node];
    const GraphArg& a = n.args[arg];
    const size_t first = words.size();
    if (a.kind != ArgKind::Bytes) {
      if (a.kind == ArgKind::Pointer && a.region == RegionKind::HostIo) io_words.push_back(first);
      return words.push_back(value_of(node, arg));
    }
    words.resize(first + words_of(a));
    std::memcpy(words.data() + first, graph_.data.data() + a.value, a.size);
    for (const InnerPointer& inner : n.inner) {
      if (inner.arg != arg) continue;
      const size_t word = first + inner.place / 8;
      words[word] = resolve(node, arg, inner.pointer);
      if (inner.pointer.region == RegionKind::HostIo) io_words.push_back(word);
    }
  }

  static size_t words_of(const GraphArg& arg) { return (size_t{arg.size} + 7) / 8; }

  uint64_t value_of(size_t node, size_t arg) const {
    const GraphArg& a = graph_.nodes[node].args[arg];
    switch (a.kind) {
      case ArgKind::Pointer: return resolve(node, arg, a);
      case ArgKind::I64: return a.value;  // little-endian: its first 4 bytes are the int32
      case ArgKind::F64:
        if (a.size == 8) return a.value;
        return std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(a.value)));
      case ArgKind::Scalar:
      case ArgKind::Bytes: break;
    }
    fail(node, arg, "is a step scalar: on a GPU, kernels read the step's sizes from memory");
  }

  void prepare(size_t node, const KernelLaunch& launch, Function& function) const {
    const bool large_cluster = product(launch.cluster, kMaxCluster) > 1;
    if (function.prepared && !large_cluster && launch.shared_bytes <= function.prepared_shared) return;
    context_.context->check(context_.context->driver().prepare(launch),
                            [&] { return "prepare " + describe_node(graph_, node) + " of a launch graph"; });
    function.prepared = true;
    function.prepared_shared = std::max(function.prepared_shared, launch.shared_bytes);
  }

 private:
  [[noreturn]] void fail(size_t node, const std::string& what) const {
    throw GraphError("launch graph " + describe_node(graph_, node) + ": " + what);
  }
  [[noreturn]] void fail(size_t node, size_t arg, const std::string& what) const {
    fail(node, "argument " + number(arg) + " " + what);
  }

  void check_parameters(size_t node, const Function& function) const {
    if (!function.sizes_known) return;
    const auto& args = graph_.nodes[node].args;
    if (args.size() != function.sizes.size()) {
      fail(node, "the kernel takes " + number(function.sizes.size()) + " parameters, but the node has " +
                     number(args.size()) + " arguments: build the artifact again");
    }
    for (size_t i = 0; i < args.size(); ++i) {
      if (args[i].size == function.sizes[i]) continue;
      fail(node, i, "has " + number(args[i].size) + " bytes, but the kernel's parameter has " +
                        number(function.sizes[i]) + ": build the artifact again");
    }
  }

  void check_launch(size_t node, const LaunchConfig& launch) const {
    const Context& device = *context_.context;
    for (size_t i = 0; i < 3; ++i) {
      if (launch.grid[i] <= kMaxGrid[i]) continue;
      fail(node, "has a grid of " + triple(launch.grid) + " thread blocks, which is too large");
    }
    if (product(launch.block, kMaxThreads) > kMaxThreads) {
      fail(node, "has thread blocks of " + triple(launch.block) + " threads; " + number(kMaxThreads) + " are possible");
    }
    if (launch.shared_bytes > device.max_shared_bytes()) {
      fail(node, "needs " + number(launch.shared_bytes) + " bytes of shared memory per thread block, but " +
                     device.info().name + " has " + number(device.max_shared_bytes()));
    }
    const uint64_t cluster = product(launch.cluster, kMaxCluster);
    const uint64_t most = device.driver().has_clusters() ? kMaxCluster : 1;
    bool divides = true;
    for (size_t i = 0; i < 3; ++i) divides = divides && launch.grid[i] % launch.cluster[i] == 0;
    if (cluster > most || !divides) {
      fail(node, "has clusters of " + triple(launch.cluster) + " thread blocks; up to " + number(most) +
                     " that divide the grid of " + triple(launch.grid) + " are possible");
    }
  }

  Address resolve(size_t node, size_t arg, const GraphArg& a) const {
    const std::string name = std::string("region ") + region_name(a.region);
    const auto [address, size] = range_of(a.region);
    if (address == 0) fail(node, arg, "points into " + name + ", which is not allocated: allocate it first");
    if (a.region == RegionKind::Weights && (a.access & kAccessWrite) != 0) {
      fail(node, arg, "writes to " + name + ", which is read-only");
    }
    const bool paged = a.region == RegionKind::Kv;
    const uint64_t have = paged ? std::min(context_.kv_page_stride, size) : size;
    if (a.value > have || a.extent > have - a.value) {
      fail(node, arg, "needs " + number(a.extent) + " bytes at offset " + number(a.value) + " of " +
                          (paged ? "a page of " : "") + name + ", which has " + number(have));
    }
    return address + a.value;
  }

  // Of a region (of host_io: of set 0); address 0 where it is not allocated.
  std::pair<Address, uint64_t> range_of(RegionKind kind) const {
    if (kind == RegionKind::HostIo) return {context_.host_io.address, context_.host_io.nbytes};
    const DeviceMemory* region = context_.regions[static_cast<size_t>(kind)].get();
    return region == nullptr ? std::pair<Address, uint64_t>{} : std::pair{region->address(), region->size()};
  }

  const LaunchGraph& graph_;
  const GraphContext& context_;
};

}  // namespace

GpuGraph::GpuGraph(const LaunchGraph& graph, const GraphContext& context)
    : context_(context.context), io_stride_(context.host_io.stride) {
  size_t num_args = 0, num_words = 0;
  for (const GraphNode& node : graph.nodes) {
    num_args += node.args.size();
    for (const GraphArg& arg : node.args) num_words += Binder::words_of(arg);
  }
  values_.reserve(num_words);  // neither moves from here on
  pointers_.reserve(num_args);
  nodes_.reserve(graph.nodes.size());
  execs_.reserve(static_cast<size_t>(context.host_io.num_sets));
  context_->bind();
  const Binder binder(graph, context);
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const GraphNode& node = graph.nodes[n];
    Function& function = binder.function_of(n);
    const size_t first = pointers_.size();
    for (size_t i = 0; i < node.args.size(); ++i) {
      pointers_.push_back(values_.data() + values_.size());
      binder.append_words(n, i, values_, io_values_);
    }
    const KernelLaunch launch{function.handle,      node.launch->grid,         node.launch->block, node.launch->cluster,
                              node.launch->shared_bytes, pointers_.data() + first};
    binder.prepare(n, launch, function);
    nodes_.push_back({node.name, launch, node.predecessors, node.launch->programmatic});
  }
}

GpuGraph::~GpuGraph() {
  context_->bind_quietly();
  for (const Handle exec : execs_) context_->call().graph_exec_destroy(exec);
  if (graph_ != nullptr) context_->call().graph_destroy(graph_);
}

void GpuGraph::point_to(int io_set) noexcept {
  const uint64_t by = io_stride_ * static_cast<uint64_t>(int64_t{io_set} - pointed_to_);  // modulo 2^64: also back
  for (const size_t value : io_values_) values_[value] += by;
  pointed_to_ = io_set;
}

// The driver copies parameters when a node is made, so all sets share one copy of them here.
void GpuGraph::build(int io_set) {
  point_to(io_set);
  const Driver& driver = context_->driver();
  context_->check(driver.call.graph_create(&graph_, 0), "make a graph");
  std::vector<Handle> handles(nodes_.size());
  std::vector<Handle> predecessors;
  for (size_t n = 0; n < nodes_.size(); ++n) {
    const Node& node = nodes_[n];
    predecessors.clear();
    for (const uint32_t before : node.predecessors) predecessors.push_back(handles[before]);
    // A kernel that waits by itself may start early, but one edge of that kind is all that a node can have here.
    const bool programmatic = node.programmatic && predecessors.size() == 1 && driver.has_programmatic_edges();
    context_->check(driver.add_kernel_node(&handles[n], graph_, predecessors, programmatic, node.launch),
                    [&] { return "add node " + number(n) + " to a graph"; });
  }
}

void GpuGraph::instantiate() {
  Handle exec = nullptr;
  context_->check(context_->call().graph_instantiate(&exec, graph_, 0), "instantiate a graph");
  execs_.push_back(exec);
  const Handle built = std::exchange(graph_, nullptr);
  context_->check(context_->call().graph_destroy(built), "give back a graph that was instantiated");
}

void GpuGraph::upload(Handle stream) {
  if (context_->call().graph_upload == nullptr) return;  // then its first launch does it
  for (const Handle exec : execs_) context_->check(context_->call().graph_upload(exec, stream), "upload a graph");
}

std::vector<std::pair<std::string, double>> GpuGraph::profile(int io_set, Handle stream) {
  point_to(io_set);
  std::vector<std::unique_ptr<Event>> events;
  for (size_t i = 0; i <= nodes_.size(); ++i) events.push_back(std::make_unique<Event>(context_, kEventTiming));
  constexpr const char* kProfiling = "profile a graph";
  context_->check(context_->call().event_record(events[0]->get(), stream), kProfiling);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    context_->check(context_->driver().launch(nodes_[i].launch, stream),
                    [&] { return "run node " + number(i) + " of a graph"; });
    context_->check(context_->call().event_record(events[i + 1]->get(), stream), kProfiling);
  }
  context_->check(context_->call().event_synchronize(events.back()->get()), kProfiling);
  std::vector<std::pair<std::string, double>> nodes;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    float milliseconds = 0;
    context_->check(context_->call().event_elapsed(&milliseconds, events[i]->get(), events[i + 1]->get()), kProfiling);
    nodes.emplace_back(nodes_[i].name, static_cast<double>(milliseconds) * 1e-3);
  }
  return nodes;
}

}  // namespace tokenspeed::device::gpu
