// Runs kernels/flashinfer/plan.cuh on the host: a thread of the processor for each of the GPU's, which meet at every
// __syncthreads and every shuffle. tests/test_flashinfer_plan.py puts the kernel where PLAN is and compiles this.
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(n)
using std::max, std::min;

constexpr int kThreads = 64;
struct Index {
  unsigned x;
};
static thread_local Index threadIdx;
static std::barrier<> meeting(kThreads);
static int32_t lanes[kThreads];

static void __syncthreads() { meeting.arrive_and_wait(); }
static int32_t exchange(int32_t value, unsigned from) {
  lanes[threadIdx.x] = value;
  __syncthreads();
  const int32_t got = lanes[from];
  __syncthreads();
  return got;
}
static int32_t __shfl_xor_sync(unsigned, int32_t value, int mask) {
  return exchange(value, threadIdx.x ^ static_cast<unsigned>(mask));
}
static int32_t __shfl_up_sync(unsigned, int32_t value, int delta) {
  const unsigned by = static_cast<unsigned>(delta);
  return exchange(value, threadIdx.x % 32 >= by ? threadIdx.x - by : threadIdx.x);
}

PLAN

static std::vector<int32_t> read(size_t count) {
  std::vector<int32_t> values(count);
  for (int32_t& value : values) {
    if (std::scanf("%d", &value) != 1) std::abort();
  }
  return values;
}

template <typename Values>
static void print(const char* name, const Values& values) {
  std::printf("%s", name);
  for (const auto value : values) std::printf(" %d", static_cast<int>(value));
  std::printf("\n");
}

// Reads: the bucket's sizes in the order of PlanSizes, the number of sequences of the step, their lengths, contexts.
int main() {
  const auto s = read(7);
  const auto count = static_cast<size_t>(read(1)[0]);
  const auto lengths = read(count), contexts = read(count);
  std::vector<int32_t> starts(count + 1), step = {0, static_cast<int32_t>(count), 0, 0};
  for (size_t i = 0; i < count; ++i) starts[i + 1] = starts[i] + lengths[i];
  const auto seqs = static_cast<size_t>(s[0]), tiles = static_cast<size_t>(s[3]);
  std::vector<int32_t> request(tiles, -9), query(tiles, -9), kv(tiles, -9), indptr(seqs + 1), last(seqs), out(seqs + 1), chunk(1);
  std::vector<uint8_t> valid(tiles, 9);
  const tokenspeed::PlanArrays arrays{request.data(), query.data(), kv.data(), valid.data(),
                                      indptr.data(), last.data(), out.data(), chunk.data()};
  const tokenspeed::PlanSizes sizes{s[0], s[1], s[2], s[3], s[4], s[5], s[6]};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      threadIdx.x = i;
      tokenspeed::make_plan(starts.data(), contexts.data(), step.data(), arrays, sizes);
    });
  }
  for (std::thread& thread : threads) thread.join();
  print("request", request), print("query", query), print("kv", kv), print("valid", valid), print("indptr", indptr);
  print("last", last), print("out", out), print("chunk", chunk);
}
