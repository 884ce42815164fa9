// A LaunchGraph as read from its bytes: pure data, checked for form. What it means on a device (regions,
// kernels) is checked where it is bound to one: see binding.h.
//
// Layout, little-endian: a header of 64 bytes (magic "TSLG", u16 version, u16 header bytes, u32 total bytes,
// u32 counts of symbols, nodes, args, edges and string bytes, u32 CRC-32 of all that follows the header,
// 28 zero bytes), then
//   symbols  {u32 offset, u32 length}, into the strings
//   nodes    {u32 symbol, u32 first_arg, u32 num_args, u32 first_edge, u32 num_edges, u32 name offset and
//            length, u32 zero}
//   args     {u8 kind, u8 region, u8 access, u8 zero[5], u64 value, u64 extent, u64 zero}
//   edges    u32, a predecessor's index, smaller than the node's: nodes in order are a topological order
//   strings  UTF-8: of the symbols, then of the nodes, one after another
// Symbols are sorted and unique. Each node's arguments and edges follow those of the node before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "device/region.h"

namespace tokenspeed::device {

enum class ArgKind : uint8_t { Pointer = 0, I64 = 1, F64 = 2, Scalar = 3 };

inline constexpr uint8_t kAccessRead = 1, kAccessWrite = 2;

struct GraphArg {
  ArgKind kind;
  RegionKind region;   // of a pointer
  uint8_t access;      // of a pointer: kAccessRead | kAccessWrite
  uint64_t value;      // byte offset in the region; the bits of an int64 or a double; a StepScalar
  uint64_t extent;     // of a pointer: bytes that the kernel may touch
};

struct GraphNode {
  std::string name;
  uint32_t symbol;
  std::vector<GraphArg> args;
  std::vector<uint32_t> predecessors;
};

struct LaunchGraph {
  std::vector<std::string> symbols;
  std::vector<GraphNode> nodes;
};

// Throws GraphError for bytes that are no LaunchGraph. Reads nothing outside `bytes`, whatever they say, and
// allocates no more than a small multiple of their size.
LaunchGraph read_graph(std::span<const std::byte> bytes);

// How errors name a node, with anything unprintable escaped.
std::string describe_node(const LaunchGraph& graph, size_t node);

}  // namespace tokenspeed::device
