// The GPU device over drivers for tests: what it asks of CUDA and of HIP, in which order, and what comes out.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <set>
#include <thread>
#include <utility>

#include "device/gpu/gpu_files.h"
#include "gpu_fixture.h"

using namespace tokenspeed::device;
using namespace tokenspeed::device::gpu;

namespace {

using Lines = std::vector<std::string>;

// The thread sanitizer keeps most addresses to itself, so there memory lies elsewhere.
#ifdef __SANITIZE_THREAD__
constexpr bool kAddressesAreFree = false;
#else
constexpr bool kAddressesAreFree = true;
#endif

std::string hex_of(uint64_t value, int bytes) {
  std::string text;
  char digits[3];
  for (int i = 0; i < bytes; ++i) {
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned>(value >> (8 * i)) & 0xff);
    text += digits;
  }
  return text;
}

// The values of "params=" in a line of the log.
Lines params_of(const std::string& line) {
  Lines params;
  std::string rest = line.substr(line.find("params=") + 7);
  for (size_t comma; (comma = rest.find(',')) != std::string::npos; rest = rest.substr(comma + 1)) {
    params.push_back(rest.substr(0, comma));
  }
  params.push_back(rest);
  return params;
}

}  // namespace

namespace {

Lines lines_from(const std::string& log, size_t from) {
  Lines lines;
  for (size_t end; (end = log.find('\n', from)) != std::string::npos; from = end + 1) {
    lines.push_back(log.substr(from, end - from));
  }
  return lines;
}

int number_in(const std::string& line, const std::string& key) {
  const size_t at = line.find(key);
  return at == std::string::npos ? -1 : std::stoi(line.substr(at + key.size()));
}

}  // namespace

TEST(devices_are_listed) {
  for (const Backend backend : kBackends) {
    const Double driver(backend);
    const auto devices = list_devices(*open_driver(backend, driver.path));
    CHECK(devices.size() == 1 && devices[0].ordinal == 0 && devices[0].total_bytes == 64 << 20);
    CHECK(devices[0].arch == (backend == Backend::Cuda ? "sm_90" : "gfx950"));
    CHECK(devices[0].name == (backend == Backend::Cuda ? "Double C1" : "Double H1"));
    CHECK(devices[0].driver_version == driver.version);
    driver.set_device("", 0);
    CHECK(list_devices(*open_driver(backend, driver.path)).empty());
  }
}

TEST(steps_give_results) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    r.device->seal();
    for (int i = 0; i < 64; ++i) r.input(0)[i] = r.input(1)[i] = 100 + i;
    r.output(1)[5] = -7;
    r.device->wait(r.device->submit(r.graph, {5, 3, 2}, 1));
    for (int i = 0; i < 5; ++i) CHECK(r.output(1)[i] == (100 + i) * 2 + 11);
    CHECK(r.output(1)[5] == -7 && r.output(0)[0] == 0);  // nothing but what the graph writes
    const auto* sizes = reinterpret_cast<const int32_t*>(r.device->host_io()->data() + kStride);
    CHECK(sizes[0] == 5 && sizes[1] == 3 && sizes[2] == 2 && sizes[3] == 0);
    const GpuCounters c = r.device->counters(false), sealed = r.device->counters(true);
    CHECK(c.steps == 1 && c.nodes == 2 && c.graphs_loaded == 1 && c.modules_loaded == 1);
    CHECK(c.graph_instantiations == 2 && c.regions_allocated == 2 && c.bytes_allocated == 4096 + kIoBytes);
    CHECK(sealed.steps == 1 && sealed.graphs_loaded + sealed.modules_loaded + sealed.graph_instantiations == 0);
    CHECK(sealed.regions_allocated == 0 && sealed.refused == 0);
  }
}

