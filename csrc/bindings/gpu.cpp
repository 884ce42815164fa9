// Python's view of the GPU devices. The GIL is released wherever a call may take longer than microseconds.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/page_moves.h"
#include "bindings/region_access.h"
#include "bindings/region_buffer.h"
#include "device/gpu/gpu_device.h"
#include "device/gpu/gpu_files.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace tokenspeed::device;
using namespace tokenspeed::device::gpu;

void make_device(GpuDevice* self, std::string_view backend, int ordinal, int io_sets, int min_driver_version,
                 std::string library, double spin_seconds) {
  const Backend kind = backend_by_name(backend);
  GpuOptions options{io_sets, min_driver_version, std::move(library)};
  options.spin_seconds = spin_seconds;
  const nb::gil_scoped_release release;
  new (self) GpuDevice(kind, ordinal, options);
}

// Keeps a device's context open, so that a GpuDevice finds it so.
class GpuContext {
 public:
  GpuContext(std::string_view backend, int ordinal, const std::string& library) {
    const Backend kind = backend_by_name(backend);
    const nb::gil_scoped_release release;
    context_ = std::make_shared<Context>(open_driver(kind, library), ordinal);
  }
  void close() { context_.reset(); }

 private:
  std::shared_ptr<const Context> context_;
};

nb::list step_times(GpuDevice& device) {
  nb::list list;
  for (const StepTime& t : device.step_times()) {
    const nb::object gap = t.gap < 0 ? nb::none() : nb::cast(t.gap);
    list.append(nb::make_tuple(t.ticket, t.num_tokens, t.num_seqs, t.seconds, gap));
  }
  return list;
}

std::span<const std::byte> span_of(const nb::bytes& data) {
  return {reinterpret_cast<const std::byte*>(data.c_str()), data.size()};
}

void load_binary(GpuDevice& device, const std::string& name, const nb::bytes& data) {
  const auto bytes = span_of(data);
  const nb::gil_scoped_release release;
  device.load_binary(name, bytes);
}

int load_graph(GpuDevice& device, const nb::bytes& data, uint64_t kv_page_stride) {
  const auto bytes = span_of(data);
  const nb::gil_scoped_release release;
  return device.load_graph(bytes, kv_page_stride);
}

using BinaryTuple = std::tuple<std::string, std::string, std::string, uint64_t, uint64_t>;
using FileTuple = std::tuple<std::string, std::string, uint64_t, uint64_t>;

std::tuple<std::vector<int>, double, double> load_files(GpuDevice& device, const std::vector<BinaryTuple>& binaries,
                                                        const std::vector<FileTuple>& graphs, uint64_t kv_page_stride,
                                                        int num_threads) {
  std::vector<BinaryFile> binary_files;
  std::vector<FileRange> graph_files;
  for (const auto& [name, label, path, at, nbytes] : binaries) binary_files.push_back({name, {label, path, at, nbytes}});
  for (const auto& [label, path, at, nbytes] : graphs) graph_files.push_back({label, path, at, nbytes});
  const double start = Timeline::now();
  load_binaries(device, binary_files, num_threads);
  const double middle = Timeline::now();
  auto handles = load_graphs(device, graph_files, kv_page_stride, num_threads);
  return {std::move(handles), middle - start, Timeline::now() - middle};
}

void load_weights(GpuDevice& device, const std::string& path, uint64_t file_offset, uint64_t nbytes, int num_threads,
                  uint64_t piece_bytes) {
  device.load_weights(path, file_offset, nbytes, {num_threads, piece_bytes});
}

void update_weights(GpuDevice& device, const std::string& path, uint64_t file_offset, uint64_t nbytes, int num_threads,
                    uint64_t piece_bytes) {
  device.update_weights(path, file_offset, nbytes, {num_threads, piece_bytes});
}

void allocate(GpuDevice& device, std::string_view region, uint64_t nbytes) {
  device.allocate(region_by_name(region), nbytes);
}

nb::object view_of(const GpuDevice& device, std::string_view name) {
  if (region_by_name(name) != RegionKind::Io) {
    throw DeviceError("region " + std::string(name) + " is in the GPU's memory: only io can be viewed");
  }
  return RegionBuffer::view(device.host_io());
}

uint64_t submit(GpuDevice& device, int graph, int64_t num_tokens, int64_t num_seqs, int64_t num_logit_rows,
                int io_set) {
  return device.submit(graph, {num_tokens, num_seqs, num_logit_rows}, io_set);
}

std::vector<std::pair<std::string, double>> profile(GpuDevice& device, int graph, int64_t num_tokens, int64_t num_seqs,
                                                    int64_t num_logit_rows, int io_set) {
  return device.profile(graph, {num_tokens, num_seqs, num_logit_rows}, io_set);
}

