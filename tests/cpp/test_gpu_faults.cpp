// What the GPU device refuses and survives: wrong calls, hostile graphs, damaged code objects, drivers that fail.
#include <algorithm>
#include <thread>

#include "gpu_fixture.h"

using namespace tokenspeed::device;
using namespace tokenspeed::device::gpu;

namespace {

GpuOptions options_of(const Double& driver) { return {2, 0, driver.path, 10}; }

// The error of loading `graph` into a device that is ready.
std::string graph_error(Backend backend, const TestGraph& graph, uint64_t kv_page_stride = 0) {
  Ready r(backend);
  const auto bytes = graph.encode();
  CHECK(throws<GraphError>([&] { r.device->load_graph(bytes, kv_page_stride); }));
  return error_of([&] { r.device->load_graph(bytes, kv_page_stride); });
}

}  // namespace

TEST(missing_drivers_say_what_to_install) {
  CHECK(contains(error_of([] { GpuDevice(Backend::Cuda, 0, {1, 0, "/nonexistent/libcuda.so.1"}); }),
                 "no NVIDIA driver is installed: need libcuda.so.1, have none (/nonexistent/libcuda.so.1: "));
  CHECK(contains(error_of([] { GpuDevice(Backend::Hip, 0, {1, 0, "/nonexistent/x.so"}); }),
                 "install AMD's driver and the ROCm package hip-runtime-amd, 6.0 or newer"));
  const Double hip(Backend::Hip);
  CHECK(contains(error_of([&] { GpuDevice(Backend::Cuda, 0, options_of(hip)); }),
                 "has no entry point cuInit: the driver is too old; install a newer one"));
  CHECK(contains(error_of([] { backend_by_name("metal"); }), "no GPU backend is called 'metal': use cuda or hip"));
}

TEST(drivers_that_do_not_start_say_why) {
  for (const Backend backend : kBackends) {
    Double driver(backend);
    driver.fail("init", 1, 999);
    CHECK(contains(error_of([&] { open_driver(backend, driver.path); }), " does not start: "));
    Double fresh(backend);
    fresh.fail("init", 1, status::kNoDevice);
    CHECK(contains(error_of([&] { open_driver(backend, fresh.path); }), " finds no GPU ("));
    CHECK(contains(error_of([&] { GpuDevice(backend, 1, options_of(fresh)); }),
                   std::string("no ") + backend_name(backend) + " device has number 1: there is 1, number 0"));
    fresh.set_device("", 0);
    CHECK(contains(error_of([&] { GpuDevice(backend, 0, options_of(fresh)); }), "there is none"));
    CHECK(contains(error_of([&] { GpuDevice(backend, 0, {0, 0, fresh.path}); }), "needs 1 to 64 io sets, but 0"));
  }
}

TEST(old_drivers_are_refused) {
  Double cuda(Backend::Cuda);
  CHECK(contains(error_of([&] { GpuDevice(Backend::Cuda, 0, {1, 13010, cuda.path}); }),
                 "the driver is too old: need CUDA 13.1 or newer, but it offers CUDA 13.0: install a newer driver"));
  Double hip(Backend::Hip);
  CHECK(contains(error_of([&] { GpuDevice(Backend::Hip, 0, {1, 70100000, hip.path}); }),
                 "need HIP 7.1 or newer, but it offers HIP 7.0"));
}

TEST(short_memory_says_by_how_much) {
  for (const Backend backend : kBackends) {
    const Double driver(backend, 64 << 20);
    GpuDevice device(backend, 0, options_of(driver));
    const std::string kv = error_of([&] { device.allocate(RegionKind::Kv, 100 << 20); });
    CHECK(contains(kv,
                   "kv needs 104857600 bytes of GPU memory, but 67108864 of 67108864 are free, 37748736 too few: "));
    CHECK(contains(kv, "lower --kv-gib or max_num_seqs, or end other processes that use the GPU"));
    driver.fail("create", 1, status::kOutOfMemory);
    CHECK(contains(error_of([&] { device.allocate(RegionKind::Arena, 4096); }),
                   "are free, not all of it in whole pages"));
    CHECK(contains(error_of([&] { device.allocate(RegionKind::Arena, 0); }), "region arena needs at least 1 byte"));
    CHECK(device.counters(false).regions_allocated == 0);
    device.allocate(RegionKind::Kv, 4 << 20);  // a refusal leaves the region free
    device.allocate(RegionKind::Arena, 4096);
    driver.fail("host_register", 1, 1);
    CHECK(contains(error_of([&] { device.allocate_io(128, -1); }),
                   "cannot pin 8192 bytes of host memory for region host_io"));
    device.allocate_io(128, -1);
  }
}

