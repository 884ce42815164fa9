// The Python module tokenspeed._native: the control plane and the devices, side by side.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_scheduler(nb::module_& m);
void bind_device(nb::module_& m);
void bind_gpu(nb::module_& m);
void bind_simulate(nb::module_& m);

NB_MODULE(_native, m) {
  // An interpreter may end with an engine alive, its threads holding what they use: no leak worth a warning.
  nb::set_leak_warnings(false);
  m.doc() = "TokenSpeed's C++: the scheduler (control plane) and the devices.";
  bind_scheduler(m);
  bind_simulate(m);  // after it: it takes a SchedulerConfig
  bind_device(m);
  bind_gpu(m);  // after it: DeviceLostError is a DeviceError
}