TEST(two_steps_are_in_flight) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    r.input(0)[0] = 1;
    r.input(1)[0] = 2;
    const Ticket first = r.device->submit(r.graph, {1, 1, 1}, 0), second = r.device->submit(r.graph, {1, 1, 1}, 1);
    CHECK(first == 1 && second == 2 && r.output(0)[0] == 0 && r.output(1)[0] == 0);  // nothing has run yet
    r.driver.hang(true);
    CHECK(contains(error_of([&] { r.device->submit(r.graph, {1, 1, 1}, 0); }),
                   "io set 0 is in use by step 1: wait for that step, or use another set"));
    r.driver.hang(false);
    r.device->wait(first);
    CHECK(r.output(0)[0] == 13 && r.output(1)[0] == 0);
    r.input(0)[0] = 3;  // while the second is still in flight
    const Ticket third = r.device->submit(r.graph, {1, 1, 1}, 0);
    r.device->wait(third);
    CHECK(r.output(1)[0] == 15 && r.output(0)[0] == 17);
    r.device->wait(second);
    r.device->wait(first);
    CHECK(contains(error_of([&] { r.device->wait(4); }), "ticket 4 was never given out: the last one is 3"));
  }
}

TEST(a_step_is_these_calls) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    r.device->seal();
    const size_t before = r.driver.log().size();
    const Ticket ticket = r.device->submit(r.graph, {1, 1, 1}, 0);
    const Lines calls = lines_from(r.driver.log(), before);
    CHECK(calls.size() == 3 && calls[0] == "context_current");  // all that the driver hears of, in this order
    CHECK(contains(calls[1], "graph_launch exec=") && contains(calls[2], "event_record event="));
    CHECK(number_in(calls[1], "stream=") == number_in(calls[2], "stream="));
    r.device->wait(ticket);
  }
}

namespace {

// "stage": copies the step's sizes and inputs.
void run_stage(void** p) { std::memcpy(*static_cast<void**>(p[1]), *static_cast<void**>(p[0]), kInputBytes); }

// As two_nodes, but with sizes and inputs that a node of its own brings to region io first.
TestGraph staged_nodes() {
  TestGraph graph = two_nodes();
  for (TestNode& node : graph.nodes) {
    node.symbol = 0;
    node.args[2].region = static_cast<uint8_t>(RegionKind::Io);
    for (uint32_t& edge : node.edges) ++edge;
  }
  graph.nodes[0].args[0].region = static_cast<uint8_t>(RegionKind::Io);
  graph.nodes[0].edges = {0};
  const TestArg from = pointer_arg(RegionKind::HostIo, 0, kInputBytes, kAccessRead);
  const TestArg to = pointer_arg(RegionKind::Io, 0, kInputBytes, kAccessWrite);
  graph.nodes.insert(graph.nodes.begin(), TestNode{"inputs", 1, {from, to}, {}});
  graph.symbols.emplace_back("stage");
  return graph;
}

}  // namespace

// Both graphs are queued before either runs: each takes its own set's inputs when its turn comes.
TEST(inputs_of_a_step_pass_through_the_one_region_io) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    r.driver.kernel("stage", run_stage, {8, 8});
    r.device->load_binary("staged", code_object(backend, "add stage"));
    TestGraph graph = staged_nodes();
    graph.binaries = {"staged"};
    const size_t before = r.driver.log().size();
    const int handle = r.device->load_graph(graph.encode(), 0);
    r.device->seal();
    for (int set = 0; set < 2; ++set) r.input(set)[0] = 1 + set;
    const Ticket first = r.device->submit(handle, {1, 1, 1}, 0), second = r.device->submit(handle, {1, 1, 1}, 1);
    const int stream = number_in(r.driver.lines({"graph_launch"}, before)[0], "stream=");
    CHECK(r.driver.work(stream) && r.output(0)[0] == 13 && r.output(1)[0] == 0);
    r.device->wait(first);
    r.input(0)[0] = 5;  // the first set is free, while the second step is still to come
    const Ticket third = r.device->submit(handle, {1, 1, 1}, 0);
    r.device->wait(third);
    CHECK(r.output(1)[0] == 15 && r.output(0)[0] == 21);
    r.device->wait(second);
    const Lines nodes = r.driver.lines({"add_kernel"}, before);
    CHECK(nodes.size() == 6);
    const Lines one = params_of(nodes[0]), other = params_of(nodes[3]);
    CHECK(one[0] != other[0] && one[1] == other[1]);  // of each set the host's memory, and of both the one region io
  }
}