TEST(failures_half_way_leave_nothing_behind) {
  for (const char* step : {"reserve", "map", "set_access"}) {
    const Double driver(Backend::Cuda);
    GpuDevice device(Backend::Cuda, 0, options_of(driver));
    driver.fail(step, 1, 1);
    CHECK(contains(error_of([&] { device.allocate(RegionKind::Arena, 4096); }),
                   "the device Double C1 cannot allocate region arena of 4096 bytes: CUDA error (1): "));
    CHECK(device.memory().first == 64 << 20);
    device.allocate(RegionKind::Arena, 4096);
    device.close();
    CHECK(driver.lines({"reserve"}).size() == driver.lines({"free_addresses"}).size() + (step[0] == 'r'));
  }
  for (const char* step : {"graph_create", "add_kernel", "graph_instantiate", "graph_upload", "module_function"}) {
    for (const Backend backend : kBackends) {
      if (backend == Backend::Hip && step == std::string("graph_upload")) continue;  // this driver has none
      Ready r(backend);
      r.driver.fail(step, 1, 801);
      const bool cached = step == std::string("module_function");
      const std::string error = error_of([&] { r.device->load_graph(two_nodes().encode(), 0); });
      CHECK(cached ? error.empty() : contains(error, "the device Double"));
      r.device->close();
      CHECK(r.driver.lines({"graph_create"}).size() - (step == std::string("graph_create")) ==
            r.driver.lines({"graph_destroy"}).size());
    }
  }
}

TEST(a_graph_of_one_set_fails_with_that_of_another) {
  for (const Backend backend : kBackends) {
    for (const char* step : {"graph_create", "add_kernel", "graph_instantiate"}) {
      Ready r(backend);
      r.driver.fail(step, step == std::string("add_kernel") ? 3 : 2, 801);
      CHECK(contains(error_of([&] { r.device->load_graph(two_nodes().encode(), 0); }), "the device Double"));
      CHECK(contains(error_of([&] { r.device->submit(1, {1, 1, 1}, 0); }), "graph 1 is not loaded"));
      r.device->close();
      const size_t made = r.driver.lines({"graph_instantiate"}).size() - (step == std::string("graph_instantiate"));
      CHECK(made == 3 && r.driver.lines({"graph_exec_destroy"}).size() == made);
    }
  }
}

// A step that started, but whose end nobody can ask for, uses its io set to its end.
TEST(a_step_that_cannot_be_followed_ends_first) {
  for (const Backend backend : kBackends) {
    Ready r(backend, 64 << 20, 0.05);
    r.device->seal();
    r.input(0)[0] = 1;
    r.driver.fail("event_record", 1, 801);
    CHECK(contains(error_of([&] { r.device->submit(r.graph, {1, 1, 1}, 0); }), "(801)"));
    const std::string launch = r.driver.lines({"graph_launch"}).back();
    CHECK(!r.driver.work(std::stoi(launch.substr(launch.find("stream=") + 7))));  // nothing is left to do
    r.input(0)[0] = 2;
    r.device->wait(r.device->submit(r.graph, {1, 1, 1}, 0));
    CHECK(r.output(0)[0] == 15 && r.device->counters(true).steps == 1);
    r.driver.fail("event_record", 1, 801);
    r.driver.hang(true);
    const double start = Timeline::now();
    CHECK(contains(error_of([&] { r.device->submit(r.graph, {1, 1, 1}, 1); }), "(801)"));
    CHECK(Timeline::now() - start < 2);  // nor does it wait for ever
    r.driver.hang(false);
  }
}

// An io set ends where its tensors do, not where the next one begins.
TEST(pointers_stay_within_an_io_set) {
  for (const Backend backend : kBackends) {
    TestGraph graph = two_nodes();
    graph.nodes[1].args[1].value = kIoBytes - 252;
    CHECK(contains(graph_error(backend, graph),
                   "argument 1 needs 256 bytes at offset 324 of region host_io, which has 576"));
    graph.nodes[1].args[1].region = static_cast<uint8_t>(RegionKind::Io);
    CHECK(contains(graph_error(backend, graph), "argument 1 needs 256 bytes at offset 324 of region io, which has 576"));
  }
}

