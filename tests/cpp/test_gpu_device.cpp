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

std::function<void()> while_running;  // called by the kernel of the test below, once

void run_add_watched(void** p) {
  if (const auto watch = std::exchange(while_running, nullptr)) watch();
  run_add(p);
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
    CHECK(r.output(1)[5] == 0);  // region io is cleared, and all outputs come back
    const auto* sizes = reinterpret_cast<const int32_t*>(r.device->host_io()->data() + kStride);
    CHECK(sizes[0] == 5 && sizes[1] == 3 && sizes[2] == 2 && sizes[3] == 0);
    const GpuCounters c = r.device->counters(false), sealed = r.device->counters(true);
    CHECK(c.steps == 1 && c.nodes == 2 && c.graphs_loaded == 1 && c.modules_loaded == 1);
    CHECK(c.graph_instantiations == 2 && c.regions_allocated == 2 && c.bytes_allocated == 4096 + 2 * kStride);
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
    Lines calls = lines_from(r.driver.log(), before);
    CHECK(calls.size() == 9 && calls[0] == "context_current");  // all that the driver hears of, in this order
    calls.erase(calls.begin());
    const int inputs = number_in(calls[0], "stream="), main = number_in(calls[3], "stream="),
              outputs = number_in(calls[6], "stream="), staged = number_in(calls[1], "event="),
              ran = number_in(calls[4], "event="), done = number_in(calls[7], "event=");
    CHECK((std::set{inputs, main, outputs}.size() == 3 && std::set{staged, ran, done}.size() == 3));
    const auto record = [](int event, int stream) {
      return "event_record event=" + std::to_string(event) + " stream=" + std::to_string(stream);
    };
    const auto wait = [](int stream, int event) {
      return "stream_wait stream=" + std::to_string(stream) + " event=" + std::to_string(event);
    };
    CHECK(contains(calls[0], "copy_to_device bytes=" + std::to_string(kInputBytes) + " stream="));
    CHECK(calls[1] == record(staged, inputs) && calls[2] == wait(main, staged));
    CHECK(contains(calls[3], "graph_launch exec="));
    CHECK(calls[4] == record(ran, main) && calls[5] == wait(outputs, ran));
    CHECK(contains(calls[6], "copy_to_host bytes=256 stream=") && calls[7] == record(done, outputs));
    r.device->wait(ticket);
  }
}

// Each stream is moved by hand, piece by piece: what cannot move has to wait for another.
TEST(copies_run_beside_graphs) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    r.driver.kernel("add", run_add_watched, kAddSizes);
    r.device->seal();
    for (int i = 0; i < 2; ++i) r.input(i)[0] = 1 + i;
    const size_t before = r.driver.log().size();
    const Ticket first = r.device->submit(r.graph, {1, 1, 1}, 0);
    const auto stream_of = [&](const char* entry) { return number_in(r.driver.lines({entry}, before)[0], "stream="); };
    const int inputs = stream_of("copy_to_device"), main = stream_of("graph_launch"),
              outputs = stream_of("copy_to_host");
    const Ticket second = r.device->submit(r.graph, {1, 1, 1}, 1);
    // The input of either set on the device, as the nodes' parameters have it.
    const auto on_device = [&](size_t node) {
      const std::string hex = params_of(r.driver.lines({"add_kernel"})[node])[0];
      uint64_t address = 0;
      for (size_t i = 16; i > 0; i -= 2) address = address << 8 | std::stoul(hex.substr(i - 2, 2), nullptr, 16);
      return reinterpret_cast<const int32_t*>(address);
    };
    const int32_t *x0 = on_device(0), *x1 = on_device(2);
    CHECK(reinterpret_cast<uint64_t>(x1) - reinterpret_cast<uint64_t>(x0) == kStride);

    CHECK(!r.driver.work(main) && !r.driver.work(outputs) && x0[0] == 0);  // no graph before its inputs
    CHECK(r.driver.work(inputs) && x0[0] == 1 && x1[0] == 0);
    CHECK(r.driver.work(main) && !r.driver.work(outputs));
    bool copied = false;
    while_running = [&] { copied = r.driver.work(inputs) && x0[0] == 1 && x1[0] == 2; };
    CHECK(r.driver.work(main) && copied);  // the second step's inputs came while the first one's graph ran
    CHECK(r.output(0)[0] == 0);
    CHECK(r.driver.work(main));
    copied = false;
    while_running = [&] { copied = r.driver.work(outputs) && r.driver.work(outputs) && r.output(0)[0] == 13; };
    CHECK(r.driver.work(main) && copied);  // and its outputs went while the second one's did
    CHECK(r.output(1)[0] == 0);
    r.device->wait(first);
    r.input(0)[0] = 3;  // the first set is free, though the second step's outputs are still to come
    const Ticket third = r.device->submit(r.graph, {1, 1, 1}, 0);
    CHECK(r.driver.work(inputs) && x0[0] == 3 && x1[0] == 2 && r.output(1)[0] == 0);
    r.device->wait(second);
    CHECK(r.output(1)[0] == 15 && r.output(0)[0] == 13);
    r.device->wait(third);
    CHECK(r.output(0)[0] == 17 && r.output(1)[0] == 15);
  }
}

