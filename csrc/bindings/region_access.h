// Regions of either kind of device, read and written from Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "device/region.h"

inline constexpr const char* kReadDoc =
    "A copy of nbytes of a region from `offset` on, made behind the steps in flight. Raises DeviceError for a range\n"
    "beyond the region's end.";
inline constexpr const char* kWriteDoc =
    "Copy a contiguous buffer into a region at `offset` (bytes), behind the steps in flight. Not into weights: see\n"
    "update_weights. Raises DeviceError for a range beyond the region's end.";
inline constexpr const char* kReadSig = "def read(self, region: str, offset: int, nbytes: int) -> bytes";
inline constexpr const char* kWriteSig = "def write(self, region: str, offset: int, data: object) -> None";

template <typename Device>
nanobind::bytes read_region(Device& device, std::string_view name, uint64_t offset, uint64_t nbytes) {
  const auto kind = tokenspeed::device::region_by_name(name);
  device.require_range(kind, offset, nbytes);  // before memory for a copy is asked for
  auto bytes = nanobind::steal<nanobind::bytes>(
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes)));
  if (!bytes.is_valid()) throw nanobind::python_error();
  auto* to = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes.ptr()));
  {
    const nanobind::gil_scoped_release release;
    device.read(kind, offset, {to, nbytes});
  }
  return bytes;
}

template <typename Device>
void write_region(Device& device, std::string_view name, uint64_t offset, nanobind::handle data) {
  const auto kind = tokenspeed::device::region_by_name(name);
  struct View {
    Py_buffer buffer;
    ~View() { PyBuffer_Release(&buffer); }
  };
  Py_buffer buffer;
  if (PyObject_GetBuffer(data.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nanobind::python_error();
  const View view{buffer};
  const nanobind::gil_scoped_release release;
  device.write(kind, offset, {static_cast<const std::byte*>(buffer.buf), static_cast<size_t>(buffer.len)});
}

template <typename Device>
uint64_t region_address(const Device& device, std::string_view name) {
  return device.address(tokenspeed::device::region_by_name(name));
}
