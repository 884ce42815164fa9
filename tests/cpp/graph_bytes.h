// Writes LaunchGraphs for tests, apart from the Python writer: two hands, one format.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "device/crc32.h"
#include "device/cpu_features.h"
#include "device/graph.h"

namespace tokenspeed::device {

struct TestArg {
  uint8_t kind = 0, region = 0, access = 0;
  uint64_t value = 0, extent = 0;
  uint8_t size = 8;
  uint64_t last = 0;
};

inline TestArg pointer_arg(RegionKind region, uint64_t offset, uint64_t extent, uint8_t access) {
  return {0, static_cast<uint8_t>(region), access, offset, extent};
}
inline TestArg int_arg(int64_t value) { return {1, 0, 0, static_cast<uint64_t>(value), 0}; }
inline TestArg float_arg(double value) {
  TestArg arg{2, 0, 0, 0, 0};
  std::memcpy(&arg.value, &value, 8);
  return arg;
}
inline TestArg scalar_arg(uint64_t index) { return {3, 0, 0, index, 0}; }
// A parameter passed by value: `length` bytes of the graph's data at `offset`, and the addresses that follow it.
inline TestArg bytes_arg(uint64_t offset, uint64_t length) { return {4, 0, 0, offset, length, 0}; }
inline TestArg address_arg(uint64_t place, TestArg pointer) {
  pointer.kind = 5;
  pointer.last = place;
  return pointer;
}

struct TestLaunch {
  uint32_t binary = 0;
  uint32_t grid[3] = {1, 1, 1}, block[3] = {32, 1, 1}, cluster[3] = {1, 1, 1};
  uint32_t shared_bytes = 0, flags = 0;
};

struct TestNode {
  std::string name;
  uint32_t symbol;
  std::vector<TestArg> args;
  std::vector<uint32_t> edges;
  TestLaunch launch = {};  // written if the graph has binaries
};

struct TestGraph {
  std::vector<std::string> symbols;
  std::vector<TestNode> nodes;
  std::vector<std::string> binaries = {};
  std::string data = {};  // of parameters passed by value

  std::vector<std::byte> encode() const {
    std::vector<std::byte> out(64), args, edges, node_table, launches;
    std::string strings;
    const auto put = [](std::vector<std::byte>& to, auto value) {
      const auto* p = reinterpret_cast<const std::byte*>(&value);
      to.insert(to.end(), p, p + sizeof(value));
    };
    const auto text = [&](std::vector<std::byte>& to, const std::string& s) {
      put(to, static_cast<uint32_t>(strings.size()));
      put(to, static_cast<uint32_t>(s.size()));
      strings += s;
    };
    for (const auto& symbol : symbols) text(out, symbol);
    for (const auto& binary : binaries) text(out, binary);
    uint32_t num_args = 0, num_edges = 0;
    for (const TestNode& node : nodes) {
      for (const uint32_t field : {node.symbol, num_args, static_cast<uint32_t>(node.args.size()), num_edges,
                                   static_cast<uint32_t>(node.edges.size())}) {
        put(node_table, field);
      }
      text(node_table, node.name);
      put(node_table, uint32_t{0});
      for (const TestArg& arg : node.args) {
        for (const uint8_t byte : {arg.kind, arg.region, arg.access, arg.size, uint8_t{0}, uint8_t{0}, uint8_t{0},
                                   uint8_t{0}}) {
          put(args, byte);
        }
        for (const uint64_t word : {arg.value, arg.extent, arg.last}) put(args, word);
      }
      for (const uint32_t edge : node.edges) put(edges, edge);
      if (!binaries.empty()) put(launches, node.launch);
      num_args += static_cast<uint32_t>(node.args.size());
      num_edges += static_cast<uint32_t>(node.edges.size());
    }
    for (const auto* part : {&node_table, &launches, &args, &edges}) out.insert(out.end(), part->begin(), part->end());
    for (char c : data + strings) out.push_back(static_cast<std::byte>(c));
    const auto data_bytes = static_cast<uint32_t>(data.size());
    const uint32_t counts[] = {static_cast<uint32_t>(out.size()),     static_cast<uint32_t>(symbols.size()),
                               static_cast<uint32_t>(binaries.size()), static_cast<uint32_t>(nodes.size()),
                               num_args, num_edges, static_cast<uint32_t>(strings.size())};
    std::memcpy(out.data(), "TSLG\3\0\x40\0", 8);
    std::memcpy(out.data() + 8, counts, sizeof(counts));
    std::memcpy(out.data() + 40, &data_bytes, 4);
    reseal(out);
    return out;
  }

  // Makes the checksum match whatever the bytes are.
  static void reseal(std::vector<std::byte>& bytes) {
    if (bytes.size() < 64) return;
    const uint32_t crc = crc32(bytes.data() + 64, bytes.size() - 64);
    std::memcpy(bytes.data() + 36, &crc, 4);
  }
};

// Symbols of kernels that the machine at hand runs.
inline std::string runnable_symbol(const std::string& op) {
  return op + (CpuFeatures::detect().avx512 ? "_avx512" : "_avx2");
}

// Gathers io rows of the arena into io: up to 256 row numbers at 0, the rows at 1024.
inline TestGraph gather_graph(int64_t width) {
  return {{runnable_symbol("gather_rows_f32")},
          {{"gather",
            0,
            {pointer_arg(RegionKind::Arena, 0, 1 << 15, 1), pointer_arg(RegionKind::Io, 0, 1024, 1),
             pointer_arg(RegionKind::Io, 1024, 1024, 2), scalar_arg(2), int_arg(width)},
            {}}}};
}

}  // namespace tokenspeed::device
