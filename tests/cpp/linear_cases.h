// What the tests of the projections share: kernels of this processor, guarded memory, packed operands, a double
// precision reference, and a run by real threads.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <random>
#include <string>
#include <thread>

#include "linear.h"
#include "test.h"

namespace tokenspeed::testing {

using kernels::ArgValue;
using kernels::Invocation;

enum class Op { Linear, Add, SiluMul };

struct LinearKernel {
  const char* symbol;
  kernels::KernelFn fn;
  Op op;
  bool bf16;
  const char* isa;
};

#define TS_LINEAR_KERNELS(dt, is_bf16, isa)                                                        \
  {"linear_" #dt "_" #isa, kernels::linear_##dt##_##isa, Op::Linear, is_bf16, #isa},               \
      {"linear_add_" #dt "_" #isa, kernels::linear_add_##dt##_##isa, Op::Add, is_bf16, #isa},      \
      {"linear_silu_mul_" #dt "_" #isa, kernels::linear_silu_mul_##dt##_##isa, Op::SiluMul, is_bf16, #isa}

inline bool processor_has(const std::string& isa) {
  if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == "avx512") return __builtin_cpu_supports("x86-64-v4");
  if (isa == "avx512bf16") return __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512bf16");
  return kernels::request_amx_permission();
}

// Every projection that this processor can run; says once which instruction sets it cannot.
inline const std::vector<LinearKernel>& runnable_kernels() {
  static const std::vector<LinearKernel> runnable = [] {
    const LinearKernel all[] = {
        TS_LINEAR_KERNELS(f32, false, avx2),      TS_LINEAR_KERNELS(f32, false, avx512),
        TS_LINEAR_KERNELS(bf16, true, avx2),      TS_LINEAR_KERNELS(bf16, true, avx512),
        TS_LINEAR_KERNELS(bf16, true, avx512bf16), TS_LINEAR_KERNELS(bf16, true, amx),
    };
    for (const char* isa : {"avx2", "avx512", "avx512bf16", "amx"}) {
      if (!processor_has(isa)) std::printf("skipped: this processor or system has no %s\n", isa);
    }
    std::vector<LinearKernel> kept;
    for (const LinearKernel& k : all) {
      if (processor_has(k.isa)) kept.push_back(k);
    }
    return kept;
  }();
  return runnable;
}

// Memory that ends where an unmapped page begins, and that starts after bytes which must keep their value.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = (bytes + kCanary + page - 1) / page * page + page;
    base_ = static_cast<std::byte*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + mapped_ - page, page, PROT_NONE);
    data_ = base_ + mapped_ - page - bytes;
    std::memset(base_, kValue, static_cast<size_t>(data_ - base_));
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(base_, mapped_); }

  template <typename T>
  T* as() { return reinterpret_cast<T*>(data_); }
  size_t size() const { return bytes_; }
  bool intact() const {
    for (const std::byte* p = base_; p < data_; ++p) {
      if (*p != std::byte{kValue}) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kCanary = 256;
  static constexpr unsigned char kValue = 0xa5;
  size_t bytes_, mapped_;
  std::byte* base_;
  std::byte* data_;
};

inline uint16_t to_bf16(float f) {
  uint32_t w;
  std::memcpy(&w, &f, 4);
  return static_cast<uint16_t>((w + 0x7fffu + ((w >> 16) & 1u)) >> 16);
}
inline float from_bf16(uint16_t b) {
  const uint32_t w = static_cast<uint32_t>(b) << 16;
  float f;
  std::memcpy(&f, &w, 4);
  return f;
}

// One projection's operands: N counts output columns, that is F for SiluMul. Values are what the kernel sees.
struct Problem {
  Op op;
  bool bf16;
  int64_t M, N, K;
  std::vector<float> x;         // [M][K]
  std::vector<float> w;         // [N][K], for SiluMul [2N][K]: gate rows, then up rows
  std::vector<float> residual;  // [M][N]
  bool rounded = false;         // Add: the product and the sum are rounded

  int64_t element_bytes() const { return bf16 ? 2 : 4; }
  int64_t out_bytes() const { return M * N * (op == Op::SiluMul ? element_bytes() : 4); }
};

inline Problem random_problem(Op op, bool bf16, int64_t M, int64_t N, int64_t K, unsigned seed) {
  Problem p{op, bf16, M, N, K, {}, {}, {}, false};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& v, int64_t count, bool rounded) {
    v.resize(static_cast<size_t>(count));
    for (float& f : v) f = rounded ? from_bf16(to_bf16(normal(random))) : normal(random);
  };
  fill(p.x, M * K, bf16);
  fill(p.w, (op == Op::SiluMul ? 2 : 1) * N * K, bf16);
  fill(p.residual, M * N, false);
  return p;
}

inline void put(std::byte* base, int64_t index, bool bf16, float value) {
  if (bf16) {
    reinterpret_cast<uint16_t*>(base)[index] = to_bf16(value);
  } else {
    reinterpret_cast<float*>(base)[index] = value;
  }
}

// Rows of W into panel `panel` and on, every `stride`-th: [N/16][K][16], or [N/16][K/2][16][2] for bf16.
inline void pack_rows(const Problem& p, int64_t first_row, int64_t panel, int64_t stride, std::byte* out) {
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t base = (panel + n / 16 * stride) * p.K * 16, lane = n % 16;
    for (int64_t k = 0; k < p.K; ++k) {
      const int64_t at = p.bf16 ? k / 2 * 32 + lane * 2 + k % 2 : k * 16 + lane;
      put(out, base + at, p.bf16, p.w[static_cast<size_t>((first_row + n) * p.K + k)]);
    }
  }
}

