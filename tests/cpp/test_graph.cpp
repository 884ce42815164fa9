// The LaunchGraph reader and binder: what they accept, what they refuse and in which words, and that no bytes
// whatever make them read beyond the buffer or fall over (run under the address sanitizer).
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "abi.h"
#include "device/binding.h"
#include "device/crc32.h"
#include "device/errors.h"
#include "device/graph.h"
#include "graph_bytes.h"
#include "test.h"

using namespace tokenspeed::device;
namespace kernels = tokenspeed::kernels;

namespace {

std::string refusal(const std::vector<std::byte>& bytes) {
  try {
    read_graph(bytes);
  } catch (const GraphError& e) {
    return e.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::printf("  '%s' lacks '%s'\n", text.c_str(), part.c_str());
  return false;
}

TestGraph two_nodes() {
  TestGraph graph;
  graph.symbols = {"gather_rows_f32_avx2", "rms_norm_f32_avx2"};
  graph.nodes = {{"gather", 0,
                  {pointer_arg(RegionKind::Arena, 0, 4096, 1), pointer_arg(RegionKind::Io, 64, 64, 1),
                   pointer_arg(RegionKind::Arena, 4096, 4096, 2), scalar_arg(2), int_arg(-5)},
                  {}},
                 {"norm \xc3\xa9", 1,
                  {pointer_arg(RegionKind::Arena, 4096, 4096, 1), pointer_arg(RegionKind::Weights, 0, 256, 1),
                   pointer_arg(RegionKind::Arena, 8192, 4096, 3), scalar_arg(2), int_arg(64), float_arg(1e-5)},
                  {0}}};
  return graph;
}

std::vector<std::byte> changed(size_t at, uint8_t value) {
  auto bytes = two_nodes().encode();
  bytes[at] = static_cast<std::byte>(value);
  TestGraph::reseal(bytes);
  return bytes;
}

// Where the sections of two_nodes() lie.
constexpr size_t kNodes = 64 + 2 * 8, kArgs = kNodes + 2 * 32, kEdges = kArgs + 11 * 32, kStrings = kEdges + 4;

struct Fixture {
  Regions regions;
  CpuFeatures cpu{true, true, true, true};
  uint64_t page_stride = 4096;

  Fixture() {
    for (uint32_t i = 0; i < kNumRegions; ++i) regions[i] = std::make_shared<Region>("a region", 16384);
  }
  std::string refusal(const TestGraph& graph) const {
    try {
      const BoundGraph bound(read_graph(graph.encode()), {regions, kernels::kernel_table(), cpu, page_stride});
    } catch (const GraphError& e) {
      return e.what();
    }
    return "";
  }
};

}  // namespace

TEST(crc32_is_that_of_zlib) {
  const std::string text = "123456789";
  CHECK(crc32(reinterpret_cast<const std::byte*>(text.data()), text.size()) == 0xcbf43926u);
  CHECK(crc32(nullptr, 0) == 0);
}

TEST(a_graph_is_read_as_written) {
  const LaunchGraph graph = read_graph(two_nodes().encode());
  CHECK(graph.nodes.size() == 2 && graph.symbols.size() == 2 && graph.symbols[1] == "rms_norm_f32_avx2");
  CHECK(graph.nodes[1].name == "norm \xc3\xa9" && graph.nodes[1].symbol == 1);
  CHECK(graph.nodes[1].predecessors == std::vector<uint32_t>{0});
  const GraphArg& out = graph.nodes[1].args[2];
  CHECK(out.kind == ArgKind::Pointer && out.region == RegionKind::Arena && out.value == 8192 && out.extent == 4096);
  CHECK(out.access == (kAccessRead | kAccessWrite));
  CHECK(static_cast<int64_t>(graph.nodes[0].args[4].value) == -5);
}

TEST(damage_is_refused_in_words) {
  const auto good = two_nodes().encode();
  auto bytes = good;
  bytes.resize(63);
  CHECK(contains(refusal(bytes), "the launch graph is damaged: a header needs 64 bytes, but there are 63"));
  bytes = good;
  bytes.push_back(std::byte{0});
  CHECK(contains(refusal(bytes), "bytes, but there are " + std::to_string(good.size() + 1)));
  bytes = good;
  bytes[kStrings] ^= std::byte{1};
  CHECK(contains(refusal(bytes), "its checksum does not match its contents: copy or build the artifact again"));
  CHECK(contains(refusal(changed(0, 'X')), "it does not begin with 'TSLG'"));
  CHECK(contains(refusal(changed(4, 1)), "has format version 1, but this runtime reads 3: build the artifact"));
  CHECK(contains(refusal(changed(6, 32)), "its header is not that of version 3"));
  CHECK(contains(refusal(changed(63, 1)), "its header is not that of version 3"));
  CHECK(contains(refusal(changed(12, 3)), "its sections need"));
  CHECK(contains(refusal(changed(kNodes, 2)), "node 0 names symbol 2 of 2"));
  CHECK(contains(refusal(changed(kNodes + 4, 1)), "node 0 does not use the arguments that follow"));
  CHECK(contains(refusal(changed(kNodes + 8, 200)), "node 0 does not use the arguments that follow"));
  CHECK(contains(refusal(changed(kNodes + 8, 4)), "node 1 does not use the arguments that follow"));
  CHECK(contains(refusal(changed(kNodes + 32 + 16, 0)), "belong to no node"));
  CHECK(contains(refusal(changed(kNodes + 28, 1)), "node 0 has bits in a field that must be zero"));
  CHECK(contains(refusal(changed(kNodes + 24, 250)), "the text of node 0 does not follow"));
  CHECK(contains(refusal(changed(kArgs, 1)), "node 0 argument 0 is a number, but has the region"));
  CHECK(contains(refusal(changed(kArgs + 3 * 32, 9)), "node 0 argument 3 has the unknown kind 9"));
  CHECK(contains(refusal(changed(kArgs + 1, 6)), "node 0 argument 0 points into the unknown region 6"));
  CHECK(contains(refusal(changed(kArgs + 2, 4)), "node 0 argument 0 has the unknown access 4"));
  CHECK(contains(refusal(changed(kArgs + 4, 1)), "node 0 argument 0 has bits in a field that must be zero"));
  CHECK(contains(refusal(changed(kArgs + 3, 4)), "node 0 argument 0 is a parameter of 4 bytes; 8 are legal"));
  CHECK(contains(refusal(changed(kArgs + 8, 2)), "node 0 argument 0 points to offset 2, which is no multiple of 4"));
  CHECK(contains(refusal(changed(kArgs + 17, 0)), "node 0 argument 0 spans 0 bytes"));
  CHECK(contains(refusal(changed(kArgs + 3 * 32 + 8, 3)), "node 0 argument 3 names the unknown step scalar 3"));
  CHECK(contains(refusal(changed(kEdges, 1)), "node 1 waits for node 1, which is not before it"));
  CHECK(contains(refusal(changed(kStrings, 0xff)), "the text of symbol 0 is not UTF-8"));
  CHECK(contains(refusal(changed(kStrings, 'z')), "its symbol names are not sorted and unique"));
  CHECK(contains(refusal(TestGraph{}.encode()), "it has 0 nodes"));
  TestGraph infinite = two_nodes();
  infinite.nodes[1].args[5] = float_arg(HUGE_VAL);
  CHECK(contains(refusal(infinite.encode()), "node 1 argument 5 is not a finite number"));
  TestGraph wide = two_nodes();
  wide.nodes[0].args[0].value = ~uint64_t{0} - 3;
  CHECK(contains(refusal(wide.encode()), "node 0 argument 0 spans 4096 bytes at 18446744073709551612"));
}

// One node for a GPU: an int32, a float and a pointer.
static TestGraph gpu_graph() {
  TestArg count = int_arg(-7), scale = float_arg(0.5);
  count.size = scale.size = 4;
  TestLaunch launch{0, {7, 2, 1}, {128, 1, 1}, {2, 1, 1}, 4096, 1};
  return {{"scale_kernel"}, {{"scale", 0, {count, scale, pointer_arg(RegionKind::Arena, 64, 256, 3)}, {}, launch}}, {"scale-0123"}};
}

TEST(a_gpu_graph_is_read_as_written) {
  const LaunchGraph graph = read_graph(gpu_graph().encode());
  CHECK(graph.binaries == std::vector<std::string>{"scale-0123"} && graph.nodes.size() == 1);
  const LaunchConfig& launch = graph.nodes[0].launch.value();
  CHECK(launch.binary == 0 && launch.grid == (std::array<uint32_t, 3>{7, 2, 1}) && launch.block[0] == 128);
  CHECK(launch.cluster[0] == 2 && launch.shared_bytes == 4096 && launch.programmatic);
  CHECK(graph.nodes[0].args[0].size == 4 && graph.nodes[0].args[2].size == 8);
}

TEST(a_cpu_refuses_a_gpu_graph) {
  CHECK(contains(Fixture().refusal(gpu_graph()), "node 0 ('scale', kernel scale_kernel): is launched on a GPU, but this device is a CPU"));
}

TEST(a_damaged_gpu_graph_is_refused_in_words) {
  const auto refused = [](auto change) {
    TestGraph graph = gpu_graph();
    change(graph.nodes[0]);
    return refusal(graph.encode());
  };
  CHECK(contains(refused([](TestNode& n) { n.launch.binary = 1; }), "node 0 names binary 1 of 1"));
  CHECK(contains(refused([](TestNode& n) { n.launch.grid[1] = 0; }), "node 0 is launched with a size of 0"));
  CHECK(contains(refused([](TestNode& n) { n.launch.flags = 2; }), "node 0 has unknown launch flags"));
  CHECK(contains(refused([](TestNode& n) { n.args[0].size = 2; }), "argument 0 is a parameter of 2 bytes"));
  CHECK(contains(refused([](TestNode& n) { n.args[0].value = 1ull << 40; }), "argument 0 does not fit in 4 bytes"));
  CHECK(contains(refused([](TestNode& n) { n.args[1] = float_arg(0.1), n.args[1].size = 4; }),
                 "argument 1 does not fit in 4 bytes"));
  TestGraph unused = gpu_graph();
  unused.binaries.push_back("z");
  CHECK(contains(refusal(unused.encode()), "belong to no node"));
}

// One node for a GPU that takes a struct of 28 bytes, with addresses at 8 and 16, and a number.
static TestGraph struct_graph() {
  TestGraph graph = gpu_graph();
  graph.data = std::string("\1\2\3\0\0\0\0\0", 8) + std::string(16, '\0') + "abcd";
  TestArg count = int_arg(-7);
  count.size = 4;
  graph.nodes[0].args = {bytes_arg(0, 28), address_arg(8, pointer_arg(RegionKind::Arena, 64, 256, 3)),
                         address_arg(16, pointer_arg(RegionKind::Io, 0, 64, 1)), count};
  return graph;
}

TEST(a_parameter_passed_by_value_is_read_as_written) {
  const LaunchGraph graph = read_graph(struct_graph().encode());
  const GraphNode& node = graph.nodes[0];
  CHECK(node.args.size() == 2 && node.args[0].kind == ArgKind::Bytes && node.args[1].kind == ArgKind::I64);
  CHECK(node.args[0].value == 0 && node.args[0].size == 28 && graph.data.size() == 28);
  CHECK(graph.data[2] == std::byte{3} && graph.data[27] == std::byte{'d'});
  CHECK(node.inner.size() == 2 && node.inner[0].arg == 0 && node.inner[0].place == 8 && node.inner[1].place == 16);
  CHECK(node.inner[0].pointer.kind == ArgKind::Pointer && node.inner[0].pointer.region == RegionKind::Arena);
  CHECK(node.inner[0].pointer.value == 64 && node.inner[0].pointer.extent == 256 && node.inner[0].pointer.access == 3);
}

TEST(a_damaged_parameter_passed_by_value_is_refused_in_words) {
  const auto refused = [](auto change) {
    TestGraph graph = struct_graph();
    change(graph.nodes[0].args, graph.data);
    return refusal(graph.encode());
  };
  using Args = std::vector<TestArg>;
  CHECK(contains(refused([](Args& a, auto&) { a[0].value = 4; }), "the bytes of node 0 argument 0 do not follow those before"));
  CHECK(contains(refused([](Args& a, auto&) { a[0].extent = 29; }), "the bytes of node 0 argument 0 do not follow those"));
  CHECK(contains(refused([](Args& a, auto&) { a[0].extent = ~uint64_t{0}; }), "the bytes of node 0 argument 0 do not follow"));
  CHECK(contains(refused([](Args& a, auto&) { a[0].extent = 0; }), "node 0 argument 0 is passed by value, but has no bytes"));
  CHECK(contains(refused([](Args& a, auto&) { a[0].size = 8; }), "argument 0 is passed by value, but has no bytes, or the region"));
  CHECK(contains(refused([](Args& a, auto&) { a[0].last = 8; }), "argument 0 has bits in a field that must be zero"));
  CHECK(contains(refused([](Args& a, auto&) { a[1].last = 12; }), "argument 0 of 28 bytes has an address at 12, where none"));
  CHECK(contains(refused([](Args& a, auto&) { a[2].last = 8; }), "argument 0 of 28 bytes has an address at 8, where none"));
  CHECK(contains(refused([](Args& a, auto&) { a[2].last = 24; }), "argument 0 of 28 bytes has an address at 24, where none"));
  CHECK(contains(refused([](Args& a, auto&) { a[2].last = ~uint64_t{7}; }), "has an address at 18446744073709551608, where"));
  CHECK(contains(refused([](Args& a, auto&) { a[1].region = 6; }), "argument 0 points into the unknown region 6"));
  CHECK(contains(refused([](Args& a, auto&) { a[1].access = 0; }), "argument 0 has the unknown access 0"));
  CHECK(contains(refused([](Args&, auto& data) { data[17] = 1; }), "argument 0 has bits where an address goes"));
  CHECK(contains(refused([](Args& a, auto&) { a.erase(a.begin()); }), "node 0 argument 0 has an address in no parameter"));
  CHECK(contains(refused([](Args& a, auto&) { std::swap(a[2], a[3]); }), "node 0 argument 1 has an address in no parameter"));
  CHECK(contains(refused([](Args&, auto& data) { data += "x"; }), "data or strings belong to no node"));
}

// Cuts `good` short at every byte, changes every byte and many at a time, with wrong checksums and with right ones.
static void attempt_damage(const std::vector<std::byte>& good) {
  const Fixture fixture;
  std::mt19937 engine(1);
  const auto attempt = [&](const std::vector<std::byte>& bytes) {
    const auto exact = std::make_unique<std::byte[]>(bytes.size());  // the sanitizer sees one byte beyond
    std::copy(bytes.begin(), bytes.end(), exact.get());
    try {
      const LaunchGraph graph = read_graph({exact.get(), bytes.size()});
      const BoundGraph bound(graph, {fixture.regions, kernels::kernel_table(), fixture.cpu, 4096});
      CHECK(bound.tasks().size() == graph.nodes.size());
    } catch (const GraphError& e) {
      CHECK(e.what()[0] != '\0');
    }
  };
  for (size_t size = 0; size <= good.size(); ++size) {
    auto bytes = good;
    bytes.resize(size);
    attempt(bytes);
    TestGraph::reseal(bytes);
    if (size >= 12) {
      const auto total = static_cast<uint32_t>(size);
      std::memcpy(bytes.data() + 8, &total, 4);
    }
    attempt(bytes);
  }
  for (size_t at = 0; at < good.size(); ++at) {
    for (const int value : {0, 1, 2, 3, 4, 0x7f, 0x80, 0xff}) {
      auto bytes = good;
      bytes[at] = static_cast<std::byte>(value);
      attempt(bytes);
      TestGraph::reseal(bytes);
      attempt(bytes);
    }
  }
  for (int trial = 0; trial < 20000; ++trial) {
    auto bytes = good;
    for (unsigned i = 0; i < 1 + engine() % 8; ++i) bytes[engine() % bytes.size()] = static_cast<std::byte>(engine());
    if (trial % 4 == 0) {
      for (size_t i = 64 + engine() % 100; i < bytes.size(); i += 1 + engine() % 40) {
        bytes[i] = static_cast<std::byte>(engine());
      }
    }
    TestGraph::reseal(bytes);
    attempt(bytes);
  }
}

TEST(no_bytes_crash_the_reader) {
  for (const auto& good : {two_nodes().encode(), struct_graph().encode()}) attempt_damage(good);
}

TEST(a_good_graph_is_bound) {
  const Fixture f;
  BoundGraph bound(read_graph(two_nodes().encode()), {f.regions, kernels::kernel_table(), f.cpu, 4096});
  bound.set_step({7, 3, 2}, 128);
  const auto& args = bound.tasks()[0].args;
  CHECK(args[0].pointer == f.regions[2]->data());
  CHECK(args[1].pointer == f.regions[3]->data() + 64 + 128);
  CHECK(args[3].i64 == 2 && args[4].i64 == -5);
  CHECK(bound.tasks()[1].args[5].f64 == 1e-5 && bound.io_bytes() == 128 && bound.names()[0] == "gather");
}

TEST(what_the_device_cannot_run_is_refused) {
  Fixture f;
  TestGraph graph = two_nodes();
  graph.symbols[1] = "rms_norm_f64_avx2";
  CHECK(contains(f.refusal(graph),
                 "launch graph node 1 ('norm \\xc3\\xa9', kernel rms_norm_f64_avx2): this runtime has no such"));

  graph = two_nodes();
  graph.nodes[0].args.pop_back();
  CHECK(contains(f.refusal(graph),
                 "node 0 ('gather', kernel gather_rows_f32_avx2): the kernel takes 5 arguments, but the node has 4"));
  graph = two_nodes();
  graph.nodes[0].args[3] = float_arg(2);
  CHECK(contains(f.refusal(graph), "argument 3 must be an integer, but is a float"));
  graph = two_nodes();
  graph.nodes[1].args[0] = scalar_arg(0);
  CHECK(contains(f.refusal(graph), "argument 0 must be a pointer, but is a step scalar"));

  f.cpu = {true, false, false, false};
  graph = two_nodes();
  graph.symbols[1] = "rms_norm_f32_avx512";
  CHECK(contains(f.refusal(graph),
                 "the kernel needs avx512 instructions, but this processor runs avx2: build the artifact for"));
  f.cpu = {};
  CHECK(contains(f.refusal(two_nodes()), "needs avx2 instructions, but this processor runs none of avx2, avx512"));
}

TEST(a_pointer_that_leaves_its_region_is_refused) {
  Fixture f;
  TestGraph graph = two_nodes();
  graph.nodes[1].args[2].extent = 8193;
  CHECK(contains(f.refusal(graph), "argument 2 needs 8193 bytes at offset 8192 of region arena, which has 16384"));
  graph.nodes[1].args[2].extent = 8192;
  CHECK(f.refusal(graph).empty());
  graph.nodes[1].args[2].value = 1u << 20;
  CHECK(contains(f.refusal(graph), "argument 2 needs 8192 bytes at offset 1048576 of region arena"));
  graph = two_nodes();
  graph.nodes[1].args[1].access = 3;
  CHECK(contains(f.refusal(graph), "argument 1 writes to region weights, which is read-only"));
  graph = two_nodes();
  graph.nodes[0].args[0] = pointer_arg(RegionKind::Kv, 4000, 97, 1);
  CHECK(contains(f.refusal(graph), "argument 0 needs 97 bytes at offset 4000 of a page of region kv, which has 4096"));
  f.page_stride = 1 << 20;  // no page is larger than the region
  graph.nodes[0].args[0] = pointer_arg(RegionKind::Kv, 16000, 385, 1);
  CHECK(contains(f.refusal(graph), "of a page of region kv, which has 16384"));
  f.regions[static_cast<size_t>(RegionKind::Io)].reset();
  CHECK(contains(f.refusal(two_nodes()),
                 "argument 1 points into region io, which is not allocated: allocate it first"));
}

TEST(the_kernel_table_is_sorted_and_well_formed) {
  std::string before;
  for (const kernels::KernelEntry& entry : kernels::kernel_table()) {
    const std::string symbol = entry.symbol, signature = entry.signature;
    CHECK(before < symbol);
    before = symbol;
    CHECK(entry.fn != nullptr && !signature.empty() && signature.find_first_not_of("pif") == std::string::npos);
    CHECK(runs(CpuFeatures{true, true, true, true}, instruction_set_of(symbol)));
  }
}

TEST_MAIN