TEST(a_step_copies_what_its_own_counts_say) {
  for (const Backend backend : kBackends) {
    const Double driver(backend);
    GpuDevice device(backend, 0, GpuOptions{2, 0, driver.path});
    driver.kernel("nothing", nullptr, {});
    device.load_binary("kernels", code_object(backend, "nothing"));
    constexpr uint64_t kMiB = 1 << 20;
    device.allocate_io(4 * kMiB, 5 * kMiB, 0);
    TestGraph graph{{"nothing"}, {{"n", 0, {}, {}}}};
    graph.binaries = {"kernels"};
    const int handle = device.load_graph(graph.encode(), 0);
    device.bind_io({{0, 32, -1, 1}, {kMiB, 8, 4, 0}, {3 * kMiB, 512, 5, 0}}, {});
    device.seal();
    const auto copies = [&](int set, int32_t biases, int32_t masks) {
      std::byte* host = device.host_io()->data() + (set == 0 ? 0 : (5 * kMiB + 4095) / 4096 * 4096);
      const std::array<int32_t, 8> counts = {-1, -1, -1, 7, biases, masks, 0, 0};
      std::memcpy(host, counts.data(), sizeof(counts));
      const size_t before = driver.log().size();
      device.wait(device.submit(handle, {10, 2, 3}, set));
      CHECK(std::memcmp(host, std::array<int32_t, 4>{10, 2, 3, 7}.data(), 16) == 0);
      Lines bytes;
      for (const std::string& line : driver.lines({"copy_to_device"}, before)) {
        bytes.push_back(line.substr(0, line.find(" stream")));
      }
      return bytes;
    };
    CHECK((copies(0, 0, 0) == Lines{"copy_to_device bytes=32"}));
    CHECK((copies(1, 3, 0) == Lines{"copy_to_device bytes=32", "copy_to_device bytes=24"}));
    CHECK((copies(0, 1, 2) == Lines{"copy_to_device bytes=32", "copy_to_device bytes=8", "copy_to_device bytes=1024"}));
    for (const int32_t beyond : {1 << 20, -1}) {
      CHECK(contains(error_of([&] { copies(0, beyond, 0); }), "x 8 bytes at offset 1048576 of region io, which is not"));
    }
  }
}

