// Parameters that are passed by value: their bytes reach the kernel as written, with addresses where pointers go, and
// their pointers are held to the same rules as any other.
#include "gpu_fixture.h"

using namespace tokenspeed::device;
using namespace tokenspeed::device::gpu;

namespace {

// What a library's kernel might take: numbers among addresses, and a tail that fills no word.
struct Job {
  int32_t count, add;
  const int32_t* x;
  int64_t scale;
  int32_t* y;
  char letters[4];
};
constexpr size_t kJobBytes = 36;

// "take": y[i] = x[i] * scale + add for count items, then the letters; the second parameter says where they go.
void run_take(void** p) {
  Job job{};
  std::memcpy(&job, p[0], kJobBytes);
  int32_t* const letters = *static_cast<int32_t**>(p[1]);
  for (int32_t i = 0; i < job.count; ++i) job.y[i] = job.x[i] * static_cast<int32_t>(job.scale) + job.add;
  for (int i = 0; i < 4; ++i) letters[i] = job.letters[i];
}

TestGraph take_graph() {
  Job job{};
  job.count = 3, job.add = -5, job.scale = 7;
  std::memcpy(job.letters, "abcd", 4);
  TestGraph graph{{"take"},
                  {{"take",
                    0,
                    {bytes_arg(0, kJobBytes), address_arg(8, pointer_arg(RegionKind::HostIo, kIn, 64, kAccessRead)),
                     address_arg(24, pointer_arg(RegionKind::HostIo, kInputBytes, 64, kAccessWrite)),
                     pointer_arg(RegionKind::HostIo, kInputBytes + 128, 16, kAccessWrite)},
                    {}}}};
  graph.binaries = {"library"};
  graph.data = std::string(reinterpret_cast<const char*>(&job), kJobBytes);
  return graph;
}

struct Library : Ready {
  explicit Library(Backend backend) : Ready(backend) {
    driver.kernel("take", run_take, {kJobBytes, 8});
    device->load_binary("library", code_object(backend, "take"));
  }
  std::string refusal(const TestGraph& graph) {
    return error_of([&] { device->load_graph(graph.encode(), 0); });
  }
};

}  // namespace

TEST(bytes_and_addresses_reach_the_kernel) {
  for (const Backend backend : kBackends) {
    Library r(backend);
    TestGraph twice = take_graph();  // two nodes: parameters of one must not run into those of the other
    twice.nodes.push_back(twice.nodes[0]);
    twice.nodes[1].name = "again";
    twice.nodes[1].edges = {0};
    twice.nodes[1].args[0] = bytes_arg(kJobBytes, kJobBytes);
    twice.nodes[1].args[2] = address_arg(24, pointer_arg(RegionKind::HostIo, kInputBytes + 64, 64, kAccessWrite));
    twice.data += twice.data;
    twice.data[kJobBytes + 4] = 1, twice.data[kJobBytes + 5] = twice.data[kJobBytes + 6] = twice.data[kJobBytes + 7] = 0;
    const int graph = r.device->load_graph(twice.encode(), 0);
    for (const int set : {1, 0}) {  // addresses inside of parameters too are those of the set
      for (int i = 0; i < 16; ++i) r.input(set)[i] = 10 + i + set;
      r.device->wait(r.device->submit(graph, {1, 1, 1}, set));
      for (int i = 0; i < 4; ++i) {
        CHECK(r.output(set)[i] == (i < 3 ? (10 + i + set) * 7 - 5 : 0));
        CHECK(r.output(set)[16 + i] == (i < 3 ? (10 + i + set) * 7 + 1 : 0));
        CHECK(r.output(set)[32 + i] == "abcd"[i]);
      }
    }
  }
}

TEST(pointers_inside_are_checked) {
  Library r(Backend::Cuda);
  TestGraph graph = take_graph();
  graph.nodes[0].args[2].extent = kIoBytes;
  CHECK(contains(r.refusal(graph), "argument 0 needs " + std::to_string(kIoBytes) + " bytes at offset " +
                                       std::to_string(kInputBytes) + " of region host_io, which has"));
  graph = take_graph();
  graph.nodes[0].args[1] = address_arg(8, pointer_arg(RegionKind::State, 0, 4, kAccessRead));
  CHECK(contains(r.refusal(graph), "argument 0 points into region state, which is not allocated"));
}

TEST(the_size_is_that_of_the_kernels_parameter) {
  Library r(Backend::Cuda);
  TestGraph graph = take_graph();
  graph.nodes[0].args[0].extent = 32;
  graph.data.resize(32);
  CHECK(contains(r.refusal(graph), "argument 0 has 32 bytes, but the kernel's parameter has 36: build the artifact"));
}

TEST_MAIN
