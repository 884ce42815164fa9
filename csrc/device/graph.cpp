#include "device/graph.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "abi.h"
#include "device/crc32.h"
#include "device/errors.h"
#include "device/thread_pool.h"

namespace tokenspeed::device {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is read as it lies in memory");

struct Header {
  char magic[4];
  uint16_t version, header_bytes;
  uint32_t total_bytes, num_symbols, num_binaries, num_nodes, num_args, num_edges, string_bytes, crc, data_bytes;
  uint8_t zero[20];
};
struct NameRecord {
  uint32_t offset, length;
};
struct NodeRecord {
  uint32_t symbol, first_arg, num_args, first_edge, num_edges, name_offset, name_length, zero;
};
struct LaunchRecord {
  uint32_t binary, grid[3], block[3], cluster[3], shared_bytes, flags;
};
struct ArgRecord {
  uint8_t kind, region, access, size, zero[4];
  uint64_t value, extent, last;
};
static_assert(sizeof(Header) == 64 && sizeof(NameRecord) == 8 && sizeof(NodeRecord) == 32 &&
              sizeof(LaunchRecord) == 48 && sizeof(ArgRecord) == 32);

constexpr uint16_t kVersion = 3;
constexpr uint32_t kProgrammatic = 1;
constexpr uint8_t kAddress = 5;  // kind of a record
constexpr uint64_t kAddressBytes = 8;

[[noreturn]] void damaged(const std::string& what) {
  throw GraphError("the launch graph is damaged: " + what + ": copy or build the artifact again");
}

std::string number(uint64_t n) { return std::to_string(n); }

bool all_zero(const uint8_t* bytes, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (bytes[i] != 0) return false;
  }
  return true;
}

