// Measures paged_attention and rope_kv_write on SmolLM2-135M's heads (9 query, 3 KV, 64 dims), against the read
// bandwidth and the arithmetic peak of the same threads in the same run. KV of many layers is cycled through, so
// that a decode step's pages come from memory as in a real step.
//
//   bench_attention [--threads N] [--seconds S] [--kernel SUBSTRING] [--split POSITIONS]
//
// Times are the 10th percentile over single calls, ceilings likewise: figures that a busy neighbour disturbs little.
// `efficiency` is the least possible time (KV at full bandwidth, or products at peak, whichever takes longer) over
// the measured one. A causal prefill of n tokens counts the products of its n (n + 1) / 2 visible pairs.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention.h"
#include "ceilings.h"
#include "linear.h"
#include "rope.h"

namespace {

using namespace tokenspeed;
using kernels::ArgValue;
using kernels::Invocation;
using kernels::KernelFn;

constexpr int64_t kQueryHeads = 9, kKvHeads = 3, kDim = 64, kPage = 64;

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Threads that spin between jobs, so that a job of 20 us can be timed.
class Crew {
 public:
  explicit Crew(int size) : size_(size) {
    for (int w = 1; w < size; ++w) threads_.emplace_back([this, w] { serve(w); });
  }
  ~Crew() {
    stop_ = true;
    run([](int) {});
    for (std::thread& t : threads_) t.join();
  }
  int size() const { return size_; }

  void run(std::function<void(int)> job) {
    job_ = std::move(job);
    pending_.store(size_ - 1, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    job_(0);
    while (pending_.load(std::memory_order_acquire) != 0) _mm_pause();
  }
  // Seconds of one call of a kernel.
  double time(KernelFn fn, const std::vector<ArgValue>& args, std::byte* scratch, size_t scratch_bytes) {
    std::atomic<int64_t> next_item{0};
    const double start = now_seconds();
    run([&](int w) {
      fn({args.data(), static_cast<uint32_t>(args.size()), w, size_, &next_item,
          scratch + static_cast<size_t>(w) * scratch_bytes, scratch_bytes});
    });
    return now_seconds() - start;
  }

 private:
  void serve(int worker) {
    for (uint64_t seen = 0; !stop_;) {
      while (generation_.load(std::memory_order_acquire) == seen) _mm_pause();
      ++seen;
      job_(worker);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  int size_;
  std::function<void(int)> job_;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> pending_{0};
  std::vector<std::thread> threads_;
};

// Zero-filled memory on huge pages where the system grants them; it lives until the process ends.
template <class T>
T* huge_alloc(size_t count) {
  constexpr size_t kHuge = size_t{2} << 20;
  const size_t bytes = count * sizeof(T);
  void* p = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("bench_attention: mmap");
    std::exit(1);
  }
  char* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + kHuge - 1) & ~(kHuge - 1));
  madvise(aligned, bytes, MADV_HUGEPAGE);
  std::memset(aligned, 0, bytes);
  return reinterpret_cast<T*>(aligned);
}

double tenth_percentile(std::vector<double> samples) {
  const auto nth = samples.begin() + static_cast<int64_t>(samples.size() / 10);
  std::nth_element(samples.begin(), nth, samples.end());
  return *nth;
}

bool supported(const std::string& isa) {
  if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == "avx512") return __builtin_cpu_supports("x86-64-v4");
  if (isa == "avx512bf16") return __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512bf16");
  return kernels::request_amx_permission();
}

struct Kernel {
  std::string isa;
  int64_t element_bytes;
  KernelFn attention, rope;
  double (*peak)(int64_t rounds);
};

const Kernel kKernels[] = {
    {"avx2", 4, kernels::paged_attention_f32_avx2, kernels::rope_kv_write_f32_avx2, benchmarks::fma_avx2},
    {"avx512", 4, kernels::paged_attention_f32_avx512, kernels::rope_kv_write_f32_avx512, benchmarks::fma_avx512},
    {"avx2", 2, kernels::paged_attention_bf16_avx2, kernels::rope_kv_write_bf16_avx2, benchmarks::fma_avx2},
    {"avx512", 2, kernels::paged_attention_bf16_avx512, kernels::rope_kv_write_bf16_avx512, benchmarks::fma_avx512},
    {"avx512bf16", 2, kernels::paged_attention_bf16_avx512bf16, kernels::rope_kv_write_bf16_avx512,
     benchmarks::dot_avx512bf16},
    {"amx", 2, kernels::paged_attention_bf16_amx, kernels::rope_kv_write_bf16_avx512, benchmarks::dot_amx},
};

double peak_flops(Crew& crew, double (*loop)(int64_t)) {
  std::vector<double> seconds_per_flop;
  for (int i = 0; i < 30; ++i) {
    std::vector<double> done(static_cast<size_t>(crew.size()));
    const double start = now_seconds();
    crew.run([&](int w) { done[static_cast<size_t>(w)] = loop(40000); });
    double flops = 0;
    for (double f : done) flops += f;
    seconds_per_flop.push_back((now_seconds() - start) / flops);
  }
  return 1 / tenth_percentile(seconds_per_flop);
}