TEST(memory_of_io_is_mapped) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    const Lines registered = r.driver.lines({"host_register"});
    CHECK(registered.size() == 1 && contains(registered[0], " flags=3"));
    CHECK((r.driver.lines({"host_address"}) == Lines{"host_address flags=0"}));
    const Double driver(backend);
    GpuDevice device(backend, 0, GpuOptions{2, 0, driver.path});
    driver.fail("host_address", 1, 1);
    CHECK(contains(error_of([&] { device.allocate_io(64, -1); }), "cannot reach host memory for region host_io: "));
    CHECK(driver.lines({"host_unregister"}).size() == 1);
    device.allocate_io(64, -1);  // nothing of the attempt is left
  }
}

TEST(many_files_are_loaded_by_several_threads) {
  char path[] = "/tmp/tokenspeed-files-XXXXXX";
  const int descriptor = mkstemp(path);
  CHECK(descriptor >= 0);
  for (const Backend backend : kBackends) {
    Ready r(backend);
    // One file with all of it: three code objects, then eight graphs.
    std::vector<std::byte> all(100);
    std::vector<BinaryFile> binaries;
    std::vector<FileRange> graphs;
    const auto append = [&](const std::string& label, const std::vector<std::byte>& bytes) {
      const FileRange range{label, path, all.size(), bytes.size()};
      all.insert(all.end(), bytes.begin(), bytes.end());
      return range;
    };
    for (const char* name : {"a", "b", "c"}) binaries.push_back({name, append(name, code_object(backend, "add"))});
    for (int i = 0; i < 8; ++i) graphs.push_back(append("graph " + std::to_string(i), two_nodes().encode()));
    CHECK(ftruncate(descriptor, 0) == 0 && pwrite(descriptor, all.data(), all.size(), 0) == ssize_t(all.size()));
    load_binaries(*r.device, binaries, 4);
    std::vector<int> handles = load_graphs(*r.device, graphs, 0, 4);
    CHECK(load_graphs(*r.device, {}, 0, 4).empty() && r.device->counters(false).modules_loaded == 4);
    CHECK(handles.size() == 8 && std::set<int>(handles.begin(), handles.end()).size() == 8);
    graphs[5].offset += 1;
    CHECK(contains(error_of([&] { load_graphs(*r.device, graphs, 0, 1); }), "graph 5 cannot be loaded: "));
    graphs[2].nbytes = all.size();
    CHECK(contains(error_of([&] { load_graphs(*r.device, graphs, 0, 4); }), "graph 2 cannot be loaded: it cannot be read"));
    graphs[0].path = "/nonexistent";
    CHECK(contains(error_of([&] { load_graphs(*r.device, graphs, 0, 4); }),
                   "graph 0 cannot be loaded: it cannot be read: No such file"));
    CHECK(throws<DeviceError>([&] { load_binaries(*r.device, binaries, 4); }));  // they are loaded already
    r.device->seal();
    r.input(0)[0] = 6;
    r.device->wait(r.device->submit(handles[7], {1, 1, 1}, 0));
    CHECK(r.output(0)[0] == 23);
  }
  close(descriptor);
  unlink(path);
}

