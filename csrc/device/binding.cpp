#include "device/binding.h"

#include <algorithm>
#include <bit>
#include <string_view>

#include "device/errors.h"
#include "linear.h"

namespace tokenspeed::device {
namespace {

const kernels::KernelEntry* find_kernel(std::span<const kernels::KernelEntry> table, std::string_view symbol) {
  const auto less = [](const kernels::KernelEntry& entry, std::string_view name) {
    return std::string_view(entry.symbol) < name;
  };
  const auto found = std::lower_bound(table.begin(), table.end(), symbol, less);
  return found != table.end() && symbol == found->symbol ? &*found : nullptr;
}

const char* kind_name(ArgKind kind) {
  constexpr const char* kKindNames[] = {"a pointer", "an integer", "a float", "a step scalar", "passed by value"};
  return kKindNames[static_cast<int>(kind)];
}

char signature_of(ArgKind kind) { return kind == ArgKind::Pointer ? 'p' : kind == ArgKind::F64 ? 'f' : 'i'; }

const char* signature_name(char c) { return c == 'p' ? "a pointer" : c == 'f' ? "a float" : "an integer"; }

// Checks and resolves one node after another.
class Binder {
 public:
  Binder(const LaunchGraph& graph, const BindingContext& context) : graph_(graph), context_(context) {}

  const kernels::KernelEntry& kernel_of(size_t node) const {
    if (graph_.nodes[node].launch) {
      fail(node, "is launched on a GPU, but this device is a CPU: load the graphs of a CPU target");
    }
    const std::string& symbol = graph_.symbols[graph_.nodes[node].symbol];
    const kernels::KernelEntry* entry = find_kernel(context_.kernels, symbol);
    if (entry == nullptr) {
      fail(node, "this runtime has no such kernel: build the artifact with this version of TokenSpeed");
    }
    check_processor(node, instruction_set_of(symbol));
    check_signature(node, entry->signature);
    return *entry;
  }

  std::byte* resolve(size_t node, size_t arg) const {
    const GraphArg& a = graph_.nodes[node].args[arg];
    const Region* region = context_.regions[static_cast<size_t>(a.region)].get();
    const std::string name = std::string("region ") + region_name(a.region);
    if (region == nullptr) fail(node, arg, "points into " + name + ", which is not allocated: allocate it first");
    if (a.region == RegionKind::Weights && (a.access & kAccessWrite) != 0) {
      fail(node, arg, "writes to " + name + ", which is read-only");
    }
    const bool paged = a.region == RegionKind::Kv;
    const uint64_t have = paged ? std::min<uint64_t>(context_.kv_page_stride, region->size()) : region->size();
    if (a.value > have || a.extent > have - a.value) {
      fail(node, arg, "needs " + std::to_string(a.extent) + " bytes at offset " + std::to_string(a.value) + " of " +
                          (paged ? "a page of " : "") + name + ", which has " + std::to_string(have));
    }
    return region->data() + a.value;
  }

 private:
  [[noreturn]] void fail(size_t node, const std::string& what) const {
    throw GraphError("launch graph " + describe_node(graph_, node) + ": " + what);
  }
  [[noreturn]] void fail(size_t node, size_t arg, const std::string& what) const {
    fail(node, "argument " + std::to_string(arg) + " " + what);
  }

  void check_processor(size_t node, std::string_view isa) const {
    if (!runs(context_.cpu, isa)) {
      fail(node, "the kernel needs " + std::string(isa) + " instructions, but this processor runs " +
                     context_.cpu.describe() + ": build the artifact for this machine's target");
    }
    if (isa == "amx" && !kernels::request_amx_permission()) {
      fail(node, "the kernel needs AMX tiles, but the system does not permit them: build for cpu:x86-64-v4+bf16");
    }
  }

  void check_signature(size_t node, std::string_view signature) const {
    const auto& args = graph_.nodes[node].args;
    if (args.size() != signature.size()) {
      fail(node, "the kernel takes " + std::to_string(signature.size()) + " arguments, but the node has " +
                     std::to_string(args.size()));
    }
    for (size_t i = 0; i < args.size(); ++i) {
      if (args[i].size != 8) fail(node, i, "has " + std::to_string(args[i].size) + " bytes, but the kernel takes 8");
      if (args[i].kind != ArgKind::Bytes && signature_of(args[i].kind) == signature[i]) continue;
      fail(node, i, std::string("must be ") + signature_name(signature[i]) + ", but is " + kind_name(args[i].kind));
    }
  }

  const LaunchGraph& graph_;
  const BindingContext& context_;
};

}  // namespace

BoundGraph::BoundGraph(const LaunchGraph& graph, const BindingContext& context) {
  size_t num_args = 0;
  for (const GraphNode& node : graph.nodes) num_args += node.args.size();
  args_.reserve(num_args);  // tasks point into it
  tasks_.reserve(graph.nodes.size());
  names_.reserve(graph.nodes.size());
  if (const Region* io = context.regions[static_cast<size_t>(RegionKind::Io)].get()) io_ = io->data();

  const Binder binder(graph, context);
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const GraphNode& node = graph.nodes[n];
    const kernels::KernelEntry& kernel = binder.kernel_of(n);
    tasks_.push_back({kernel.fn, args_.data() + args_.size(), static_cast<uint32_t>(node.args.size())});
    names_.push_back(node.name);
    for (size_t i = 0; i < node.args.size(); ++i) {
      const GraphArg& arg = node.args[i];
      kernels::ArgValue value{};
      switch (arg.kind) {
        case ArgKind::Pointer:
          value.pointer = binder.resolve(n, i);
          if (arg.region == RegionKind::Io) {
            io_pointers_.push_back({args_.size(), arg.value});
            io_bytes_ = std::max(io_bytes_, arg.value + arg.extent);
          }
          break;
        case ArgKind::I64: value.i64 = static_cast<int64_t>(arg.value); break;
        case ArgKind::F64: value.f64 = std::bit_cast<double>(arg.value); break;
        case ArgKind::Scalar: sizes_.push_back({args_.size(), arg.value}); break;
        case ArgKind::Bytes: break;  // no kernel of a CPU takes one: the signature was checked
      }
      args_.push_back(value);
    }
  }
}

void BoundGraph::set_step(const StepSizes& sizes, uint64_t io_offset) noexcept {
  const std::array<int64_t, kernels::kNumStepScalars> values = {sizes.num_tokens, sizes.num_seqs, sizes.num_logit_rows};
  for (const StepArg& arg : sizes_) args_[arg.index].i64 = values[arg.value];
  for (const StepArg& arg : io_pointers_) args_[arg.index].pointer = io_ + io_offset + arg.value;
  runs_.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace tokenspeed::device
