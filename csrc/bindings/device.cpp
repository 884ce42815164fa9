// Python's view of the CPU device. The GIL is released wherever a call may take longer than microseconds.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "abi.h"
#include "bindings/page_moves.h"
#include "bindings/region_access.h"
#include "bindings/region_buffer.h"
#include "device/ceilings.h"
#include "device/cpu_device.h"
#include "device/errors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace tokenspeed::device;
using tokenspeed::kernels::kernel_table;
using tokenspeed::kernels::kKernelAbi;

int get_buffer(PyObject* self, Py_buffer* view, int flags) noexcept {
  const Region& region = *nb::inst_ptr<RegionBuffer>(nb::handle(self))->region;
  const auto nbytes = static_cast<Py_ssize_t>(region.size());
  return PyBuffer_FillInfo(view, self, region.data(), nbytes, region.read_only(), flags);
}

PyType_Slot region_buffer_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
    {0, nullptr},
};

nb::object view_of(const CpuDevice& device, std::string_view name) {
  return RegionBuffer::view(device.region(region_by_name(name)));
}

std::vector<std::tuple<std::string, std::string, size_t>> list_kernels() {
  std::vector<std::tuple<std::string, std::string, size_t>> list;
  for (const auto& entry : kernel_table()) list.emplace_back(entry.symbol, entry.signature, entry.scratch_bytes);
  return list;
}

nb::dict counters_of(const CpuDevice& device) {
  const DeviceCounters c = device.counters();
  nb::dict dict;
  dict["steps"] = c.steps;
  dict["nodes"] = c.nodes;
  dict["graphs_loaded"] = c.graphs_loaded;
  dict["regions_allocated"] = c.regions_allocated;
  dict["bytes_allocated"] = c.bytes_allocated;
  dict["bytes_settled"] = c.bytes_settled;
  dict["graphs_loaded_after_seal"] = c.graphs_loaded_after_seal;
  dict["allocations_after_seal"] = c.allocations_after_seal;
  dict["refused_after_seal"] = c.refused_after_seal;
  dict["pages_moved_out"] = c.pages_moved_out;
  dict["pages_moved_in"] = c.pages_moved_in;
  dict["worker_sleeps"] = c.worker_sleeps;
  dict["busy_seconds"] = c.busy_seconds;
  return dict;
}

int load_graph(CpuDevice& device, const nb::bytes& data, uint64_t kv_page_stride) {
  return device.load_graph({reinterpret_cast<const std::byte*>(data.c_str()), data.size()}, kv_page_stride);
}

void allocate(CpuDevice& device, std::string_view region, uint64_t nbytes) {
  device.allocate(region_by_name(region), nbytes);
}

uint64_t submit(CpuDevice& device, int graph, int64_t num_tokens, int64_t num_seqs, int64_t num_logit_rows,
                uint64_t io_offset) {
  return device.submit(graph, {num_tokens, num_seqs, num_logit_rows}, io_offset);
}

std::vector<std::pair<std::string, double>> profile(CpuDevice& device, int graph, int64_t num_tokens, int64_t num_seqs,
                                                    int64_t num_logit_rows, uint64_t io_offset) {
  return device.profile(graph, {num_tokens, num_seqs, num_logit_rows}, io_offset);
}