TEST(graphs_need_the_io_set_that_they_point_into) {
  for (const Backend backend : kBackends) {
    const Double driver(backend);
    GpuDevice device(backend, 0, options_of(driver));
    driver.kernel("add", run_add, kAddSizes);
    device.load_binary("kernels", code_object(backend, "add"));
    CHECK(contains(error_of([&] { device.load_graph(two_nodes().encode(), 0); }),
                   "argument 0 points into region host_io, which is not allocated: allocate it first"));
  }
}

TEST(code_objects_are_checked) {
  for (const Backend backend : kBackends) {
    const Double driver(backend);
    GpuDevice device(backend, 0, options_of(driver));
    auto good = code_object(backend, "add");
    const auto load = [&](std::span<const std::byte> bytes) {
      CHECK(throws<GraphError>([&] { device.load_binary("norm", bytes); }));
      return error_of([&] { device.load_binary("norm", bytes); });
    };
    const std::string need = std::string("the code object norm is damaged: need ") + backend_name(backend) +
                             " machine code for " + device.info().arch + ", but it ";
    for (size_t size = 0; size < good.size(); ++size) {  // never reads past what there is, and never passes
      CHECK(contains(load({good.data(), size}), need));
    }
    CHECK(contains(load({good.data(), good.size() - 1}), "is cut short: copy or build the artifact again"));
    const std::string text = ".version 8.0\n.target sm_90\n" + std::string(100, ' ');
    CHECK(contains(load({reinterpret_cast<const std::byte*>(text.data()), text.size()}), "is no ELF file"));
    const auto other = code_object(backend == Backend::Cuda ? Backend::Hip : Backend::Cuda, "add");
    CHECK(contains(load(other), "holds code for another kind of processor"));
    for (const size_t field : {size_t{0x28}, size_t{0x3c}, size_t{64 + 0x18}, size_t{64 + 0x20}}) {  // of the tables
      auto bad = good;
      bad[field] = bad[field + 1] = std::byte{0xff};
      CHECK(contains(load(bad), "is cut short"));
    }
    CHECK(driver.lines({"module_load"}).empty());  // the driver saw none of these
    driver.fail("module_load", 1, status::kNoBinaryForGpu);
    CHECK(contains(error_of([&] { device.load_binary("norm", good); }),
                   "the code object norm was built for another GPU: need code for " + device.info().arch));
    driver.fail("module_load", 1, status::kInvalidImage);
    CHECK(contains(error_of([&] { device.load_binary("norm", good); }), "is damaged: the driver does not accept it"));
    device.load_binary("norm", good);
    CHECK(contains(error_of([&] { device.load_binary("norm", good); }), "the code object 'norm' is loaded already"));
    CHECK(device.counters(false).modules_loaded == 1);
  }
}