TEST(graphs_are_rebuilt_exactly) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    const bool cuda = backend == Backend::Cuda;
    TestGraph graph = two_nodes(1);
    graph.nodes.push_back(graph.nodes[0]);
    graph.nodes[2].name = "beside";
    graph.nodes.push_back(graph.nodes[1]);
    graph.nodes[3].edges = {1, 2};  // two predecessors: full edges, though the kernel could wait by itself
    graph.nodes[0].launch = {0, {132, 2, 1}, {128, 1, 1}, {1, 1, 1}, 0, 0};
    graph.nodes[2].launch = {0, {64, 4, 2}, {256, 2, 1}, {cuda ? 2u : 1u, 1, 1}, cuda ? 200u << 10 : 1024u, 0};
    const size_t before = r.driver.log().size();
    r.device->load_graph(graph.encode(), 0);
    const Lines nodes = r.driver.lines({"add_kernel", "set_cluster", "graph_instantiate", "graph_destroy"}, before);
    const size_t per_set = cuda ? 7 : 6;
    CHECK(nodes.size() == 2 * per_set);  // once for each io set
    CHECK(contains(nodes[0], "node=0 after=[] programmatic=0 kernel=add grid=132x2x1 block=128x1x1 shared=0 params="));
    CHECK(contains(nodes[1], std::string("node=1 after=[0] programmatic=") + (cuda ? "1" : "0")));
    const std::string shared = cuda ? "204800" : "1024";
    CHECK(contains(nodes[2], "node=2 after=[] programmatic=0 kernel=add grid=64x4x2 block=256x2x1 shared=" + shared));
    const size_t last = cuda ? 4 : 3;
    if (cuda) CHECK(nodes[3] == "set_cluster node=2 cluster=2x1x1");
    CHECK(contains(nodes[last], "node=3 after=[1,2] programmatic=0"));
    CHECK(nodes[last + 1] == "graph_instantiate nodes=4" && contains(nodes[last + 2], "graph_destroy"));
    CHECK(r.driver.lines({"function_set"}) == (cuda ? Lines{"function_set attribute=8 value=204800"} : Lines{}));

    const Lines first = params_of(nodes[0]), second = params_of(nodes[1]), other = params_of(nodes[per_set]);
    CHECK(other[1] == first[1] && other[3] == first[3] && other[4] == first[4]);  // the arena and numbers are shared
    const auto host = reinterpret_cast<uint64_t>(r.device->host_io()->data());    // io sets are not
    CHECK(first[0] == hex_of(host + kIn, 8) && other[0] == hex_of(host + kStride + kIn, 8));
    CHECK(first[2] == hex_of(host, 8) && other[2] == hex_of(host + kStride, 8));
    CHECK(first.size() == 5 && second.size() == 5);
    CHECK(first[1] == second[0] && first[1] != first[0]);                // the place in the arena
    CHECK(first[3] == hex_of(1, 4) && first[4] == hex_of(0x40000000, 4));  // 2.0f
    CHECK(second[3] == hex_of(10, 4) && second[4] == hex_of(0x3f800000, 4));
    if (cuda && kAddressesAreFree) CHECK(first[1] == hex_of((uint64_t{3} << 44) + 512, 8));  // where it was asked to be
  }
}

TEST(regions_lie_at_fixed_addresses) {
  const Double driver(Backend::Cuda);
  GpuDevice device(Backend::Cuda, 0, GpuOptions{1, 0, driver.path});
  device.allocate(RegionKind::Kv, (3 << 20) + 1);
  device.allocate(RegionKind::Arena, 1);
  const Lines calls = driver.lines({"create", "reserve", "map", "set_access"});
  CHECK((calls == Lines{"create bytes=4194304 type=1 location=1:0", "reserve bytes=4194304 hint=200000000000",
                        "map bytes=4194304", "set_access bytes=4194304 flags=3",
                        "create bytes=2097152 type=1 location=1:0", "reserve bytes=2097152 hint=300000000000",
                        "map bytes=2097152", "set_access bytes=2097152 flags=3"}));
  device.seal();
  CHECK((driver.lines({"fill"}) == Lines{"fill bytes=1 value=0"}));  // the arena; KV pages may hold anything
  CHECK(device.memory() == std::pair(uint64_t{64 << 20} - (6 << 20), uint64_t{64 << 20}));
  device.close();
  CHECK((driver.lines({"release", "free_addresses"}).size() == 4));
}

