// Measures the projections of kernels/native/linear.h on SmolLM2-135M's shapes, against the read bandwidth and the
// arithmetic peak of the same threads in the same run. Distinct weights worth 192 MiB are cycled through, so that a
// layer's weights come from memory as in a real step.
//
//   bench_linear [--threads N] [--rounds N] [--kernel SUBSTRING] [--rows N]
//
// Times are the 10th percentile over single calls, ceilings likewise: figures that a busy neighbour disturbs little.
// One thread is timed by its processor time, which disregards the neighbour's turns altogether.
// `efficiency` is the least possible time (weights at full bandwidth, or products at peak, whichever takes longer)
// over the measured one.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ceilings.h"
#include "linear.h"

namespace {

using namespace tokenspeed;
using kernels::ArgValue;
using kernels::Invocation;

clockid_t g_clock = CLOCK_MONOTONIC;

double now_seconds() {
  timespec t;
  clock_gettime(g_clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// A crew of threads that spin between jobs, so that a job of 20 us can be timed.
class Crew {
 public:
  explicit Crew(int size) : size_(size) {
    for (int w = 1; w < size; ++w) threads_.emplace_back([this, w] { serve(w); });
  }
  ~Crew() {
    run([](int) {}, true);
    for (std::thread& t : threads_) t.join();
  }
  int size() const { return size_; }

  template <typename Job>
  void run(const Job& job, bool last = false) {
    job_ = job;
    last_ = last;
    pending_.store(size_ - 1, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    job_(0);
    while (pending_.load(std::memory_order_acquire) != 0) _mm_pause();
  }

 private:
  void serve(int worker) {
    for (uint64_t seen = 0;;) {
      while (generation_.load(std::memory_order_acquire) == seen) _mm_pause();
      ++seen;
      const bool last = last_;
      job_(worker);
      pending_.fetch_sub(1, std::memory_order_release);
      if (last) return;
    }
  }

  int size_;
  std::function<void(int)> job_;
  bool last_ = false;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> pending_{0};
  std::vector<std::thread> threads_;
};

// Zero-filled memory on huge pages where the system grants them; it lives until the process ends.
char* huge_alloc(size_t bytes) {
  constexpr size_t kHuge = size_t{2} << 20;
  void* p = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("bench_linear: mmap");
    std::exit(1);
  }
  char* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + kHuge - 1) & ~(kHuge - 1));
  madvise(aligned, bytes, MADV_HUGEPAGE);
  std::memset(aligned, 0, bytes);
  return aligned;
}

struct Kernel {
  const char* symbol;
  kernels::KernelFn fn;
  int args;  // what it takes: 0 x w out, 1 x w residual out, 2 x w(gate_up) out
  int element_bytes;
  const char* isa;
};

#define LINEAR_KERNELS(dt, bytes, isa)                                                       \
  {"linear_" #dt "_" #isa, kernels::linear_##dt##_##isa, 0, bytes, #isa},                    \
      {"linear_add_" #dt "_" #isa, kernels::linear_add_##dt##_##isa, 1, bytes, #isa},        \
      {"linear_silu_mul_" #dt "_" #isa, kernels::linear_silu_mul_##dt##_##isa, 2, bytes, #isa}

const Kernel kKernels[] = {
    LINEAR_KERNELS(f32, 4, avx2),   LINEAR_KERNELS(f32, 4, avx512),
    LINEAR_KERNELS(bf16, 2, avx2),  LINEAR_KERNELS(bf16, 2, avx512),
    LINEAR_KERNELS(bf16, 2, avx512bf16), LINEAR_KERNELS(bf16, 2, amx),
};

struct Shape {
  const char* name;
  int64_t K, N;
  int args;
};
const Shape kShapes[] = {
    {"qkv", 576, 960, 0},   {"o", 576, 576, 1},          {"gate_up", 576, 3072, 2},
    {"down", 1536, 576, 1}, {"lm_head", 576, 49152, 0},
};
constexpr int64_t kRows[] = {1, 8, 32, 512, 2048};
constexpr int64_t kMostLogitRows = 512;

bool supported(const char* isa) {
  const std::string name = isa;
  if (name == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (name == "avx512") return __builtin_cpu_supports("x86-64-v4");
  if (name == "avx512bf16") return __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512bf16");
  return kernels::request_amx_permission();
}

struct Ceilings {
  double bytes_per_second = 0;
  double fma_avx2 = 0, fma_avx512 = 0, dot_avx512bf16 = 0, dot_amx = 0;  // FLOP/s of all threads

  double flops(const Kernel& k) const {
    const std::string isa = k.isa;
    return isa == "avx2" ? fma_avx2 : isa == "avx512" ? fma_avx512 : isa == "amx" ? dot_amx : dot_avx512bf16;
  }
};

double tenth_percentile(std::vector<double> samples) {
  const auto nth = samples.begin() + static_cast<int64_t>(samples.size() / 10);
  std::nth_element(samples.begin(), nth, samples.end());
  return *nth;
}

double peak(Crew& crew, int rounds, double (*loop)(int64_t)) {
  std::vector<double> seconds_per_flop;
  for (int r = 0; r < 20 * rounds; ++r) {
    std::atomic<int64_t> total{0};
    const double start = now_seconds();
    crew.run([&](int) { total += static_cast<int64_t>(loop(20000)); });
    seconds_per_flop.push_back((now_seconds() - start) / static_cast<double>(total));
  }
  return 1 / tenth_percentile(seconds_per_flop);
}

double read_bandwidth(Crew& crew, int rounds, const char* memory, int64_t bytes) {
  constexpr int64_t kSlice = int64_t{4} << 20;
  const int64_t share = kSlice / crew.size() / 256 * 256;
  std::vector<double> seconds_per_byte;
  std::atomic<int64_t> sink{0};
  for (int r = 0; r < rounds; ++r) {
    for (int64_t at = 0; at + kSlice <= bytes; at += kSlice) {
      const double start = now_seconds();
      crew.run([&](int w) { sink += benchmarks::read_all(memory + at + w * share, share); });
      seconds_per_byte.push_back((now_seconds() - start) / static_cast<double>(share * crew.size()));
    }
  }
  return 1 / tenth_percentile(seconds_per_byte);
}

// The best of several moments: a neighbour may take the processor for longer than one measurement lasts.
Ceilings measure_ceilings(Crew& crew, int rounds, const char* memory, int64_t bytes) {
  Ceilings c;
  for (int moment = 0; moment < 4; ++moment) {
    c.bytes_per_second = std::max(c.bytes_per_second, read_bandwidth(crew, rounds, memory, bytes));
    c.fma_avx2 = std::max(c.fma_avx2, peak(crew, rounds, benchmarks::fma_avx2));
    if (supported("avx512")) c.fma_avx512 = std::max(c.fma_avx512, peak(crew, rounds, benchmarks::fma_avx512));
    if (supported("avx512bf16")) {
      c.dot_avx512bf16 = std::max(c.dot_avx512bf16, peak(crew, rounds, benchmarks::dot_avx512bf16));
    }
    if (supported("amx")) c.dot_amx = std::max(c.dot_amx, peak(crew, rounds, benchmarks::dot_amx));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return c;
}

struct Memory {
  char *x, *w, *residual, *out;
  int64_t w_bytes;
  std::vector<std::byte*> scratch;
};

double seconds_per_call(Crew& crew, const Kernel& k, const Shape& s, int64_t M, int rounds, const Memory& m) {
  const int64_t layer_bytes = s.N * s.K * k.element_bytes;
  const int64_t layers = std::min(m.w_bytes / layer_bytes, M > 64 ? int64_t{4} : m.w_bytes);
  std::vector<double> seconds;
  for (int64_t call = 0; call < layers * rounds; ++call) {
    std::atomic<int64_t> next_item{0};
    std::vector<ArgValue> args;
    args.push_back({.pointer = m.x});
    args.push_back({.pointer = m.w + call % layers * layer_bytes});
    if (k.args == 1) args.push_back({.pointer = m.residual});
    args.push_back({.pointer = k.args == 1 ? m.residual : m.out});
    for (int64_t v : {M, k.args == 2 ? s.N / 2 : s.N, s.K}) args.push_back({.i64 = v});
    if (k.args == 1) args.push_back({.i64 = 0});  // sums that are not rounded
    const double start = now_seconds();
    crew.run([&](int w) {
      k.fn({args.data(), static_cast<uint32_t>(args.size()), w, crew.size(), &next_item,
            m.scratch[static_cast<size_t>(w)], kernels::kLinearScratchBytes});
    });
    seconds.push_back(now_seconds() - start);
  }
  return tenth_percentile(seconds);
}

}  // namespace

int main(int argc, char** argv) {
  int threads = static_cast<int>(std::thread::hardware_concurrency()), rounds = 3;
  int64_t only_rows = 0;
  std::string filter;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--threads") threads = std::max(1, std::atoi(argv[i + 1]));
    if (flag == "--rounds") rounds = std::max(1, std::atoi(argv[i + 1]));
    if (flag == "--rows") only_rows = std::atoll(argv[i + 1]);
    if (flag == "--kernel") filter = argv[i + 1];
  }
  if (threads == 1) g_clock = CLOCK_THREAD_CPUTIME_ID;
  Crew crew(threads);
  const int64_t weight_bytes = int64_t{192} << 20;
  Memory m{huge_alloc(size_t{2048} * 1536 * 4), huge_alloc(static_cast<size_t>(weight_bytes)),
           huge_alloc(size_t{2048} * 576 * 4), huge_alloc(static_cast<size_t>(kMostLogitRows) * 49152 * 4), weight_bytes, {}};
  for (int w = 0; w < threads; ++w) {
    m.scratch.push_back(reinterpret_cast<std::byte*>(huge_alloc(kernels::kLinearScratchBytes)));
  }
  const Ceilings c = measure_ceilings(crew, rounds, m.w, weight_bytes);
  std::printf("%d threads; read %.1f GB/s; GFLOP/s: avx2 %.0f, avx512 %.0f, avx512bf16 %.0f, amx %.0f\n", threads,
              c.bytes_per_second / 1e9, c.fma_avx2 / 1e9, c.fma_avx512 / 1e9, c.dot_avx512bf16 / 1e9, c.dot_amx / 1e9);
  std::printf("%-32s %-8s %5s %10s %8s %9s %11s\n", "kernel", "shape", "rows", "us", "GB/s", "GFLOP/s", "efficiency");
  for (const Kernel& k : kKernels) {
    if (std::string(k.symbol).find(filter) == std::string::npos || !supported(k.isa)) continue;
    for (const Shape& s : kShapes) {
      if (s.args != k.args) continue;
      for (int64_t M : kRows) {
        if ((only_rows != 0 && M != only_rows) || M * s.N > kMostLogitRows * 49152) continue;
        const double best = seconds_per_call(crew, k, s, M, rounds, m);
        const double bytes = static_cast<double>(s.N * s.K * k.element_bytes), flops = 2.0 * M * s.N * s.K;
        const double least = std::max(bytes / c.bytes_per_second, flops / c.flops(k));
        std::printf("%-32s %-8s %5ld %10.1f %8.1f %9.1f %10.0f%%\n", k.symbol, s.name, static_cast<long>(M), best * 1e6,
                    bytes / best / 1e9, flops / best / 1e9, 100 * least / best);
      }
    }
  }
  return 0;
}