TEST(a_step_copies_what_it_uses) {
  for (const Backend backend : kBackends) {
    const Double driver(backend);
    GpuDevice device(backend, 0, GpuOptions{1, 0, driver.path});
    driver.kernel("nothing", nullptr, {});
    device.load_binary("kernels", code_object(backend, "nothing"));
    constexpr uint64_t kMiB = 1 << 20;
    device.allocate_io(4 * kMiB, 5 * kMiB, 0);
    TestGraph graph{{"nothing"}, {{"n", 0, {}, {}}}};
    graph.binaries = {"kernels"};
    const int handle = device.load_graph(graph.encode(), 0);
    // Sizes, tokens, one per sequence and one more far behind, rows; two outputs of 8 bytes per row.
    device.bind_io({{0, 16, -1, 1}, {64, 4, 0, 0}, {kMiB, 512, 1, 1}, {3 * kMiB, 4, 2, 0}},
                   {{4 * kMiB, 8, 2, 0}, {4 * kMiB + 4096, 8, 2, 0}});
    device.seal();
    const auto copies = [&](StepSizes sizes) {
      const size_t before = driver.log().size();
      device.wait(device.submit(handle, sizes, 0));
      Lines bytes;
      for (const std::string& line : driver.lines({"copy_to_device", "copy_to_host"}, before)) {
        bytes.push_back(line.substr(0, line.find(" stream")));
      }
      return bytes;
    };
    CHECK((copies({10, 2, 3}) == Lines{"copy_to_device bytes=104", "copy_to_device bytes=1536",
                                       "copy_to_device bytes=12", "copy_to_host bytes=4120"}));
    CHECK((copies({0, 0, 0}) == Lines{"copy_to_device bytes=16", "copy_to_device bytes=512"}));
    CHECK(contains(error_of([&] { device.submit(handle, {1, 100000, 1}, 0); }),
                   "a step uses 100001 x 512 bytes at offset 1048576 of region io, which is not within [0, 4194304)"));
    CHECK((copies({1, 1, 1}) == Lines{"copy_to_device bytes=68", "copy_to_device bytes=1024", "copy_to_device bytes=4",
                                      "copy_to_host bytes=4104"}));
  }
}