TEST(hostile_graphs_are_refused) {
  for (const Backend backend : kBackends) {
    const auto changed = [&](const std::function<void(TestGraph&)>& change) {
      TestGraph graph = two_nodes();
      change(graph);
      return graph_error(backend, graph, 1000);
    };
    const std::string node = "launch graph node 1 ('shift', kernel add): ";
    CHECK(contains(changed([](TestGraph& g) { g.binaries = {"others"}; }),
                   "needs the code object 'others', which is not loaded: load it first"));
    CHECK(contains(changed([](TestGraph& g) { g.symbols = {"unknown"}; }),
                   "the code object 'kernels' has no such kernel"));
    if (backend == Backend::Cuda) {  // HIP does not tell a kernel's parameters: `tokenspeed verify` reads its file
      CHECK(contains(changed([](TestGraph& g) { g.nodes[1].args.pop_back(); }),
                     node + "the kernel takes 5 parameters, but the node has 4 arguments"));
      CHECK(contains(changed([](TestGraph& g) { g.nodes[1].args[3].size = 8; }),
                     node + "argument 3 has 8 bytes, but the kernel's parameter has 4"));
    }
    CHECK(contains(changed([](TestGraph& g) { g.nodes[1].args[0] = scalar_arg(0); }),
                   node + "argument 0 is a step scalar: on a GPU, kernels read the step's sizes from memory"));
    CHECK(contains(changed([](TestGraph& g) { g.nodes[1].args[0].value = 4096 - 252; }),
                   node + "argument 0 needs 256 bytes at offset 3844 of region arena, which has 4096"));
    CHECK(contains(changed([](TestGraph& g) { g.nodes[1].args[0].value = uint64_t{1} << 62; }), "of region arena"));
    CHECK(contains(changed([](TestGraph& g) { g.nodes[1].args[0].region = 1; }),
                   "points into region kv, which is not allocated: allocate it first"));
    CHECK(contains(changed([](TestGraph& g) { g.nodes[1].launch.block[1] = 64; }),
                   node + "has thread blocks of 32 x 64 x 1 threads; 1024 are possible"));
    CHECK(contains(changed([](TestGraph& g) { g.nodes[1].launch.block[2] = 0xffffffff; }), "1024 are possible"));
    CHECK(contains(changed([](TestGraph& g) { g.nodes[1].launch.grid[1] = 65536; }),
                   "1 x 65536 x 1 thread blocks, which"));
    CHECK(contains(changed([](TestGraph& g) { g.nodes[1].launch.shared_bytes = 1 << 20; }),
                   "needs 1048576 bytes of shared memory per thread block, but Double"));
    CHECK(contains(changed([](TestGraph& g) { g.nodes[1].launch.cluster[0] = 2; }),
                   "that divide the grid of 1 x 1 x 1"));
    CHECK(contains(changed([](TestGraph& g) { g.binaries.clear(); }),
                   "is for a CPU: need a graph built for a GPU target"));
    Ready r(backend);
    CHECK(contains(error_of([&] { r.device->load_graph({}, 0); }), "the launch graph is damaged"));
  }
}

TEST(pointers_stay_within_a_page_and_weights_are_read_only) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    r.device->allocate(RegionKind::Kv, 8192);
    TestGraph graph = two_nodes();
    graph.nodes[1].args[0].region = 1;
    CHECK(contains(error_of([&] { r.device->load_graph(graph.encode(), 700); }),
                   "needs 256 bytes at offset 512 of a page of region kv, which has 700"));
    r.device->load_graph(graph.encode(), 768);
    r.device->load_weights("/proc/self/exe", 0, 4096, {});
    graph.nodes[0].args[1].region = 0;
    CHECK(contains(error_of([&] { r.device->load_graph(graph.encode(), 768); }),
                   "argument 1 writes to region weights"));
  }
}

TEST(a_sealed_device_takes_steps_and_nothing_else) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    r.device->seal();
    const size_t before = r.driver.log().size();
    const auto refused = [&](const std::string& what, const std::function<void()>& body) {
      CHECK(contains(error_of(body), "the device is sealed, so it cannot " + what + ": do so before seal()"));
    };
    refused("allocate region kv", [&] { r.device->allocate(RegionKind::Kv, 4096); });
    refused("allocate region io", [&] { r.device->allocate_io(64, -1); });
    refused("load weights", [&] { r.device->load_weights("/proc/self/exe", 0, 1, {}); });
    refused("load a code object", [&] { r.device->load_binary("x", code_object(backend, "x")); });
    refused("load a launch graph", [&] { r.device->load_graph(two_nodes().encode(), 0); });
    CHECK(r.driver.log().size() == before);  // the driver heard of none of it
    r.device->wait(r.device->submit(r.graph, {1, 1, 1}, 0));
    const GpuCounters c = r.device->counters(true);
    CHECK(c.refused == 5 && c.steps == 1 && c.regions_allocated == 0 && c.bytes_allocated == 0);
    CHECK(c.graphs_loaded == 0 && c.modules_loaded == 0 && c.graph_instantiations == 0);
  }
}