nb::dict counters_of(const GpuDevice& device) {
  const GpuCounters all = device.counters(false), sealed = device.counters(true);
  nb::dict dict;
  dict["steps"] = all.steps;
  dict["nodes"] = all.nodes;
  dict["graphs_loaded"] = all.graphs_loaded;
  dict["modules_loaded"] = all.modules_loaded;
  dict["graph_instantiations"] = all.graph_instantiations;
  dict["captures"] = 0;      // the driver's entry points for it are not even looked up
  dict["compilations"] = 0;  // code objects are machine code, or refused
  dict["regions_allocated"] = all.regions_allocated;
  dict["bytes_allocated"] = all.bytes_allocated;
  dict["pages_moved_out"] = all.pages_moved_out;
  dict["pages_moved_in"] = all.pages_moved_in;
  dict["graphs_loaded_after_seal"] = sealed.graphs_loaded;
  dict["modules_loaded_after_seal"] = sealed.modules_loaded;
  dict["graph_instantiations_after_seal"] = sealed.graph_instantiations;
  dict["captures_after_seal"] = 0;
  dict["compilations_after_seal"] = 0;
  dict["allocations_after_seal"] = sealed.regions_allocated;
  dict["refused_after_seal"] = sealed.refused;
  return dict;
}

using DeviceTuple = std::tuple<int, std::string, std::string, uint64_t, int>;

std::pair<std::vector<DeviceTuple>, std::string> gpu_devices(std::string_view backend, const std::string& library) {
  const Backend kind = backend_by_name(backend);
  const nb::gil_scoped_release release;
  std::vector<DeviceTuple> devices;
  try {
    for (const DeviceInfo& d : list_devices(*open_driver(kind, library))) {
      devices.emplace_back(d.ordinal, d.name, d.arch, d.total_bytes, d.driver_version);
    }
  } catch (const DeviceError& error) {
    return {{}, error.what()};
  }
  return {devices, devices.empty() ? "the driver finds no device" : ""};
}

