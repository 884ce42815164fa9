// What this machine can do at best, measured: the ceilings against which `bench` reads its figures.
#pragma once

#include <cstdint>
#include <string_view>

namespace tokenspeed::device {

// Bytes per second that the workers read together from `nbytes` of memory, the best of several passes.
// Throws DeviceError (no memory; no instruction set that this build has a kernel for).
double measure_read_bandwidth(int num_workers, uint64_t nbytes);

// FLOP per second of the best multiply-add instruction for the dtype ("float32" or "bfloat16") from registers,
// the best of several runs. Throws DeviceError for another dtype.
double measure_matmul(std::string_view dtype, int num_workers);

}  // namespace tokenspeed::device
