// The small row kernels: RMS norm, embedding and row gather, against plain loops, on both instruction sets.
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "device/cpu_features.h"
#include "embedding.h"
#include "gather.h"
#include "norm.h"
#include "test.h"

using namespace tokenspeed::kernels;

namespace {

const tokenspeed::device::CpuFeatures kCpu = tokenspeed::device::CpuFeatures::detect();

ArgValue pointer(const void* p) {
  ArgValue a{};
  a.pointer = const_cast<void*>(p);
  return a;
}
ArgValue integer(int64_t v) {
  ArgValue a{};
  a.i64 = v;
  return a;
}
ArgValue real(double v) {
  ArgValue a{};
  a.f64 = v;
  return a;
}

// Runs a kernel as one worker does.
void run(KernelFn fn, const std::vector<ArgValue>& args) {
  std::atomic<int64_t> next{0};
  fn(Invocation{args.data(), static_cast<uint32_t>(args.size()), 0, 1, &next, nullptr, 0});
}

struct Kernels {
  const char* isa;
  KernelFn norm_f32, norm_bf16, embedding_f32, embedding_bf16, gather;
};
std::vector<Kernels> runnable() {
  std::vector<Kernels> all;
  if (kCpu.avx2) {
    all.push_back({"avx2", rms_norm_f32_avx2, rms_norm_bf16_avx2, embedding_f32_avx2, embedding_bf16_avx2,
                   gather_rows_f32_avx2});
  }
  if (kCpu.avx512) {
    all.push_back({"avx512", rms_norm_f32_avx512, rms_norm_bf16_avx512, embedding_f32_avx512, embedding_bf16_avx512,
                   gather_rows_f32_avx512});
  }
  return all;
}

std::vector<float> random_floats(size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  std::vector<float> v(count);
  for (float& x : v) x = normal(engine);
  return v;
}

uint16_t rounded_bf16(float f) {  // to nearest even; finite values only
  uint32_t w;
  std::memcpy(&w, &f, 4);
  return static_cast<uint16_t>((w + 0x7fffu + ((w >> 16) & 1u)) >> 16);
}
float widened(uint16_t b) {
  const uint32_t w = static_cast<uint32_t>(b) << 16;
  float f;
  std::memcpy(&f, &w, 4);
  return f;
}

std::vector<double> expected_norm(const std::vector<float>& x, const std::vector<float>& weight, size_t width,
                                  double eps) {
  std::vector<double> out(x.size());
  for (size_t row = 0; row < x.size() / width; ++row) {
    double sum = 0;
    for (size_t h = 0; h < width; ++h) sum += static_cast<double>(x[row * width + h]) * x[row * width + h];
    const double scale = 1.0 / std::sqrt(sum / static_cast<double>(width) + eps);
    for (size_t h = 0; h < width; ++h) out[row * width + h] = x[row * width + h] * scale * weight[h];
  }
  return out;
}

}  // namespace

TEST(rms_norm_agrees_with_float64) {
  for (const Kernels& k : runnable()) {
    for (const size_t width : {16, 48, 576, 100, 7}) {
      const size_t rows = 9;
      const auto x = random_floats(rows * width, 1), weight = random_floats(width, 2);
      const auto want = expected_norm(x, weight, width, 1e-5);
      std::vector<float> f32(rows * width, -1.0f);
      std::vector<uint16_t> bf16(rows * width, 0xffff);
      const auto m = integer(rows), h = integer(static_cast<int64_t>(width)), eps = real(1e-5);
      run(k.norm_f32, {pointer(x.data()), pointer(weight.data()), pointer(f32.data()), m, h, eps});
      run(k.norm_bf16, {pointer(x.data()), pointer(weight.data()), pointer(bf16.data()), m, h, eps});
      for (size_t i = 0; i < want.size(); ++i) {
        CHECK(std::abs(f32[i] - want[i]) <= 1e-6 * std::abs(want[i]));
        CHECK(bf16[i] == rounded_bf16(f32[i]));  // one rounding, from the same float32
      }
    }
  }
}

