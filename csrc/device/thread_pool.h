// The workers of a CPU device: threads made once, which run jobs (sequences of tasks) in order of submission.
//
// A task is a kernel that shares its items through an atomic counter. A worker enters a task, claims items
// until none is left, and leaves; the last to leave starts the next task. A worker that is late (asleep, or
// off its core) is not waited for: the others go on without it, and it joins wherever the job is by then.
// So a kernel may find fewer than num_workers workers in a task, and none of a certain number.
//
// Nothing is allocated after construction.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "abi.h"
#include "device/region.h"

namespace tokenspeed::device {

struct Task {
  kernels::KernelFn fn;
  const kernels::ArgValue* args;
  uint32_t num_args;
};

struct Job {
  std::span<const Task> tasks;
  // Called once, by the worker that starts the job, when all earlier jobs have ended (optional).
  void (*prepare)(const Job& job) noexcept = nullptr;
  void* context = nullptr;
  std::array<int64_t, 4> sizes{};   // for `prepare`
  double* task_seconds = nullptr;   // where the duration of each task goes (optional)
};

using Ticket = uint64_t;  // counts jobs, from 1

struct PoolOptions {
  int num_workers = 1;
  bool pin = false;               // bind each worker to one of the process's cores
  size_t scratch_bytes = 0;       // of each worker
};

class ThreadPool {
 public:
  static constexpr uint32_t kMaxQueued = 8;        // jobs that may be unfinished at once
  static constexpr uint32_t kMaxTasks = 0xffff0;   // of one job
  static constexpr int kMaxWorkers = 1024;

  // Throws DeviceError for a number of workers outside 1..kMaxWorkers or when a thread cannot be started.
  explicit ThreadPool(const PoolOptions& options);
  ~ThreadPool();  // stops
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Throws DeviceError when kMaxQueued jobs are unfinished, and after stop(). What the job points to must
  // live until the job has ended.
  Ticket submit(const Job& job);
  void wait(Ticket ticket) noexcept;  // sleeps: the caller's core is the workers'
  bool done(Ticket ticket) const noexcept { return completed_.load(std::memory_order_acquire) >= ticket; }
  Ticket last_submitted() const noexcept { return submitted_.load(std::memory_order_acquire); }

  void stop() noexcept;  // finishes all jobs, then ends the threads; idempotent

  int num_workers() const noexcept { return num_workers_; }
  double busy_seconds() const noexcept;  // from a job's start to its end, summed over jobs
  uint64_t sleeps() const noexcept { return sleeps_.load(std::memory_order_relaxed); }

 private:
  struct Place;  // which job and task the pool is at, and how many workers are inside it, in one word

  void work(int worker) noexcept;
  uint64_t run_tasks(int worker, uint64_t job_number, uint32_t task) noexcept;
  void end_task(const Job& job, uint32_t task) noexcept;
  void start_job(Ticket ticket) noexcept;
  void end_job() noexcept;
  uint64_t wait_while(uint64_t place) noexcept;
  bool work_arrived(uint64_t place, uint64_t now) const noexcept;
  void wake_sleepers() noexcept;

  const int num_workers_;
  int64_t spin_nanoseconds_ = 0;
  size_t scratch_stride_ = 0;
  std::unique_ptr<Region> scratch_;
  std::mutex submit_mutex_;
  std::mutex stop_mutex_;
  std::array<Job, kMaxQueued> jobs_;
  int64_t job_started_ = 0, task_started_ = 0;  // written by whoever starts a job or a task

  alignas(64) std::atomic<uint64_t> place_;
  struct alignas(64) Counter {
    std::atomic<int64_t> next_item{0};
  };
  std::array<Counter, 2> counters_;  // of tasks with even and odd index
  alignas(64) std::atomic<uint64_t> submitted_{0};
  std::atomic<uint64_t> completed_{0};
  std::atomic<uint64_t> busy_nanoseconds_{0};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> work_epoch_{0};  // futex of sleeping workers
  std::atomic<uint32_t> sleeping_workers_{0};
  std::atomic<uint64_t> sleeps_{0};
  alignas(64) std::atomic<uint32_t> done_epoch_{0};  // futex of waiting callers
  std::atomic<uint32_t> waiting_callers_{0};

  std::vector<std::thread> threads_;  // last: the members above outlive the threads
};

}  // namespace tokenspeed::device
