#include "device/ceilings.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <span>
#include <string>

#include "ceiling.h"
#include "device/cpu_features.h"
#include "device/errors.h"
#include "device/thread_pool.h"
#include "linear.h"

namespace tokenspeed::device {
namespace {

constexpr double kSecondsPerMeasurement = 0.1;
constexpr int kLeastRuns = 5;

double seconds_of(ThreadPool& pool, const Task& task) {
  Job job;
  job.tasks = {&task, 1};
  const auto start = std::chrono::steady_clock::now();
  pool.wait(pool.submit(job));
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The shortest of the runs that fit into the time for a measurement: others may use the machine, too.
double best_seconds(ThreadPool& pool, const Task& task) {
  double best = seconds_of(pool, task), spent = 0;
  for (int run = 0; run < kLeastRuns || spent < kSecondsPerMeasurement; ++run) {
    const double seconds = seconds_of(pool, task);
    spent += seconds;
    best = std::min(best, seconds);
  }
  return best;
}

kernels::MatmulCeiling best_matmul(bool bf16, const CpuFeatures& cpu) {
  if (bf16 && cpu.amx && kernels::request_amx_permission()) return kernels::kCeilingBf16Amx;
  if (bf16 && cpu.avx512bf16) return kernels::kCeilingBf16Avx512;
  if (cpu.avx512) return kernels::kCeilingF32Avx512;
  if (cpu.avx2) return kernels::kCeilingF32Avx2;
  throw DeviceError("this processor has no AVX2, which is the least that TokenSpeed's kernels need");
}

}  // namespace

double measure_read_bandwidth(int num_workers, uint64_t nbytes) {
  const CpuFeatures cpu = CpuFeatures::detect();
  if (!cpu.avx2) throw DeviceError("this processor has no AVX2, which is the least that TokenSpeed's kernels need");
  const Region memory("the read bandwidth measurement", nbytes);
  ThreadPool pool({num_workers, false, 64});
  std::memset(memory.data(), 1, memory.size());
  std::array<kernels::ArgValue, 2> args{};
  args[0].pointer = memory.data();
  args[1].i64 = static_cast<int64_t>(nbytes);
  const Task task{cpu.avx512 ? kernels::ceiling_read_avx512 : kernels::ceiling_read_avx2, args.data(), 2};
  return static_cast<double>(nbytes) / best_seconds(pool, task);
}

double measure_matmul(std::string_view dtype, int num_workers) {
  if (dtype != "float32" && dtype != "bfloat16") {
    throw DeviceError("there is no matmul ceiling for dtype '" + std::string(dtype) + "': use float32 or bfloat16");
  }
  const kernels::MatmulCeiling ceiling = best_matmul(dtype == "bfloat16", CpuFeatures::detect());
  ThreadPool pool({num_workers, false, 64});
  constexpr int64_t kItemsPerWorker = 32, kIterations = 4000;
  std::array<kernels::ArgValue, 2> args{};
  args[0].i64 = kItemsPerWorker * num_workers;
  args[1].i64 = kIterations;
  const Task task{ceiling.fn, args.data(), 2};
  const auto iterations = static_cast<double>(args[0].i64 * kIterations);
  return iterations * ceiling.flops_per_iteration / best_seconds(pool, task);
}

}  // namespace tokenspeed::device