TEST(rms_norm_rows_do_not_depend_on_each_other) {
  const size_t rows = 33, width = 576;
  const auto x = random_floats(rows * width, 3), weight = random_floats(width, 4);
  std::vector<std::vector<float>> results;
  for (const Kernels& k : runnable()) {
    std::vector<float> together(rows * width), alone(width);
    const auto h = integer(width), eps = real(1e-6);
    run(k.norm_f32, {pointer(x.data()), pointer(weight.data()), pointer(together.data()), integer(rows), h, eps});
    for (size_t row = 0; row < rows; ++row) {
      run(k.norm_f32, {pointer(&x[row * width]), pointer(weight.data()), pointer(alone.data()), integer(1), h, eps});
      CHECK(std::memcmp(alone.data(), &together[row * width], width * sizeof(float)) == 0);
    }
    results.push_back(together);
  }
  for (const auto& result : results) CHECK(result == results.front());  // both instruction sets: the same bits
}

TEST(embedding_reads_panels_and_last_tokens) {
  const int64_t vocab = 48, width = 34;
  std::vector<float> f32(static_cast<size_t>(vocab * width));
  std::vector<uint16_t> bf16(f32.size());
  const auto value = [](int64_t token, int64_t h) { return static_cast<float>(token * 4 + h % 4); };
  for (int64_t t = 0; t < vocab; ++t) {
    for (int64_t h = 0; h < width; ++h) {
      f32[static_cast<size_t>(((t / 16) * width + h) * 16 + t % 16)] = value(t, h);
      bf16[static_cast<size_t>((((t / 16) * (width / 2) + h / 2) * 16 + t % 16) * 2 + h % 2)] =
          rounded_bf16(value(t, h));
    }
  }
  const std::vector<int32_t> ids = {0, 47, -1, 16, -3, 15}, last = {33, 5, 46};
  const std::vector<int64_t> want = {0, 47, 33, 16, 46, 15};
  for (const Kernels& k : runnable()) {
    for (const bool half : {false, true}) {
      std::vector<float> out(ids.size() * static_cast<size_t>(width), -1.0f);
      run(half ? k.embedding_bf16 : k.embedding_f32,
          {pointer(ids.data()), pointer(last.data()), half ? pointer(bf16.data()) : pointer(f32.data()),
           pointer(out.data()), integer(static_cast<int64_t>(ids.size())), integer(width)});
      for (size_t i = 0; i < ids.size(); ++i) {
        for (int64_t h = 0; h < width; ++h) {
          const float expected = half ? widened(rounded_bf16(value(want[i], h))) : value(want[i], h);
          CHECK(out[i * static_cast<size_t>(width) + static_cast<size_t>(h)] == expected);
        }
      }
    }
  }
}

TEST(gather_takes_the_named_rows) {
  const int64_t width = 19;
  const auto x = random_floats(static_cast<size_t>(8 * width), 5);
  const std::vector<int32_t> rows = {1, 1, 4, 7, 0};
  for (const Kernels& k : runnable()) {
    std::vector<float> out(rows.size() * static_cast<size_t>(width) + 4, -1.0f);
    run(k.gather, {pointer(x.data()), pointer(rows.data()), pointer(out.data()), integer(5), integer(width)});
    for (size_t r = 0; r < rows.size(); ++r) {
      CHECK(std::memcmp(&out[r * width], &x[static_cast<size_t>(rows[r]) * width], width * sizeof(float)) == 0);
    }
    for (size_t i = out.size() - 4; i < out.size(); ++i) CHECK(out[i] == -1.0f);  // nothing beyond the last row
  }
}

TEST(no_rows_means_no_writes) {
  float out = -1.0f;
  for (const Kernels& k : runnable()) {
    run(k.norm_f32, {pointer(nullptr), pointer(nullptr), pointer(&out), integer(0), integer(16), real(1e-5)});
    run(k.gather, {pointer(nullptr), pointer(nullptr), pointer(&out), integer(0), integer(16)});
    run(k.embedding_f32,
        {pointer(nullptr), pointer(nullptr), pointer(nullptr), pointer(&out), integer(0), integer(16)});
  }
  CHECK(out == -1.0f);
}

TEST_MAIN