TEST(regions_may_lie_elsewhere) {
  void* taken = mmap(reinterpret_cast<void*>(uint64_t{3} << 44), 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(taken != MAP_FAILED && (!kAddressesAreFree || taken == reinterpret_cast<void*>(uint64_t{3} << 44)));
  Ready r(Backend::Cuda);
  r.input(0)[0] = 4;
  r.device->wait(r.device->submit(r.graph, {1, 1, 1}, 0));
  CHECK(r.output(0)[0] == 19);
  munmap(taken, 4096);
}

namespace {

struct TempFile {
  std::string path = "/tmp/tokenspeed_test_XXXXXX";
  explicit TempFile(const std::vector<std::byte>& contents) {
    const int fd = mkstemp(path.data());
    CHECK(fd >= 0 && write(fd, contents.data(), contents.size()) == static_cast<ssize_t>(contents.size()));
    close(fd);
  }
  ~TempFile() { unlink(path.c_str()); }
};

std::vector<std::byte> counted_bytes(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>((i * 2654435761u) >> 13);
  return bytes;
}

// "compare": out = whether the bytes of the weights are those of the file.
std::vector<std::byte> expected;
void run_compare(void** p) {
  const auto* weights = *static_cast<std::byte**>(p[0]);
  **static_cast<int32_t**>(p[1]) = std::equal(expected.begin(), expected.end(), weights) ? 1 : -1;
}

}  // namespace

TEST(weights_arrive_whole) {
  const auto bytes = counted_bytes((1 << 20) + 12345);
  const TempFile file(bytes);
  for (const Backend backend : kBackends) {
    for (const auto& [threads, piece] : {std::pair{0, 0}, {1, 4096}, {3, 100000}, {5, 1 << 19}}) {
      for (const uint64_t offset : {0, 777}) {
        const Double driver(backend);
        expected.assign(bytes.begin() + static_cast<long>(offset), bytes.end() - 100);
        driver.kernel("compare", run_compare, {8, 8});
        GpuDevice device(backend, 0, GpuOptions{1, 0, driver.path});
        device.load_weights(file.path, offset, expected.size(), {threads, static_cast<uint64_t>(piece)});
        device.allocate_io(64, -1);
        device.load_binary("kernels", code_object(backend, "compare"));
        TestGraph graph{{"compare"},
                        {{"compare",
                          0,
                          {pointer_arg(RegionKind::Weights, 0, expected.size(), kAccessRead),
                           pointer_arg(RegionKind::HostIo, 0, 4, kAccessWrite)},
                          {}}}};
        graph.binaries = {"kernels"};
        const int handle = device.load_graph(graph.encode(), 0);
        device.seal();
        device.wait(device.submit(handle, {1, 1, 1}, 0));
        CHECK(*reinterpret_cast<int32_t*>(device.host_io()->data()) == 1);
        CHECK(driver.lines({"host_register"}).size() == driver.lines({"host_unregister"}).size() + 1);  // io's is left
        CHECK(contains(error_of([&] { device.load_weights(file.path, 0, 8, {}); }), "the device is sealed"));
      }
    }
  }
}

TEST(other_parts_load_beside_the_weights) {
  const TempFile file(counted_bytes(4 << 20));
  for (const Backend backend : kBackends) {
    const Double driver(backend);
    driver.kernel("add", run_add, kAddSizes);
    GpuDevice device(backend, 0, GpuOptions{2, 0, driver.path});
    std::thread weights([&] { device.load_weights(file.path, 0, 4 << 20, {2, 1 << 16}); });
    device.allocate(RegionKind::Arena, 4096);
    device.allocate_io(kIoBytes, 0);
    std::vector<std::thread> loaders;
    for (int i = 0; i < 4; ++i) {
      loaders.emplace_back([&, i] { device.load_binary("other" + std::to_string(i), code_object(backend, "x")); });
    }
    device.load_binary("kernels", code_object(backend, "add"));
    const int graph = device.load_graph(two_nodes().encode(), 0);
    weights.join();
    for (std::thread& loader : loaders) loader.join();
    device.seal();
    device.wait(device.submit(graph, {1, 1, 1}, 0));
    CHECK(device.counters(false).modules_loaded == 5 && device.counters(false).regions_allocated == 3);
    bool named = false;
    for (const auto& [what, start, seconds, thread] : device.spans()) {
      CHECK(start > 0 && seconds >= 0);
      named = named || what == "weights";
    }
    CHECK(named);
  }
}

TEST(several_threads_submit_and_wait) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    r.device->seal();
    std::vector<std::thread> callers;
    std::atomic<int> right{0};
    for (int set = 0; set < 2; ++set) {
      callers.emplace_back([&, set] {
        for (int i = 0; i < 50; ++i) {
          r.input(set)[0] = i;
          r.device->wait(r.device->submit(r.graph, {1, 1, 1}, set));
          right += r.output(set)[0] == 2 * i + 11;
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(right == 100 && r.device->counters(true).steps == 100);
  }
}

TEST(profile_runs_nodes_one_by_one) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    size_t launches = 0;
    for (const int set : {0, 1, 0}) {
      r.input(set)[2] = 6 + set;
      r.output(set)[2] = 0;
      const auto nodes = r.device->profile(r.graph, {3, 1, 1}, set);
      CHECK(nodes.size() == 2 && nodes[0].first == "double" && nodes[1].first == "shift");
      for (const auto& [name, seconds] : nodes) CHECK(seconds > 0.0009 && seconds < 0.0011);  // of the driver for tests
      CHECK(r.output(set)[2] == 23 + 2 * set && r.driver.lines({"launch"}).size() == (launches += 2));
    }
    CHECK(r.driver.lines({"graph_launch"}).empty());
  }
}

// The driver for tests counts a millisecond for each piece of work of a stream: a graph of two kernels is one; nothing
// lies between two graphs.
TEST(steps_are_timed_where_asked_for) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    CHECK(contains(error_of([&] { r.device->step_times(); }), "steps are not timed: call time_steps before seal()"));
    CHECK(contains(error_of([&] { r.device->time_steps(0); }), "the times of 1 to 65536 steps can be kept, but 0"));
    r.device->time_steps(3);
    r.device->seal();
    CHECK(contains(error_of([&] { r.device->time_steps(3); }), "the device is sealed, so it cannot time steps"));
    r.device->wait(r.device->submit(r.graph, {5, 4, 1}, 0));
    const Ticket running = r.device->submit(r.graph, {7, 6, 1}, 1);
    const auto first = r.device->step_times();
    CHECK(first.size() == 1 && first[0].ticket == 1 && first[0].num_tokens == 5 && first[0].num_seqs == 4);
    CHECK(first[0].seconds > 0.0005 && first[0].gap < 0);
    r.device->wait(running);
    const auto second = r.device->step_times();
    CHECK(second.size() == 1 && second[0].num_seqs == 6 && second[0].gap == 0);
    CHECK(second[0].seconds == first[0].seconds && r.device->step_times().empty());
    for (int i = 0; i < 5; ++i) r.device->wait(r.device->submit(r.graph, {1, 1, 1}, 0));
    const auto latest = r.device->step_times();  // two have been overwritten
    CHECK(latest.size() == 3 && latest[0].ticket == 5 && latest[0].gap < 0 && latest[2].gap == 0);
  }
}