// A problem's operands in the memory that a kernel sees.
class Operands {
 public:
  explicit Operands(const Problem& p)
      : problem_(p), x_(static_cast<size_t>(p.M * p.K * p.element_bytes())),
        w_(static_cast<size_t>((p.N + 15) / 16 * (p.op == Op::SiluMul ? 2 : 1) * p.K * 16 * p.element_bytes())) {
    for (int64_t i = 0; i < p.M * p.K; ++i) put(x_.as<std::byte>(), i, p.bf16, p.x[static_cast<size_t>(i)]);
    if (p.op == Op::SiluMul) {
      pack_rows(p, 0, 0, 2, w_.as<std::byte>());
      pack_rows(p, p.N, 1, 2, w_.as<std::byte>());
    } else {
      pack_rows(p, 0, 0, 1, w_.as<std::byte>());
    }
  }

  // Rows first .. first + count - 1 as a step of their own, by `workers` threads; the output's bytes.
  std::vector<std::byte> run(const LinearKernel& k, int64_t first, int64_t count, int workers, bool alias) {
    const Problem& p = problem_;
    const size_t row_bytes = static_cast<size_t>(p.N) * (p.op == Op::SiluMul && p.bf16 ? 2 : 4);
    Guarded out(row_bytes * static_cast<size_t>(count)), residual(static_cast<size_t>(count * p.N) * 4);
    std::memset(out.as<std::byte>(), 0xff, out.size());
    float* before = alias ? out.as<float>() : residual.as<float>();
    if (p.op == Op::Add && count > 0) {
      std::memcpy(before, p.residual.data() + first * p.N, static_cast<size_t>(count * p.N) * 4);
    }
    std::vector<ArgValue> args;
    args.push_back({.pointer = x_.as<std::byte>() + first * p.K * p.element_bytes()});
    args.push_back({.pointer = w_.as<std::byte>()});
    if (p.op == Op::Add) args.push_back({.pointer = before});
    args.push_back({.pointer = out.as<std::byte>()});
    for (int64_t v : {count, p.N, p.K}) args.push_back({.i64 = v});
    if (p.op == Op::Add) args.push_back({.i64 = p.rounded});
    call(k.fn, args, workers);
    CHECK(out.intact() && residual.intact() && x_.intact() && w_.intact());
    return {out.as<std::byte>(), out.as<std::byte>() + out.size()};
  }
  std::vector<std::byte> run(const LinearKernel& k, int workers = 2, bool alias = false) {
    return run(k, 0, problem_.M, workers, alias);
  }

 private:
  static void call(kernels::KernelFn fn, const std::vector<ArgValue>& args, int workers) {
    std::atomic<int64_t> next_item{0};
    const auto work = [&](int worker) {
      std::vector<std::byte> memory(kernels::kLinearScratchBytes + 64, std::byte{0xff});
      std::byte* scratch = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
      fn({args.data(), static_cast<uint32_t>(args.size()), worker, workers, &next_item, scratch,
          kernels::kLinearScratchBytes});
    };
    std::vector<std::thread> threads;
    for (int w = 1; w < workers; ++w) threads.emplace_back(work, w);
    work(0);
    for (std::thread& t : threads) t.join();
  }

  const Problem& problem_;
  Guarded x_, w_;
};

// Element (m, n) in double precision, and a bound of the error that float32 accumulation may have made.
struct Expected {
  double value, bound;
};

inline Expected dot(const Problem& p, int64_t m, int64_t w_row) {
  double sum = 0, magnitude = 0;
  for (int64_t k = 0; k < p.K; ++k) {
    const double product = static_cast<double>(p.x[static_cast<size_t>(m * p.K + k)]) *
                           static_cast<double>(p.w[static_cast<size_t>(w_row * p.K + k)]);
    sum += product;
    magnitude += std::fabs(product);
  }
  return {sum, magnitude * static_cast<double>(p.K + 1) * 0x1p-24 + 1e-30};
}

inline Expected expected(const Problem& p, int64_t m, int64_t n) {
  const Expected a = dot(p, m, n);
  if (p.op == Op::Linear) return a;
  if (p.op == Op::Add) {
    const double value = a.value + static_cast<double>(p.residual[static_cast<size_t>(m * p.N + n)]);
    return {value, a.bound + std::fabs(value) * 0x1p-23};
  }
  const Expected up = dot(p, m, p.N + n);
  const double silu = a.value / (1 + std::exp(-a.value));  // |d silu / d gate| < 1.1
  const double value = silu * up.value;
  const double rounding = std::fabs(value) * (p.bf16 ? 0x1p-8 : 0x1p-20);
  const double inputs = std::fabs(up.value) * 1.1 * a.bound + std::fabs(silu) * up.bound + a.bound * up.bound;
  return {value, inputs + rounding + 1e-30};
}

inline double element(const Problem& p, const std::vector<std::byte>& out, int64_t index) {
  if (p.op == Op::SiluMul && p.bf16) {
    return static_cast<double>(from_bf16(reinterpret_cast<const uint16_t*>(out.data())[index]));
  }
  return static_cast<double>(reinterpret_cast<const float*>(out.data())[index]);
}

}  // namespace tokenspeed::testing
