#include "device/thread_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <ctime>
#include <string>
#include <system_error>

#include "device/errors.h"

namespace tokenspeed::device {
namespace {

// How long a worker without work looks for it before it sleeps. Most waits between tasks are shorter, and so
// is what the host does between two steps when it is quick; waking a sleeper costs about as much again.
constexpr int64_t kSpinNanoseconds = 50'000;
// After this much of it, the core is offered to whoever else is runnable: the caller's thread, as a rule.
constexpr int64_t kPoliteAfterNanoseconds = 5'000;

int64_t now_nanoseconds() noexcept {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) noexcept {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) noexcept {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

int usable_cores(cpu_set_t& cores) noexcept {
  CPU_ZERO(&cores);
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

void bind_to_core(int worker) noexcept {
  cpu_set_t cores;
  const int count = usable_cores(cores);
  int skip = worker % (count > 0 ? count : 1);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &cores) || skip-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof(one), &one);  // a wish: without it all is as right
    return;
  }
}

}  // namespace

// Bits 0-11: workers inside the task; 12-31: the task; 32-63: the job. Only the first field changes while a
// task runs. Two task numbers are states of the pool: no job runs, and one worker alone starts or ends a job.
struct ThreadPool::Place {
  static constexpr uint32_t kIdle = 0xfffff, kExclusive = 0xffffe;
  static constexpr uint64_t kInsideMask = 0xfff;

  static uint64_t make(uint64_t job, uint32_t task, uint64_t inside) noexcept {
    return (job << 32) | (static_cast<uint64_t>(task) << 12) | inside;
  }
  static uint64_t job(uint64_t place) noexcept { return place >> 32; }
  static uint32_t task(uint64_t place) noexcept { return static_cast<uint32_t>(place >> 12) & 0xfffff; }
  static uint64_t inside(uint64_t place) noexcept { return place & kInsideMask; }
  static bool same(uint64_t a, uint64_t b) noexcept { return ((a ^ b) & ~kInsideMask) == 0; }
};