double read_bandwidth(Crew& crew) {
  constexpr int64_t kBytes = int64_t{192} << 20;
  static char* const memory = huge_alloc<char>(kBytes);
  std::vector<double> seconds;
  const int64_t part = kBytes / crew.size() / 256 * 256;
  static std::atomic<int64_t> keep{0};
  for (int i = 0; i < 12; ++i) {
    const double start = now_seconds();
    crew.run([&](int w) { keep += benchmarks::read_all(memory + w * part, part); });
    seconds.push_back(now_seconds() - start);
  }
  return static_cast<double>(part * crew.size()) / tenth_percentile(seconds);
}

// Sequences of equal length, and the KV of as many layers as it takes to leave the caches.
struct Workload {
  const char* name;
  int64_t num_seqs, tokens_per_seq, context;
};
const Workload kWorkloads[] = {
    {"prefill", 1, 512, 512},   {"prefill", 1, 2048, 2048}, {"chunk", 1, 512, 2048},
    {"decode", 1, 1, 512},      {"decode", 1, 1, 2048},     {"decode", 8, 1, 512},
    {"decode", 8, 1, 2048},     {"decode", 32, 1, 512},     {"decode", 32, 1, 2048},
};

class Bench {
 public:
  Bench(Crew& crew, const Kernel& kernel, const Workload& work, int64_t split)
      : crew_(crew), kernel_(kernel), work_(work), split_(split), tokens_(work.num_seqs * work.tokens_per_seq),
        pages_((work.context + kPage - 1) / kPage) {
    const int64_t layer = 2 * kKvHeads * kDim * kPage * kernel.element_bytes, all = work.num_seqs * pages_ * layer;
    layers_ = std::max<int64_t>(1, (int64_t{96} << 20) / all);
    layer_bytes_ = layer;
    page_stride_ = layers_ * layer;
    for (int64_t i = 0; i < work.num_seqs * pages_; ++i) page_table_.push_back(static_cast<int32_t>(i));
    std::shuffle(page_table_.begin(), page_table_.end(), std::mt19937(1));
    for (int64_t s = 0; s < work.num_seqs; ++s) {
      cu_seqlens_.push_back(static_cast<int32_t>(s * work.tokens_per_seq));
      context_lens_.push_back(static_cast<int32_t>(work.context));
      for (int64_t p = work.context - work.tokens_per_seq; p < work.context; ++p) {
        positions_.push_back(static_cast<int32_t>(p));
        slots_.push_back(page_table_[static_cast<size_t>(s * pages_ + p / kPage)] * kPage + p % kPage);
      }
    }
    cu_seqlens_.push_back(static_cast<int32_t>(tokens_));
    fill();
  }

  double attention_seconds(int64_t layer) {
    const std::vector<ArgValue> args{
        p(q_), p(kv_ + layer * layer_bytes_), p(cu_seqlens_.data()), p(context_lens_.data()), p(page_table_.data()),
        p(out_), p(workspace_), i(tokens_), i(work_.num_seqs), i(kQueryHeads), i(kKvHeads), i(kDim), i(kPage),
        i(page_stride_), i(pages_), i(split_), f(1 / std::sqrt(static_cast<double>(kDim)))};
    return crew_.time(kernel_.attention, args, scratch_, kernels::kAttentionScratchBytes);
  }
  double rope_seconds(int64_t layer) {
    const std::vector<ArgValue> args{
        p(qkv_), p(table_), p(positions_.data()), p(slots_.data()), p(cu_seqlens_.data()),
        p(kv_ + layer * layer_bytes_), p(q_), i(tokens_), i(work_.num_seqs), i(kQueryHeads), i(kKvHeads), i(kDim),
        i(kPage), i(page_stride_)};
    return crew_.time(kernel_.rope, args, scratch_, kernels::kRopeScratchBytes);
  }
  template <class Call>
  double measure(double budget, const Call& call) {
    std::vector<double> seconds;
    const double start = now_seconds();
    for (int64_t n = 0; n < 12 || now_seconds() - start < budget; ++n) seconds.push_back(call(n % layers_));
    return tenth_percentile(seconds);
  }

  double kv_bytes() const {
    return 2.0 * static_cast<double>(work_.num_seqs * work_.context * kKvHeads * kDim * kernel_.element_bytes);
  }
  double rope_bytes() const {
    return static_cast<double>(tokens_ * kDim * ((kQueryHeads + 2 * kKvHeads) * (4 + kernel_.element_bytes)));
  }
  double flops() const {
    const double n = static_cast<double>(work_.tokens_per_seq), before = static_cast<double>(work_.context) - n;
    return 4.0 * kQueryHeads * kDim * static_cast<double>(work_.num_seqs) * (n * before + n * (n + 1) / 2);
  }
  void release() {
    munmap(kv_, static_cast<size_t>(work_.num_seqs * pages_ * page_stride_));
  }

