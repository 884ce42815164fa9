// What a native CPU kernel is given, and how the executor finds it. A kernel is one function that the workers
// of the pool call with the same arguments; they share the node's items through `next_item`. Which worker
// computes an item never changes the item's bits. A worker that is late may find its share done by others or
// miss the node altogether, so no item may belong to a certain worker.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tokenspeed::kernels {

// Sizes of the current step, read by kernels through arguments of kind StepScalar.
enum class StepScalar : uint32_t { NumTokens = 0, NumSeqs = 1, NumLogitRows = 2 };
inline constexpr uint32_t kNumStepScalars = 3;

// A LaunchGraph argument after the loader has resolved it. Pointers are region base + offset; a step
// scalar is read from the step's sizes at every run.
union ArgValue {
  void* pointer;
  int64_t i64;
  double f64;
};

struct Invocation {
  const ArgValue* args;             // in the order of the kernel's KernelSpec
  uint32_t num_args;
  int worker;                       // 0 .. num_workers-1
  int num_workers;
  std::atomic<int64_t>* next_item;  // starts at 0 for every node; shared by all workers
  std::byte* scratch;               // this worker's own memory, 64-byte aligned, contents undefined
  size_t scratch_bytes;

  template <typename T>
  T* ptr(uint32_t i) const { return static_cast<T*>(args[i].pointer); }
  int64_t i64(uint32_t i) const { return args[i].i64; }
  float f32(uint32_t i) const { return static_cast<float>(args[i].f64); }
  int64_t claim(int64_t items = 1) const { return next_item->fetch_add(items, std::memory_order_relaxed); }
};

using KernelFn = void (*)(const Invocation&) noexcept;

struct KernelEntry {
  const char* symbol;         // e.g. "linear_bf16_avx512bf16"
  KernelFn fn;
  const char* signature;      // one character an argument: 'p' pointer, 'i' i64 or step scalar, 'f' f64
  size_t scratch_bytes;       // per worker; an upper bound over all legal arguments
};

// Bumped whenever a kernel's arguments, layouts or bits change; an artifact records the one it was built
// against, and the loader refuses any other.
inline constexpr uint32_t kKernelAbi = 5;

// Every kernel of the library, sorted by symbol. (table.cpp)
std::span<const KernelEntry> kernel_table() noexcept;

}  // namespace tokenspeed::kernels
