// A LaunchGraph as read from its bytes: pure data, checked for form. What it means on a device (regions,
// kernels) is checked where it is bound to one: see binding.h.
//
// Layout, little-endian: a header of 64 bytes (magic "TSLG", u16 version, u16 header bytes, u32 total bytes,
// u32 counts of symbols, binaries, nodes, args, edges and string bytes, u32 CRC-32 of all that follows the header,
// u32 data bytes, 20 zero bytes), then
//   symbols  {u32 offset, u32 length}, into the strings
//   binaries {u32 offset, u32 length}, into the strings
//   nodes    {u32 symbol, u32 first_arg, u32 num_args, u32 first_edge, u32 num_edges, u32 name offset and
//            length, u32 zero}
//   launches {u32 binary, u32 grid[3], u32 block[3], u32 cluster[3], u32 shared_bytes, u32 flags}, one per node if
//            there are binaries, else none
//   args     {u8 kind, u8 region, u8 access, u8 size, u8 zero[4], u64 value, u64 extent, u64 last}; kind 4 is a
//            parameter passed by value: `value` is where its bytes lie in the data, `extent` how many they are, size 0;
//            records of kind 5 after it are the addresses in it: pointers whose `last` is their place in the bytes,
//            ascending multiples of 8, where the data is zero
//   edges    u32, a predecessor's index, smaller than the node's: nodes in order are a topological order
//   data     bytes of the parameters passed by value, one after another
//   strings  UTF-8: of the symbols, then of the binaries, then of the nodes, one after another
// Symbols and binaries are sorted and unique. Each node's arguments and edges follow those of the node before it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/region.h"

namespace tokenspeed::device {

enum class ArgKind : uint8_t { Pointer = 0, I64 = 1, F64 = 2, Scalar = 3, Bytes = 4 };

inline constexpr uint8_t kAccessRead = 1, kAccessWrite = 2;

struct GraphArg {
  ArgKind kind;
  RegionKind region;   // of a pointer
  uint8_t access;      // of a pointer: kAccessRead | kAccessWrite
  uint32_t size;       // bytes of the kernel's parameter: 8, or 4 for a number that is an int32 or a float there
  uint64_t value;      // byte offset in the region; the bits of an int64 or a double; a StepScalar; place in the data
  uint64_t extent;     // of a pointer: bytes that the kernel may touch
};

// An address inside a parameter that is passed by value.
struct InnerPointer {
  uint32_t arg;      // of the node
  uint32_t place;    // in the parameter's bytes
  GraphArg pointer;  // of kind Pointer
};

// How a GPU runs a node.
struct LaunchConfig {
  uint32_t binary;           // the code object that holds the symbol
  std::array<uint32_t, 3> grid, block, cluster;
  uint32_t shared_bytes;     // dynamic
  bool programmatic;         // may start before its predecessors have finished: it waits for them itself
};

struct GraphNode {
  std::string name;
  uint32_t symbol;
  std::vector<GraphArg> args;
  std::vector<InnerPointer> inner;  // ascending by argument, then place
  std::vector<uint32_t> predecessors;
  std::optional<LaunchConfig> launch;  // none: a function of the native kernel library
};

struct LaunchGraph {
  std::vector<std::string> symbols;
  std::vector<std::string> binaries;  // none in a graph for a CPU
  std::vector<GraphNode> nodes;
  std::vector<std::byte> data;  // of parameters passed by value
};

// Throws GraphError for bytes that are no LaunchGraph. Reads nothing outside `bytes`, whatever they say, and
// allocates no more than a small multiple of their size.
LaunchGraph read_graph(std::span<const std::byte> bytes);

// How errors name a node, with anything unprintable escaped.
std::string describe_node(const LaunchGraph& graph, size_t node);

}  // namespace tokenspeed::device
