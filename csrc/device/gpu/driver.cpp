#include "device/gpu/driver.h"

#include <dlfcn.h>

#include "device/gpu/cuda_api.h"
#include "device/gpu/hip_api.h"

namespace tokenspeed::device::gpu {
namespace {

struct Vendor {
  const char* name;
  std::array<const char*, 3> libraries;  // the first that loads is taken
  const char* product;
  const char* advice;
};

constexpr Vendor kVendors[] = {
    {"cuda",
     {"libcuda.so.1", "libcuda.so", nullptr},
     "NVIDIA driver",
     "install NVIDIA's driver (in a container, pass the GPU in, e.g. `--gpus all`)"},
    {"hip",
     {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"},
     "AMD HIP runtime",
     "install AMD's driver and the ROCm package hip-runtime-amd, 6.0 or newer"},
};

const Vendor& vendor_of(Backend backend) { return kVendors[static_cast<int>(backend)]; }

void* open_library(const Vendor& vendor, std::string* name) {
  if (!name->empty()) return dlopen(name->c_str(), RTLD_NOW | RTLD_LOCAL);
  for (const char* candidate : vendor.libraries) {
    if (candidate == nullptr) continue;
    if (void* handle = dlopen(candidate, RTLD_NOW | RTLD_LOCAL)) {
      *name = candidate;
      return handle;
    }
  }
  return nullptr;
}

void require(const Driver& driver, Status code, const char* what) {
  if (code == status::kSuccess) return;
  throw DeviceError(std::string("the ") + vendor_of(driver.backend()).product + " cannot " + what + ": " +
                    driver.describe(code));
}

}  // namespace

Backend backend_by_name(std::string_view name) {
  for (const Backend backend : {Backend::Cuda, Backend::Hip}) {
    if (name == vendor_of(backend).name) return backend;
  }
  throw DeviceError("no GPU backend is called '" + std::string(name) + "': use cuda or hip");
}

const char* backend_name(Backend backend) noexcept { return vendor_of(backend).name; }

Driver::~Driver() = default;  // the library stays: drivers do not unload cleanly

void* Driver::find(const char* name, bool optional) const {
  void* entry = dlsym(handle_, name);
  if (entry == nullptr && !optional) {
    throw DeviceError(library_ + " has no entry point " + name + ": the driver is too old; install a newer one");
  }
  return entry;
}

std::shared_ptr<const Driver> open_driver(Backend backend, const std::string& library) {
  const Vendor& vendor = vendor_of(backend);
  std::string name = library;
  void* handle = open_library(vendor, &name);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw DeviceError(std::string("no ") + vendor.product + " is installed: need " + vendor.libraries[0] +
                      ", have none (" + (reason != nullptr ? reason : "not found") + "): " + vendor.advice);
  }
  const std::shared_ptr<Driver> driver =
      backend == Backend::Cuda ? make_cuda_driver(name, handle) : make_hip_driver(name, handle);
  const Status code = driver->call.init(0);
  if (code == status::kNoDevice || code == status::kInvalidDevice) {
    throw DeviceError(std::string("the ") + vendor.product + " finds no GPU (" + driver->describe(code) + "): " +
                      vendor.advice);
  }
  if (code != status::kSuccess) {
    throw DeviceError(std::string("the ") + vendor.product + " does not start: " + driver->describe(code) + ": " +
                      vendor.advice);
  }
  require(*driver, driver->call.driver_version(&driver->version_), "tell its version");
  return driver;
}

std::vector<DeviceInfo> list_devices(const Driver& driver) {
  int count = 0;
  const Status counted = driver.call.device_count(&count);
  if (counted != status::kNoDevice) require(driver, counted, "count its devices");
  std::vector<DeviceInfo> devices;
  for (int i = 0; i < count; ++i) {
    DeviceInfo info{i, std::string(256, '\0'), {}, 0, driver.version()};
    size_t total = 0;
    require(driver, driver.call.device_name(info.name.data(), static_cast<int>(info.name.size()), i), "name a device");
    require(driver, driver.call.device_total_memory(&total, i), "tell a device's memory");
    require(driver, driver.architecture(&info.arch, i), "tell a device's architecture");
    info.name.resize(info.name.find('\0') == std::string::npos ? info.name.size() : info.name.find('\0'));
    info.total_bytes = total;
    devices.push_back(std::move(info));
  }
  return devices;
}

}  // namespace tokenspeed::device::gpu