void bind_gpu_device(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<GpuDevice>(m, "GpuDevice",
                        "A GPU's memory regions, code objects and LaunchGraphs, which it runs step after step. After\n"
                        "seal() nothing is allocated, loaded or instantiated any more. Usable from any thread. Every\n"
                        "method raises DeviceLostError once the device is lost.")
      .def("__init__", &make_device, "backend"_a, "ordinal"_a = 0, "io_sets"_a = 2, "min_driver_version"_a = 0,
           "library"_a = "", "spin_seconds"_a = 50e-6,
           "Open device `ordinal` of backend 'cuda' or 'hip' for `io_sets` steps in flight. `min_driver_version` is\n"
           "in the driver's own counting (12040 is CUDA 12.4); `library` is a path to use in place of the system's\n"
           "driver; wait() asks the device again and again for `spin_seconds` before it sleeps. Raises DeviceError,\n"
           "saying what to install.")
      .def("load_weights", &load_weights, "path"_a, "file_offset"_a, "nbytes"_a, "num_threads"_a = 0,
           "piece_bytes"_a = 0, Release(),
           "Allocate region weights and fill it with a range of a file, through pinned buffers that num_threads\n"
           "threads (0: one per usable core, 16 at most) fill with piece_bytes (0: 4 MiB) at a time. Other regions,\n"
           "code objects and graphs may be loaded meanwhile. Raises DeviceError.")
      .def("update_weights", &update_weights, "path"_a, "file_offset"_a, "nbytes"_a, "num_threads"_a = 0,
           "piece_bytes"_a = 0, Release(),
           "Replace what region weights holds by a range of a file of exactly its size, behind the steps in flight;\n"
           "steps submitted meanwhile are refused. The file is read whole before anything changes, then once more.\n"
           "Raises WeightsUnknownError when what the region holds is then unknown, any other DeviceError when it is what\n"
           "it was.")
      .def("allocate", &allocate, "region"_a, "nbytes"_a, Release(),
           "Allocate region kv, arena or state; zeroed, but for kv. Raises DeviceError, saying what to change when\n"
           "memory is short.")
      .def("allocate_io", &GpuDevice::allocate_io, "nbytes"_a, "step_sizes_offset"_a = -1, Release(),
           "Allocate region io on the device, and region host_io: for each io set as many bytes of host memory, which\n"
           "graphs read and write where it lies. If step_sizes_offset is not negative, the int32[8] there are the\n"
           "step's sizes, of which submit writes the first three. Raises DeviceError.")
      .def("allocate_host_pages", &GpuDevice::allocate_host_pages, "num_pages"_a, "page_bytes"_a, Release(),
           kAllocateHostPagesDoc)
      .def("move_pages", &move_pages<GpuDevice>, "moves_out"_a, "moves_in"_a, kMovePagesDoc)
      .def("view", &view_of, "region"_a, nb::sig("def view(self, region: str) -> memoryview"),
           "The host's memory of inputs and outputs (for region io: region host_io), writable: set s begins at s times\n"
           "the region's size rounded up to 4096. It may outlive the device. Raises DeviceError.")
      .def("read", &read_region<GpuDevice>, "region"_a, "offset"_a, "nbytes"_a, nb::sig(kReadSig), kReadDoc)
      .def("write", &write_region<GpuDevice>, "region"_a, "offset"_a, "data"_a, nb::sig(kWriteSig), kWriteDoc)
      .def("address", &region_address<GpuDevice>, "region"_a,
           "Where a region begins, in the device's primary context; for region host_io, where the device finds it. Raises\n"
           "DeviceError.")
      .def("load_binary", &load_binary, "name"_a, "data"_a,
           "Load a code object (cubin or hsaco), which graphs name by `name`. Several threads may do so at once.\n"
           "Raises GraphError when it is damaged or for another GPU, DeviceError.")
      .def("load_graph", &load_graph, "data"_a, "kv_page_stride"_a,
           "Check a LaunchGraph, bind it to regions and code objects, and instantiate it once for each io set;\n"
           "returns its handle. KV pages are kv_page_stride bytes apart. Raises GraphError, naming node and\n"
           "argument, DeviceError.")
      .def("load_files", &load_files, "binaries"_a, "graphs"_a, "kv_page_stride"_a, "num_threads"_a, Release(),
           "load_binary for each of (name, label, path, offset, bytes), then load_graph for each of (label, path,\n"
           "offset, bytes), read and loaded by num_threads threads. Returns the handles of the graphs in their order,\n"
           "and the seconds that binaries and graphs took. Raises the error of the first file that has one; a\n"
           "GraphError begins with its label.")
      .def("submit", &submit, "graph"_a, "num_tokens"_a, "num_seqs"_a, "num_logit_rows"_a, "io_set"_a = 0,
           "Queue a step behind those in flight and return its ticket: a graph that reads its inputs from io set\n"
           "`io_set` and writes its outputs there. The set is the device's until wait(ticket). Raises DeviceError.")
      .def("wait", &GpuDevice::wait, "ticket"_a, "seconds"_a = std::numeric_limits<double>::infinity(), Release(),
           "True when the step of `ticket`, and all before it, are done; False if they are not after `seconds`, in\n"
           "which the device is asked again and again. Raises DeviceLostError.")
      .def("time_steps", &GpuDevice::time_steps, "num_steps"_a,
           "Time the graphs of steps on the device, the latest `num_steps` of them, which costs each a microsecond.\n"
           "Before seal(). Raises DeviceError.")
      .def("step_times", &step_times,
           nb::sig("def step_times(self) -> list[tuple[int, int, int, float, float | None]]"),
           "(ticket, tokens, sequences, seconds of its graph, seconds since the graph before it ended) of the steps\n"
           "that were waited for since the last call; None for the first ever. Raises DeviceError.")
      .def("profile", &profile, "graph"_a, "num_tokens"_a, "num_seqs"_a, "num_logit_rows"_a, "io_set"_a = 0, Release(),
           "Run one step node by node and return (node name, seconds) for each, in order. Raises DeviceError.")
      .def("seal", &GpuDevice::seal, Release(),
           "From here on allocate, allocate_io, load_weights, load_binary and load_graph raise DeviceError.")
      .def("counters", &counters_of, nb::sig("def counters(self) -> dict[str, int]"),
           "What the device has done so far: steps, nodes, graphs_loaded, modules_loaded, graph_instantiations,\n"
           "captures, compilations, regions_allocated, bytes_allocated, pages_moved_out, pages_moved_in; since\n"
           "seal(): graphs_loaded_after_seal, modules_loaded_after_seal, graph_instantiations_after_seal,\n"
           "captures_after_seal, compilations_after_seal, allocations_after_seal, refused_after_seal.")
      .def("spans", &GpuDevice::spans,
           "Where the time of the start went: (what, start, seconds, native id of the thread), starts on the clock of\n"
           "time.monotonic().")
      .def("memory", &GpuDevice::memory, Release(), "(free, total) bytes of the device's memory. Raises DeviceError.")
      .def("close", &GpuDevice::close, Release(),
           "Finish the steps in flight and give everything back; idempotent. Neither raises nor hangs.")
      .def_prop_ro("name", [](const GpuDevice& d) { return d.info().name; })
      .def_prop_ro("arch", [](const GpuDevice& d) { return d.info().arch; }, "Such as 'sm_90' or 'gfx950'.")
      .def_prop_ro("driver_version", [](const GpuDevice& d) { return d.info().driver_version; });
}

}  // namespace

void bind_gpu(nb::module_& m) {
  nb::exception<DeviceLostError>(m, "DeviceLostError", m.attr("DeviceError").ptr());
  bind_gpu_device(m);
  nb::class_<GpuContext>(m, "GpuContext",
                         "A GPU's context, held open: making it takes a quarter of a second, and a GpuDevice of the\n"
                         "same device then shares it. Raises DeviceError.")
      .def(nb::init<std::string_view, int, const std::string&>(), "backend"_a, "ordinal"_a = 0, "library"_a = "")
      .def("close", &GpuContext::close, nb::call_guard<nb::gil_scoped_release>(),
           "Let go of it; idempotent. The device closes with its last user.");
  m.def("gpu_devices", &gpu_devices, "backend"_a, "library"_a = "",
        "The GPUs of backend 'cuda' or 'hip': ([(ordinal, name, arch, total bytes, driver version)], reason why there\n"
        "are none). Starts the driver if there is one. Raises DeviceError for an unknown backend.");
}