TEST(wrong_calls_say_what_is_wrong) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    const auto refused = [&](const std::string& text, const std::function<void()>& body) {
      CHECK(contains(error_of(body), text));
    };
    refused("graph 1 is not loaded: this device has 1 graphs", [&] { r.device->submit(1, {1, 1, 1}, 0); });
    refused("has 1 tokens, -1 sequences", [&] { r.device->submit(0, {1, -1, 1}, 0); });
    refused("io set 2 does not exist: this device has 2 sets", [&] { r.device->submit(0, {1, 1, 1}, 2); });
    refused("io set -1 does not exist", [&] { r.device->profile(0, {1, 1, 1}, -1); });
    refused("region io is allocated already with 576", [&] { r.device->allocate_io(64, -1); });
    for (const RegionKind kind : {RegionKind::Io, RegionKind::HostIo}) {
      refused("regions io and host_io are allocated together: use allocate_io", [&] { r.device->allocate(kind, 64); });
    }
    refused("region weights is filled from a file", [&] { r.device->allocate(RegionKind::Weights, 64); });
    refused("cannot open the weights file /nonexistent: No such",
            [&] { r.device->load_weights("/nonexistent", 0, 1, {}); });
    refused("the weights need 8 bytes at offset 99999999999",
            [&] { r.device->load_weights("/proc/self/exe", 99999999999, 8, {}); });
    refused(": Is a directory", [&] { r.device->load_weights("/tmp", 0, 8, {}); });
    const Double driver(backend);
    GpuDevice device(backend, 0, options_of(driver));
    for (const int64_t at : {34, 36, 68}) {
      refused("step_sizes_offset is " + std::to_string(at) + " of 64", [&] { device.allocate_io(64, at); });
    }
    refused("region io is not allocated", [&] { device.host_io(); });
  }
}

TEST(weights_that_cannot_be_read_leave_the_region_free) {
  for (const Backend backend : kBackends) {
    const Double driver(backend);
    GpuDevice device(backend, 0, options_of(driver));
    driver.fail("copy_to_device", 3, 1);
    CHECK(contains(error_of([&] { device.load_weights("/proc/self/exe", 0, 65536, {2, 4096}); }),
                   "cannot copy weights to the device: "));
    CHECK(device.memory().first == 64 << 20);
    device.load_weights("/proc/self/exe", 0, 65536, {2, 4096});
    CHECK(contains(error_of([&] { device.load_weights("/proc/self/exe", 0, 8, {}); }),
                   "region weights is allocated already with 65536 bytes"));
  }
}

TEST(a_lost_device_says_so_from_then_on) {
  for (const Backend backend : kBackends) {
    for (const char* entry : {"event_query", "event_synchronize", "graph_launch", "event_record"}) {
      Ready r(backend);
      r.device->seal();
      r.driver.hang(entry == std::string("event_synchronize"));  // else a query finds the step done
      r.driver.fail(entry, 1, status::kLaunchFailed);
      const auto step = [&] { r.device->wait(r.device->submit(r.graph, {1, 1, 1}, 0)); };
      CHECK(throws<DeviceLostError>(step));
      const std::string text = error_of(step);
      CHECK(contains(text, " is lost: it could not ") && contains(text, "(719)") && contains(text,
                     "restart the process"));
      for (const std::function<void()>& call :
           {std::function<void()>([&] { r.device->submit(r.graph, {1, 1, 1}, 1); }), {[&] { r.device->wait(1); }},
            {[&] { r.device->profile(r.graph, {1, 1, 1}, 1); }}, {[&] { r.device->memory(); }},
            {[&] { r.device->seal(); }}, {[&] { r.device->host_io(); }},
            {[&] { r.device->allocate(RegionKind::Kv, 4096); }}}) {
        CHECK(throws<DeviceLostError>(call) && error_of(call) == text);
      }
      const double start = Timeline::now();
      r.device->close();
      CHECK(Timeline::now() - start < 2);
    }
  }
}

TEST(a_loss_wakes_who_waits) {
  for (const Backend backend : kBackends) {
    Ready r(backend);
    const Ticket ticket = r.device->submit(r.graph, {1, 1, 1}, 0);
    r.driver.hang(true);
    bool lost = false;
    std::thread waiter([&] { lost = throws<DeviceLostError>([&] { r.device->wait(ticket); }); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    r.driver.fail("graph_launch", 1, status::kIllegalAddress);
    CHECK(throws<DeviceLostError>([&] { r.device->submit(r.graph, {1, 1, 1}, 1); }));
    waiter.join();
    CHECK(lost);
  }
}

TEST(closing_does_not_hang_with_a_step_that_does) {
  for (const Backend backend : kBackends) {
    Ready r(backend, 64 << 20, 0.05);
    r.device->submit(r.graph, {1, 1, 1}, 0);
    r.driver.hang(true);
    const double start = Timeline::now();
    r.device->close();
    CHECK(Timeline::now() - start < 2);
    CHECK(r.driver.lines({"graph_exec_destroy", "release", "host_unregister"}).empty());  // it may still be using them
    r.driver.hang(false);
  }
}

TEST_MAIN
