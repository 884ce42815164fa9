// What the device refuses, each with a text that says what is needed, what was found and what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace tokenspeed::device {

// A LaunchGraph that is damaged, of another version, or not for this device's regions or processor.
struct GraphError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Memory, files or calls that the device cannot serve.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An update of region weights ended half-way: what the region holds is unknown, and no step runs before another one has
// gone well.
struct WeightsUnknownError : DeviceError {
  using DeviceError::DeviceError;
};

}  // namespace tokenspeed::device
