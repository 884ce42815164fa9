// The Python module tokenspeed._native: the control plane and the CPU device, side by side.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_scheduler(nb::module_& m);
void bind_device(nb::module_& m);

NB_MODULE(_native, m) {
  m.doc() = "TokenSpeed's C++: the scheduler (control plane) and the CPU device.";
  bind_scheduler(m);
  bind_device(m);
}