// A well-formed UTF-8 sequence at the front of `text` (RFC 3629): its length, or 0.
size_t utf8_sequence(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xc2 && lead <= 0xdf   ? 2
                        : (lead & 0xf0) == 0xe0        ? 3
                        : lead >= 0xf0 && lead <= 0xf4 ? 4
                                                       : 0;
  if (length == 0 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const bool overlong = (lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xf0 && byte(1) < 0x90);
  const bool surrogate = lead == 0xed && byte(1) > 0x9f, too_great = lead == 0xf4 && byte(1) > 0x8f;
  return overlong || surrogate || too_great ? 0 : length;
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t length = utf8_sequence(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string printable(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (unsigned char c : text.substr(0, 200)) {
    if (c >= 0x20 && c < 0x7f) {
      out += static_cast<char>(c);
    } else {
      (out += "\\x") += {kHex[c >> 4], kHex[c & 15]};
    }
  }
  return out;
}

// Whether a float holds `value` as it is.
bool is_float(double value) {
  return std::abs(value) <= std::numeric_limits<float>::max() && static_cast<double>(static_cast<float>(value)) == value;
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  LaunchGraph read() {
    read_header();
    LaunchGraph graph;
    graph.symbols = read_names(symbols_, header_.num_symbols, "symbol");
    graph.binaries = read_names(binaries_, header_.num_binaries, "binary");
    graph.nodes.reserve(header_.num_nodes);
    graph.data.assign(bytes_.begin() + static_cast<std::ptrdiff_t>(data_),
                      bytes_.begin() + static_cast<std::ptrdiff_t>(data_ + header_.data_bytes));
    std::vector<bool> symbols(header_.num_symbols), binaries(header_.num_binaries);
    for (uint32_t i = 0; i < header_.num_nodes; ++i) {
      graph.nodes.push_back(read_node(i));
      symbols[graph.nodes.back().symbol] = true;
      if (const auto& launch = graph.nodes.back().launch) binaries[launch->binary] = true;
    }
    const auto all = [](const std::vector<bool>& used) { return std::find(used.begin(), used.end(), false) == used.end(); };
    if (args_seen_ != header_.num_args || edges_seen_ != header_.num_edges || data_seen_ != header_.data_bytes ||
        strings_seen_ != header_.string_bytes || !all(symbols) || !all(binaries)) {
      damaged("some of its symbols, binaries, arguments, edges, data or strings belong to no node");
    }
    return graph;
  }

 private:
  std::vector<std::string> read_names(size_t section, uint32_t count, const std::string& what) {
    std::vector<std::string> names;
    names.reserve(count);
    for (uint32_t i = 0; i < count; ++i) {
      const auto record = at<NameRecord>(section, i);
      names.push_back(text(record.offset, record.length, what + " " + number(i)));
      if (i > 0 && names[i] <= names[i - 1]) damaged("its " + what + " names are not sorted and unique");
    }
    return names;
  }

  std::optional<LaunchConfig> read_launch(uint32_t index) const {
    if (header_.num_binaries == 0) return std::nullopt;
    const auto record = at<LaunchRecord>(launches_, index);
    const std::string what = "node " + number(index);
    if (record.binary >= header_.num_binaries) {
      damaged(what + " names binary " + number(record.binary) + " of " + number(header_.num_binaries));
    }
    LaunchConfig launch{record.binary, {}, {}, {}, record.shared_bytes, (record.flags & kProgrammatic) != 0};
    for (size_t i = 0; i < 3; ++i) {
      launch.grid[i] = record.grid[i];
      launch.block[i] = record.block[i];
      launch.cluster[i] = record.cluster[i];
      if (record.grid[i] == 0 || record.block[i] == 0 || record.cluster[i] == 0) {
        damaged(what + " is launched with a size of 0");
      }
    }
    if ((record.flags & ~kProgrammatic) != 0) damaged(what + " has unknown launch flags");
    return launch;
  }

  template <typename Record>
  Record at(size_t section, uint64_t index) const {
    Record record;
    std::memcpy(&record, bytes_.data() + section + index * sizeof(Record), sizeof(Record));
    return record;
  }

  void read_header() {
    if (bytes_.size() < sizeof(Header)) {
      damaged("a header needs " + number(sizeof(Header)) + " bytes, but there are " + number(bytes_.size()));
    }
    header_ = at<Header>(0, 0);
    if (std::memcmp(header_.magic, "TSLG", 4) != 0) damaged("it does not begin with 'TSLG'");
    if (header_.version != kVersion) {
      throw GraphError("the launch graph has format version " + number(header_.version) + ", but this runtime reads " +
                       number(kVersion) + ": build the artifact with this version of TokenSpeed");
    }
    if (header_.header_bytes != sizeof(Header) || !all_zero(header_.zero, sizeof(header_.zero))) {
      damaged("its header is not that of version 3");
    }
    if (header_.total_bytes != bytes_.size()) {
      damaged("it says that it has " + number(header_.total_bytes) + " bytes, but there are " + number(bytes_.size()));
    }
    place_sections();
    const uint32_t crc = crc32(bytes_.data() + sizeof(Header), bytes_.size() - sizeof(Header));
    if (crc != header_.crc) damaged("its checksum does not match its contents");
    if (header_.num_nodes == 0 || header_.num_nodes > ThreadPool::kMaxTasks) {
      damaged("it has " + number(header_.num_nodes) + " nodes; 1 to " + number(ThreadPool::kMaxTasks) + " are legal");
    }
  }

  void place_sections() {
    uint64_t end = sizeof(Header);  // no overflow: eight products of 32-bit numbers and small sizes
    symbols_ = end;
    end += uint64_t{header_.num_symbols} * sizeof(NameRecord);
    binaries_ = end;
    end += uint64_t{header_.num_binaries} * sizeof(NameRecord);
    nodes_ = end;
    end += uint64_t{header_.num_nodes} * sizeof(NodeRecord);
    launches_ = end;
    end += header_.num_binaries == 0 ? 0 : uint64_t{header_.num_nodes} * sizeof(LaunchRecord);
    args_ = end;
    end += uint64_t{header_.num_args} * sizeof(ArgRecord);
    edges_ = end;
    end += uint64_t{header_.num_edges} * sizeof(uint32_t);
    data_ = end;
    end += header_.data_bytes;
    strings_ = end;
    end += header_.string_bytes;
    if (end != bytes_.size()) {
      damaged("its sections need " + number(end) + " bytes, but it has " + number(bytes_.size()));
    }
  }

  // Strings, arguments and edges follow one another in the order of their use, so a small file cannot ask for
  // much memory, and a graph has one encoding only.
  std::string text(uint32_t offset, uint32_t length, const std::string& what) {
    if (offset != strings_seen_ || length > header_.string_bytes - strings_seen_) {
      damaged("the text of " + what + " does not follow the one before it");
    }
    const std::string_view view(reinterpret_cast<const char*>(bytes_.data()) + strings_ + offset, length);
    if (!is_utf8(view)) damaged("the text of " + what + " is not UTF-8");
    strings_seen_ += length;
    return std::string(view);
  }

  GraphNode read_node(uint32_t index) {
    const auto record = at<NodeRecord>(nodes_, index);
    const std::string what = "node " + number(index);
    if (record.symbol >= header_.num_symbols) {
      damaged(what + " names symbol " + number(record.symbol) + " of " + number(header_.num_symbols));
    }
    if (record.first_arg != args_seen_ || record.num_args > header_.num_args - args_seen_) {
      damaged(what + " does not use the arguments that follow those of the node before it");
    }
    if (record.first_edge != edges_seen_ || record.num_edges > header_.num_edges - edges_seen_) {
      damaged(what + " does not use the edges that follow those of the node before it");
    }
    if (record.zero != 0) damaged(what + " has bits in a field that must be zero");
    GraphNode node{text(record.name_offset, record.name_length, what), record.symbol, {}, {}, {}, read_launch(index)};
    node.args.reserve(record.num_args);
    for (uint32_t i = 0; i < record.num_args; ++i) {
      const auto arg = at<ArgRecord>(args_, args_seen_ + i);
      if (arg.kind == kAddress) {
        read_address(what, arg, node);
      } else {
        node.args.push_back(read_arg(what, static_cast<uint32_t>(node.args.size()), arg));
      }
    }
    for (uint32_t i = 0; i < record.num_edges; ++i) {
      const auto predecessor = at<uint32_t>(edges_, edges_seen_ + i);
      if (predecessor >= index) damaged(what + " waits for node " + number(predecessor) + ", which is not before it");
      node.predecessors.push_back(predecessor);
    }
    args_seen_ += record.num_args;
    edges_seen_ += record.num_edges;
    return node;
  }

  // Adds an address to the parameter before it.
  void read_address(const std::string& node, ArgRecord record, GraphNode& to) {
    const uint32_t position = to.args.empty() ? 0 : static_cast<uint32_t>(to.args.size() - 1);
    const auto fail = [&](const std::string& what) { damaged(node + " argument " + number(position) + " " + what); };
    if (to.args.empty() || to.args.back().kind != ArgKind::Bytes) fail("has an address in no parameter");
    const GraphArg& bytes = to.args.back();
    const uint64_t place = std::exchange(record.last, 0);
    const bool follows = !to.inner.empty() && to.inner.back().arg == position;
    const uint64_t first = follows ? to.inner.back().place + kAddressBytes : 0;
    if (place % kAddressBytes != 0 || place < first || bytes.size < kAddressBytes || place > bytes.size - kAddressBytes) {
      fail("of " + number(bytes.size) + " bytes has an address at " + number(place) + ", where none can be");
    }
    if (at<uint64_t>(data_ + bytes.value + place, 0) != 0) fail("has bits where an address goes");
    record.kind = static_cast<uint8_t>(ArgKind::Pointer);
    to.inner.push_back({position, static_cast<uint32_t>(place), read_arg(node, position, record)});
  }

  // The bytes of parameters follow one another as strings do.
  GraphArg read_bytes(const std::string& what, const ArgRecord& record) {
    if (record.value != data_seen_ || record.extent > header_.data_bytes - data_seen_) {
      damaged("the bytes of " + what + " do not follow those before them");
    }
    if (record.extent == 0 || record.region != 0 || record.access != 0 || record.size != 0) {
      damaged(what + " is passed by value, but has no bytes, or the region, access or size of another kind");
    }
    data_seen_ += static_cast<uint32_t>(record.extent);
    return {ArgKind::Bytes, RegionKind::Weights, 0, static_cast<uint32_t>(record.extent), record.value, 0};
  }

  GraphArg read_arg(const std::string& node, uint32_t position, const ArgRecord& record) {
    const auto fail = [&](const std::string& what) { damaged(node + " argument " + number(position) + " " + what); };
    const auto kind = static_cast<ArgKind>(record.kind);
    if (!all_zero(record.zero, sizeof(record.zero)) || record.last != 0) {
      fail("has bits in a field that must be zero");
    }
    if (kind == ArgKind::Bytes) return read_bytes(node + " argument " + number(position), record);
    if (kind == ArgKind::Pointer) {
      if (record.region >= kNumRegions) fail("points into the unknown region " + number(record.region));
      if (record.access == 0 || record.access > (kAccessRead | kAccessWrite)) {
        fail("has the unknown access " + number(record.access));
      }
      if (record.value % 4 != 0) fail("points to offset " + number(record.value) + ", which is no multiple of 4");
      if (record.extent == 0 || record.extent >= ~record.value) {
        fail("spans " + number(record.extent) + " bytes at " + number(record.value));
      }
    } else if (record.region != 0 || record.access != 0 || record.extent != 0) {
      fail("is a number, but has the region, access or extent of a pointer");
    }
    if (record.kind > static_cast<uint8_t>(ArgKind::Scalar)) fail("has the unknown kind " + number(record.kind));
    if (record.size != 8 && !(record.size == 4 && (kind == ArgKind::I64 || kind == ArgKind::F64))) {
      fail("is a parameter of " + number(record.size) + " bytes; 8 are legal, and 4 for a number");
    }
    if (kind == ArgKind::I64 && record.size == 4 &&
        static_cast<int64_t>(record.value) != static_cast<int32_t>(static_cast<uint32_t>(record.value))) {
      fail("does not fit in 4 bytes");
    }
    if (kind == ArgKind::Scalar && record.value >= kernels::kNumStepScalars) {
      fail("names the unknown step scalar " + number(record.value));
    }
    if (kind == ArgKind::F64) {
      const double value = std::bit_cast<double>(record.value);
      if (!std::isfinite(value)) fail("is not a finite number");
      if (record.size == 4 && !is_float(value)) fail("does not fit in 4 bytes");
    }
    return {kind, static_cast<RegionKind>(record.region), record.access, record.size, record.value, record.extent};
  }

  std::span<const std::byte> bytes_;
  Header header_{};
  size_t symbols_ = 0, binaries_ = 0, nodes_ = 0, launches_ = 0, args_ = 0, edges_ = 0, data_ = 0, strings_ = 0;
  uint32_t args_seen_ = 0, edges_seen_ = 0, data_seen_ = 0, strings_seen_ = 0;
};

}  // namespace

LaunchGraph read_graph(std::span<const std::byte> bytes) { return Reader(bytes).read(); }

std::string describe_node(const LaunchGraph& graph, size_t node) {
  return "node " + number(node) + " ('" + printable(graph.nodes[node].name) + "', kernel " +
         printable(graph.symbols[graph.nodes[node].symbol]) + ")";
}

}  // namespace tokenspeed::device
