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

}  // namespace tokenspeed::device