ThreadPool::ThreadPool(const PoolOptions& options) : num_workers_(options.num_workers) {
  if (num_workers_ < 1 || num_workers_ > kMaxWorkers) {
    throw DeviceError("a device needs 1 to " + std::to_string(kMaxWorkers) + " workers, but " +
                      std::to_string(num_workers_) + " were asked for");
  }
  cpu_set_t cores;
  // Where workers share cores, spinning keeps the one that has work from running.
  spin_nanoseconds_ = num_workers_ <= usable_cores(cores) ? kSpinNanoseconds : 0;
  if (options.scratch_bytes > 0) {
    scratch_stride_ = (options.scratch_bytes + 4095) / 4096 * 4096;
    scratch_ = std::make_unique<Region>("the workers' scratch memory", scratch_stride_ * num_workers_);
  }
  place_.store(Place::make(0, Place::kIdle, 0), std::memory_order_relaxed);

  sigset_t all, before;  // signals are the host's: no worker inherits an open mask
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    threads_.reserve(num_workers_);
    const bool pin = options.pin;
    for (int i = 0; i < num_workers_; ++i) {
      threads_.emplace_back([this, i, pin] {
        if (pin) bind_to_core(i);
        work(i);
      });
    }
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    const size_t started = threads_.size();
    stop();
    throw DeviceError("the system started " + std::to_string(started) + " of " + std::to_string(num_workers_) +
                      " worker threads and refused the next: " + error.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() noexcept {
  const std::lock_guard one_at_a_time(stop_mutex_);  // who comes second waits until the threads have ended
  {
    const std::lock_guard lock(submit_mutex_);
    stopping_.store(true);
  }
  wake_sleepers();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

double ThreadPool::busy_seconds() const noexcept {
  return static_cast<double>(busy_nanoseconds_.load(std::memory_order_relaxed)) * 1e-9;
}

Ticket ThreadPool::submit(const Job& job) {
  const std::lock_guard lock(submit_mutex_);
  if (stopping_.load()) throw DeviceError("the device is closed: it takes no more work");
  if (job.tasks.empty() || job.tasks.size() > kMaxTasks) {
    throw DeviceError("a job needs 1 to " + std::to_string(kMaxTasks) + " tasks, but this one has " +
                      std::to_string(job.tasks.size()));
  }
  const Ticket ticket = submitted_.load(std::memory_order_relaxed) + 1;
  if (ticket - completed_.load(std::memory_order_acquire) > kMaxQueued) {
    throw DeviceError(std::to_string(kMaxQueued) + " steps are in flight, which is the most: wait for one first");
  }
  jobs_[ticket % kMaxQueued] = job;
  submitted_.store(ticket);
  wake_sleepers();
  return ticket;
}

void ThreadPool::wait(Ticket ticket) noexcept {
  while (!done(ticket)) {
    waiting_callers_.fetch_add(1);
    const uint32_t epoch = done_epoch_.load();
    if (completed_.load() < ticket) futex_wait(done_epoch_, epoch);
    waiting_callers_.fetch_sub(1);
  }
}

void ThreadPool::wake_sleepers() noexcept {
  if (sleeping_workers_.load() == 0) return;
  work_epoch_.fetch_add(1);
  futex_wake_all(work_epoch_);
}

bool ThreadPool::work_arrived(uint64_t place, uint64_t now) const noexcept {
  if (Place::task(now) != Place::kIdle) return !Place::same(place, now);
  return submitted_.load() != completed_.load() || stopping_.load();
}

// Returns the place once it differs from `place`, or is idle with a job to start or a pool to end.
uint64_t ThreadPool::wait_while(uint64_t place) noexcept {
  uint64_t now = place_.load(std::memory_order_acquire);
  if (work_arrived(place, now)) return now;
  if (spin_nanoseconds_ > 0) {
    const int64_t start = now_nanoseconds();
    for (int64_t waited = 0; waited < spin_nanoseconds_; waited = now_nanoseconds() - start) {
      for (int i = 0; i < 16; ++i) {
        now = place_.load(std::memory_order_acquire);
        if (work_arrived(place, now)) return now;
        _mm_pause();
      }
      if (waited > kPoliteAfterNanoseconds) sched_yield();
    }
  }
  for (;;) {
    sleeping_workers_.fetch_add(1);
    const uint32_t epoch = work_epoch_.load();
    now = place_.load();
    const bool arrived = work_arrived(place, now);
    if (!arrived) {
      sleeps_.fetch_add(1, std::memory_order_relaxed);
      futex_wait(work_epoch_, epoch);
    }
    sleeping_workers_.fetch_sub(1);
    if (arrived) return now;
  }
}

void ThreadPool::work(int worker) noexcept {
  // Rounding and denormals as IEEE 754 has them, whatever a library set in the thread that made this one.
  _mm_setcsr(0x1f80);
  char name[16];
  std::snprintf(name, sizeof(name), "ts-worker-%d", worker);
  pthread_setname_np(pthread_self(), name);

  uint64_t place = place_.load(std::memory_order_acquire);
  for (;;) {
    if (Place::task(place) == Place::kIdle) {
      if (submitted_.load() != completed_.load()) {
        if (place_.compare_exchange_strong(place, Place::make(Place::job(place), Place::kExclusive, 0))) {
          start_job(completed_.load() + 1);
          place = place_.load(std::memory_order_acquire);
        }
      } else if (stopping_.load()) {
        return;
      } else {
        place = wait_while(place);
      }
    } else if (Place::task(place) == Place::kExclusive) {
      place = wait_while(place);
    } else if (place_.compare_exchange_strong(place, place + 1)) {
      place = run_tasks(worker, Place::job(place), Place::task(place));
      place = wait_while(place);
    }
  }
}

// Runs the task that this worker has entered, and those that it starts by leaving last. Returns the place
// that it left, to which it has no business returning.
uint64_t ThreadPool::run_tasks(int worker, uint64_t job_number, uint32_t task) noexcept {
  const Job& job = jobs_[job_number % kMaxQueued];
  kernels::Invocation inv{};
  inv.worker = worker;
  inv.num_workers = num_workers_;
  inv.scratch = scratch_ ? scratch_->data() + worker * scratch_stride_ : nullptr;
  inv.scratch_bytes = scratch_stride_;
  for (;; ++task) {
    inv.args = job.tasks[task].args;
    inv.num_args = job.tasks[task].num_args;
    inv.next_item = &counters_[task % 2].next_item;
    job.tasks[task].fn(inv);

    const bool last_task = task + 1 == job.tasks.size();
    const uint64_t next =
        last_task ? Place::make(job_number, Place::kExclusive, 0) : Place::make(job_number, task + 1, 1);
    uint64_t place = place_.load(std::memory_order_relaxed);
    for (;;) {
      const bool others = Place::inside(place) > 1;
      if (!place_.compare_exchange_weak(place, others ? place - 1 : next)) continue;
      if (others) return Place::make(job_number, task, 0);
      break;
    }
    end_task(job, task);
    if (last_task) {
      end_job();
      return Place::make(job_number, task, 0);
    }
    wake_sleepers();
  }
}

// All workers have left the task and none can come back to it: its counter is free for the task after next.
void ThreadPool::end_task(const Job& job, uint32_t task) noexcept {
  counters_[task % 2].next_item.store(0, std::memory_order_relaxed);
  if (job.task_seconds == nullptr) return;
  const int64_t now = now_nanoseconds();
  job.task_seconds[task] = static_cast<double>(now - task_started_) * 1e-9;
  task_started_ = now;
}

// The place is exclusively this worker's.
void ThreadPool::start_job(Ticket ticket) noexcept {
  const Job& job = jobs_[ticket % kMaxQueued];
  if (job.prepare != nullptr) job.prepare(job);
  job_started_ = task_started_ = now_nanoseconds();
  place_.store(Place::make(ticket & 0xffffffff, 0, 0));
  wake_sleepers();
}

void ThreadPool::end_job() noexcept {
  busy_nanoseconds_.fetch_add(now_nanoseconds() - job_started_, std::memory_order_relaxed);
  const Ticket ticket = completed_.load(std::memory_order_relaxed) + 1;
  completed_.store(ticket);
  if (submitted_.load() != ticket) {
    start_job(ticket + 1);
  } else {
    place_.store(Place::make(ticket & 0xffffffff, Place::kIdle, 0));
    if (stopping_.load()) wake_sleepers();  // they are to end, too
  }
  done_epoch_.fetch_add(1);
  if (waiting_callers_.load() != 0) futex_wake_all(done_epoch_);
}

}  // namespace tokenspeed::device