 private:
  static ArgValue p(const void* x) { ArgValue v; v.pointer = const_cast<void*>(x); return v; }
  static ArgValue i(int64_t x) { ArgValue v; v.i64 = x; return v; }
  static ArgValue f(double x) { ArgValue v; v.f64 = x; return v; }

  void fill() {
    const size_t row = (kQueryHeads + 2 * kKvHeads) * kDim, rows = static_cast<size_t>(tokens_);
    qkv_ = huge_alloc<float>(rows * row);
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    for (size_t j = 0; j < rows * row; ++j) qkv_[j] = normal(random);
    table_ = huge_alloc<float>(static_cast<size_t>(work_.context * kDim));
    for (int64_t j = 0; j < work_.context * kDim; ++j) table_[j] = j % kDim < kDim / 2 ? 1.0f : 0.0f;
    q_ = huge_alloc<std::byte>(rows * kQueryHeads * kDim * 4);
    out_ = huge_alloc<std::byte>(rows * kQueryHeads * kDim * 4);
    scratch_ = huge_alloc<std::byte>(kernels::kAttentionScratchBytes * static_cast<size_t>(crew_.size()));
    const int64_t max_splits = (pages_ * kPage + split_ - 1) / split_;
    workspace_ = huge_alloc<std::byte>(
        kernels::attention_workspace_bytes(work_.num_seqs, kQueryHeads, kDim, max_splits));
    const size_t kv_bytes = static_cast<size_t>(work_.num_seqs * pages_ * page_stride_);
    kv_ = huge_alloc<std::byte>(kv_bytes);
    for (size_t j = 0; j < kv_bytes / 4; ++j) {  // small numbers of either dtype
      const uint32_t bits = 0x3c003c00u | (static_cast<uint32_t>(j * 2654435761u) & 0x81ff81ffu);
      std::memcpy(kv_ + 4 * j, &bits, 4);
    }
    rope_seconds(0);
  }

  Crew& crew_;
  Kernel kernel_;
  Workload work_;
  int64_t split_, tokens_, pages_, layers_ = 1, layer_bytes_ = 0, page_stride_ = 0;
  std::vector<int32_t> page_table_, cu_seqlens_, context_lens_, positions_;
  std::vector<int64_t> slots_;
  float *qkv_ = nullptr, *table_ = nullptr;
  std::byte *q_ = nullptr, *out_ = nullptr, *scratch_ = nullptr, *workspace_ = nullptr, *kv_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  double seconds = 0.4;
  int64_t split = 1024;
  std::string only;
  for (int a = 1; a + 1 < argc; a += 2) {
    const std::string name = argv[a];
    if (name == "--threads") threads = std::atoi(argv[a + 1]);
    else if (name == "--seconds") seconds = std::atof(argv[a + 1]);
    else if (name == "--kernel") only = argv[a + 1];
    else if (name == "--split") split = std::atoll(argv[a + 1]);
    else return std::fprintf(stderr, "bench_attention: unknown option %s\n", name.c_str()), 2;
  }
  Crew crew(threads);
  const double bandwidth = read_bandwidth(crew);
  std::printf("threads %d, split %ld, read bandwidth %.1f GB/s\n", threads, static_cast<long>(split), bandwidth / 1e9);
  for (const Kernel& kernel : kKernels) {
    const std::string name = std::string(kernel.element_bytes == 2 ? "bf16" : "f32") + "_" + kernel.isa;
    if (name.find(only) == std::string::npos || !supported(kernel.isa)) continue;
    const double peak = peak_flops(crew, kernel.peak);
    std::printf("\n%s, peak %.0f GFLOP/s\n%-8s %4s %6s %8s %10s %8s %8s %10s %10s\n", name.c_str(), peak / 1e9, "step",
                "seqs", "tokens", "context", "us", "GFLOP/s", "GB/s", "efficiency", "rope us");
    for (const Workload& work : kWorkloads) {
      Bench bench(crew, kernel, work, split);
      const double t = bench.measure(seconds, [&](int64_t layer) { return bench.attention_seconds(layer); });
      const double rope = bench.measure(seconds / 4, [&](int64_t layer) { return bench.rope_seconds(layer); });
      const double least = std::max(bench.kv_bytes() / bandwidth, bench.flops() / peak);
      std::printf("%-8s %4ld %6ld %8ld %10.1f %8.1f %8.1f %9.0f%% %10.1f\n", work.name,
                  static_cast<long>(work.num_seqs), static_cast<long>(work.tokens_per_seq),
                  static_cast<long>(work.context), t * 1e6, bench.flops() / t / 1e9, bench.kv_bytes() / t / 1e9,
                  100 * least / t, rope * 1e6);
      bench.release();
    }
  }
  return 0;
}