TEST(rows_of_a_page_table_are_copied_as_far_as_they_are_used) {
  for (const Backend backend : kBackends) {
    const Double driver(backend);
    GpuDevice device(backend, 0, GpuOptions{1, 0, driver.path});
    driver.kernel("nothing", nullptr, {});
    device.load_binary("kernels", code_object(backend, "nothing"));
    constexpr uint64_t kMiB = 1 << 20, kLens = 4096, kRow = 512, kTable = kMiB;
    device.allocate_io(2 * kMiB, 3 * kMiB, 0);
    TestGraph graph{{"nothing"}, {{"n", 0, {}, {}}}};
    graph.binaries = {"kernels"};
    const int handle = device.load_graph(graph.encode(), 0);
    device.bind_io({{0, 16, -1, 1}, {kLens, 4, 1, 0}, {kTable, kRow, 1, 0}}, {{2 * kMiB, 8, 2, 0}});
    for (const PageTable& wrong : {PageTable{2 * kMiB, kRow, kLens, 64}, PageTable{kTable, kRow, kLens + 2, 64},
                                   PageTable{kTable, 0, kLens, 64}, PageTable{kTable, kRow, kLens, 0}}) {
      CHECK(contains(error_of([&] { device.bind_page_table(wrong); }), "a page table needs offsets within the 2097152"));
    }
    device.bind_page_table({kTable, kRow, kLens, 64});
    device.seal();
    auto* lens = reinterpret_cast<int32_t*>(device.host_io()->data() + kLens);
    const auto copies = [&](int64_t seqs, int32_t longest) {
      std::fill_n(lens, 300, 1);
      lens[seqs - 1] = longest;
      lens[seqs] = 1 << 30;  // belongs to no sequence of the step
      const size_t before = driver.log().size();
      device.wait(device.submit(handle, {seqs, seqs, 0}, 0));
      Lines lines;
      for (const std::string& line : driver.lines({"copy_to_device", "copy_rows"}, before)) {
        lines.push_back(line.substr(0, line.find(" stream")));
      }
      return lines;
    };
    const Lines few = {"copy_to_device bytes=4608", "copy_to_device bytes=65536"};  // 128 rows whole: 64 KiB
    CHECK(copies(128, 64) == few);
    CHECK((copies(129, 1024) == Lines{"copy_rows pitch=512 width=64 rows=129", "copy_to_device bytes=4612"}));
    CHECK((copies(200, 1025) == Lines{"copy_rows pitch=512 width=128 rows=200", "copy_to_device bytes=4896"}));
    CHECK((copies(200, -7) == Lines{"copy_rows pitch=512 width=64 rows=200", "copy_to_device bytes=4896"}));
    const Lines whole = {"copy_to_device bytes=4896", "copy_to_device bytes=102400"};  // as long as rows are
    CHECK(copies(200, 64 * 128) == whole);
    CHECK(contains(error_of([&] { device.submit(handle, {1, 100000, 0}, 0); }), "is not within [0, 2097152)"));
    driver.fail("copy_rows", 1, 1);
    CHECK(contains(error_of([&] { copies(200, 64); }), "cannot copy a step's page table"));
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

TEST(copied_rows_arrive_where_they_belong) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    std::vector<int32_t> from(4 * 16), to(4 * 16, -1);
    for (int i = 0; i < 64; ++i) from[static_cast<size_t>(i)] = i;
    const auto driver = open_driver(backend, r.driver.path);
    Handle stream = nullptr;
    CHECK(driver->call.stream_create(&stream, 0) == 0);
    CHECK(driver->copy_rows_to_device(reinterpret_cast<Address>(to.data()), from.data(), 64, 8, 3, stream) == 0);
    CHECK(driver->call.stream_synchronize(stream) == 0 && driver->call.stream_destroy(stream) == 0);
    CHECK(to[33] == 33 && to[0] == 0 && to[1] == 1 && to[2] == -1);
    CHECK(to[16] == 16 && to[17] == 17 && to[18] == -1 && to[32] == 32 && to[48] == -1);
  }
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
    CHECK(other[0] != first[0] && other[2] != first[2]);                          // tensors of region io are not
    if (cuda && kAddressesAreFree) CHECK(other[2] == hex_of((uint64_t{4} << 44) + kStride, 8));
    CHECK(first.size() == 5 && second.size() == 5);
    CHECK(first[1] == second[0] && first[1] != first[0]);                // the place in the arena
    CHECK(first[3] == hex_of(1, 4) && first[4] == hex_of(0x40000000, 4));  // 2.0f
    CHECK(second[3] == hex_of(10, 4) && second[4] == hex_of(0x3f800000, 4));
    if (cuda && kAddressesAreFree) CHECK(first[2] == hex_of(uint64_t{4} << 44, 8));  // region io lies where it was asked to
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
        device.allocate_io(0, 64, -1);
        device.load_binary("kernels", code_object(backend, "compare"));
        TestGraph graph{{"compare"},
                        {{"compare",
                          0,
                          {pointer_arg(RegionKind::Weights, 0, expected.size(), kAccessRead),
                           pointer_arg(RegionKind::Io, 0, 4, kAccessWrite)},
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
    device.allocate_io(kInputBytes, kIoBytes, 0);
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

// The driver for tests counts a millisecond for each piece of work of a stream: a graph of two kernels is one; between
// two graphs lies the wait for inputs, and no copy.
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
    CHECK(second.size() == 1 && second[0].num_seqs == 6 && second[0].gap > 0.0009 && second[0].gap < 0.0011);
    CHECK(second[0].seconds == first[0].seconds && r.device->step_times().empty());
    for (int i = 0; i < 5; ++i) r.device->wait(r.device->submit(r.graph, {1, 1, 1}, 0));
    const auto latest = r.device->step_times();  // two have been overwritten
    CHECK(latest.size() == 3 && latest[0].ticket == 5 && latest[0].gap < 0 && latest[2].gap > 0.0009);
  }
}

TEST(steps_that_nobody_times_have_no_events_for_it) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    r.device->seal();
    r.device->wait(r.device->submit(r.graph, {1, 1, 1}, 0));
    CHECK(r.driver.lines({"event_record"}).size() == 3 && r.driver.lines({"event_elapsed"}).empty());
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