void bind_cpu_device(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<CpuDevice>(m, "CpuDevice",
                        "Regions of memory, LaunchGraphs and a fixed pool of workers that run them, one step after\n"
                        "another. After seal() nothing is allocated or loaded any more. Usable from any thread.")
      .def(nb::init<int, bool>(), "num_workers"_a, "pin"_a = false,
           "Start num_workers threads, each bound to a core if `pin`. Raises DeviceError.")
      .def("load_weights", &CpuDevice::load_weights, "path"_a, "file_offset"_a, "nbytes"_a, Release(),
           "Make a range of a file region weights, by mapping it if it begins at a multiple of 64 bytes. Raises\n"
           "DeviceError.")
      .def("settle", &CpuDevice::settle, Release(),
           "Move mapped weights to memory of their own, on huge pages: faster to read, and out of reach of whatever\n"
           "happens to the file. Steps may run meanwhile, and close() ends it early. Does nothing the second time.")
      .def("update_weights", &CpuDevice::update_weights, "path"_a, "file_offset"_a, "nbytes"_a, Release(),
           "Replace what region weights holds, at the same addresses, by a range of a file of exactly its size:\n"
           "behind the steps in flight, before those submitted from here on. Never writes to the file that weights came\n"
           "from. Raises WeightsUnknownError when what the region holds is then unknown (it can be where memory does\n"
           "not suffice for both, and the file cannot be read to its end), any other DeviceError when it is what it was.")
      .def("allocate", &allocate,
           "region"_a, "nbytes"_a, "Allocate region kv, arena, io or state, zeroed. Raises DeviceError.")
      .def("allocate_host_pages", &CpuDevice::allocate_host_pages, "num_pages"_a, "page_bytes"_a, Release(),
           kAllocateHostPagesDoc)
      .def("move_pages", &move_pages<CpuDevice>, "moves_out"_a, "moves_in"_a, kMovePagesDoc)
      .def("view", &view_of, "region"_a, nb::sig("def view(self, region: str) -> memoryview"),
           "A region's bytes; writable, but for weights. It may outlive the device. Raises DeviceError.")
      .def("read", &read_region<CpuDevice>, "region"_a, "offset"_a, "nbytes"_a, nb::sig(kReadSig), kReadDoc)
      .def("write", &write_region<CpuDevice>, "region"_a, "offset"_a, "data"_a, nb::sig(kWriteSig), kWriteDoc)
      .def("address", &region_address<CpuDevice>, "region"_a, "Where a region begins. Raises DeviceError.")
      .def("load_graph", &load_graph, "data"_a, "kv_page_stride"_a,
           "Check a LaunchGraph and bind it to the regions; returns its handle. KV pages are kv_page_stride bytes\n"
           "apart. Raises GraphError, naming node and argument, for a graph that this device must not run.")
      .def("submit", &submit,
           "graph"_a, "num_tokens"_a, "num_seqs"_a, "num_logit_rows"_a, "io_offset"_a = 0,
           "Queue a step behind those in flight (8 at most) and return its ticket. Sizes must lie within the\n"
           "graph's bucket. `io_offset` (bytes, a multiple of 64) selects the step's own set of inputs and outputs.")
      .def("wait", &CpuDevice::wait, "ticket"_a, Release(),
           "Sleep until the step of `ticket`, and all before it, are done.")
      .def("profile", &profile,
           "graph"_a, "num_tokens"_a, "num_seqs"_a, "num_logit_rows"_a, "io_offset"_a = 0, Release(),
           "Run one step and return (node name, seconds) for each node, in order.")
      .def("seal", &CpuDevice::seal, "From here on allocate, load_weights and load_graph raise DeviceError.")
      .def("counters", &counters_of, nb::sig("def counters(self) -> dict[str, int | float]"),
           "What the device has done so far: steps, nodes, graphs_loaded, regions_allocated, bytes_allocated,\n"
           "bytes_settled, graphs_loaded_after_seal, allocations_after_seal, refused_after_seal, pages_moved_out,\n"
           "pages_moved_in, worker_sleeps, busy_seconds.")
      .def("close", &CpuDevice::close, Release(), "Finish the steps in flight and end the workers; idempotent.")
      .def_prop_ro("num_workers", &CpuDevice::num_workers);
}

}  // namespace

void bind_device(nb::module_& m) {
  m.attr("KERNEL_ABI") = kKernelAbi;
  nb::exception<GraphError>(m, "GraphError");
  nb::exception<DeviceError>(m, "DeviceError");
  nb::exception<WeightsUnknownError>(m, "WeightsUnknownError", m.attr("DeviceError").ptr());
  nb::class_<RegionBuffer>(m, "RegionBuffer", nb::type_slots(region_buffer_slots),
                           "What a memoryview from a device's view() exports; not for direct use.");
  bind_cpu_device(m);
  m.def("kernel_table", &list_kernels, "Every native kernel: (symbol, signature, scratch bytes per worker).");
  m.def("measure_read_bandwidth", &measure_read_bandwidth, "num_workers"_a, "nbytes"_a,
        nb::call_guard<nb::gil_scoped_release>(),
        "Bytes per second that num_workers threads read from nbytes of memory.");
  m.def("measure_matmul", [](std::string_view dtype, int num_workers) { return measure_matmul(dtype, num_workers); },
        "dtype"_a, "num_workers"_a, nb::call_guard<nb::gil_scoped_release>(),
        "FLOP per second of num_workers threads with the best instruction for 'float32' or 'bfloat16'.");
}