TEST(steps_that_nobody_times_have_no_events_for_it) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    r.device->seal();
    r.device->wait(r.device->submit(r.graph, {1, 1, 1}, 0));
    CHECK(r.driver.lines({"event_record"}).size() == 1 && r.driver.lines({"event_elapsed"}).empty());
  }
}

TEST(several_threads_load_graphs) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    std::array<int, 8> handles{};
    std::vector<std::thread> loaders;
    for (int& handle : handles) {
      loaders.emplace_back([&r, &handle] { handle = r.device->load_graph(two_nodes().encode(), 0); });
    }
    for (std::thread& loader : loaders) loader.join();
    std::sort(handles.begin(), handles.end());
    for (int i = 0; i < 8; ++i) CHECK(handles[static_cast<size_t>(i)] == i + 1);
    r.driver.fail("graph_instantiate", 1, 2);
    CHECK(throws<DeviceError>([&] { r.device->load_graph(two_nodes().encode(), 0); }));
    CHECK(contains(error_of([&] { r.device->submit(9, {1, 1, 1}, 0); }), "graph 9 is not loaded"));
    r.device->seal();
    r.input(0)[0] = 6;
    r.device->wait(r.device->submit(handles[7], {1, 1, 1}, 0));
    CHECK(r.output(0)[0] == 23 && r.device->counters(false).graphs_loaded == 9);
  }
}

TEST(memory_of_io_outlives_the_device) {
  for (const Backend backend : kBackends) {
    std::shared_ptr<Region> io;
    Double driver(backend);
    {
      Ready r(backend);
      io = r.device->host_io();
      r.device->submit(r.graph, {1, 1, 1}, 0);
      r.device->close();
      r.device->close();
      CHECK(contains(error_of([&] { r.device->submit(r.graph, {1, 1, 1}, 0); }),
                     "the device is closed: make a new one"));
      r.device->wait(1);
    }
    io->data()[0] = std::byte{7};
    for (const auto& [made, gone] : {std::pair{"event_create", "event_destroy"}, {"stream_create", "stream_destroy"},
                                     {"module_load", "module_unload"}, {"host_register", "host_unregister"},
                                     {"graph_instantiate", "graph_exec_destroy"}, {"graph_create", "graph_destroy"},
                                     {"create", "release"}}) {
      CHECK(driver.lines({made}).size() == driver.lines({gone}).size() && !driver.lines({made}).empty());
    }
  }
}

TEST_MAIN
