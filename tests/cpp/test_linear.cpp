// The projections against double precision, and against themselves: a row's bits may not depend on its step.
#include "linear_cases.h"

namespace {

using namespace tokenspeed::testing;

bool is_isa(const LinearKernel& k, const char* isa) { return std::strcmp(k.isa, isa) == 0; }

void check_values(const LinearKernel& k, const Problem& p, const std::vector<std::byte>& out) {
  for (int64_t m = 0; m < p.M; ++m) {
    for (int64_t n = 0; n < p.N; ++n) {
      const Expected e = expected(p, m, n);
      const double got = element(p, out, m * p.N + n);
      if (std::fabs(got - e.value) <= e.bound) continue;  // false for NaN
      std::printf("%s M=%ld N=%ld K=%ld: out[%ld][%ld] is %.9g, expected %.9g within %.3g\n", k.symbol,
                  static_cast<long>(p.M), static_cast<long>(p.N), static_cast<long>(p.K), static_cast<long>(m),
                  static_cast<long>(n), got, e.value, e.bound);
      CHECK(!"a value is wrong");
      return;
    }
  }
}

struct Shape {
  int64_t M, N, K;
};

TEST(values_match_double_precision) {
  const Shape shapes[] = {{1, 1, 2},     {1, 16, 32},   {2, 17, 64},   {3, 31, 34},    {5, 33, 70},   {7, 100, 96},
                          {12, 50, 66},  {13, 80, 130}, {16, 65, 62},  {17, 250, 128}, {33, 129, 30}, {49, 64, 1100},
                          {50, 36, 1026}, {97, 70, 40}, {100, 48, 94}, {130, 31, 34},  {201, 99, 16}};
  unsigned seed = 1;
  for (const LinearKernel& k : runnable_kernels()) {
    for (const Shape& s : shapes) {
      const Problem p = random_problem(k.op, k.bf16, s.M, s.N, s.K, ++seed);
      check_values(k, p, Operands(p).run(k));
    }
  }
}

TEST(f32_takes_odd_k) {
  for (const LinearKernel& k : runnable_kernels()) {
    if (k.bf16) continue;
    for (const Shape& s : {Shape{1, 20, 1}, Shape{4, 33, 7}, Shape{14, 40, 513}}) {
      const Problem p = random_problem(k.op, false, s.M, s.N, s.K, 7);
      check_values(k, p, Operands(p).run(k));
    }
  }
}

TEST(no_rows_write_nothing) {
  for (const LinearKernel& k : runnable_kernels()) {
    const Problem p = random_problem(k.op, k.bf16, 0, 40, 32, 3);
    CHECK(Operands(p).run(k).empty());
  }
}

TEST(residual_may_be_the_output) {
  for (const LinearKernel& k : runnable_kernels()) {
    if (k.op != Op::Add) continue;
    for (int64_t M : {1, 9, 40, 101}) {
      const Problem p = random_problem(k.op, k.bf16, M, 83, 66, static_cast<unsigned>(M));
      Operands operands(p);
      CHECK(operands.run(k, 2, true) == operands.run(k, 2, false));
    }
  }
}

// What a framework that stores bfloat16 tensors makes of the same accumulators: round(residual + round(product)).
TEST(rounded_sums_are_the_rounded_product_added_and_rounded) {
  for (const LinearKernel& k : runnable_kernels()) {
    if (k.op != Op::Add) continue;
    for (int64_t M : {1, 5, 40, 101}) {
      Problem p = random_problem(k.op, k.bf16, M, 83, 66, static_cast<unsigned>(M));
      std::vector<float> residual = p.residual;
      std::fill(p.residual.begin(), p.residual.end(), 0.0f);
      const std::vector<std::byte> products = Operands(p).run(k);
      p.residual = residual;
      p.rounded = true;
      Operands operands(p);
      const std::vector<std::byte> have = operands.run(k);
      CHECK(operands.run(k, 2, true) == have);
      int64_t wrong = 0;
      for (size_t i = 0; i < residual.size(); ++i) {
        float product, sum;
        std::memcpy(&product, products.data() + 4 * i, 4);
        std::memcpy(&sum, have.data() + 4 * i, 4);
        const float want =
            k.bf16 ? from_bf16(to_bf16(residual[i] + from_bf16(to_bf16(product)))) : residual[i] + product;
        wrong += std::memcmp(&sum, &want, 4) != 0;
      }
      CHECK(wrong == 0);
      p.rounded = false;
      CHECK((Operands(p).run(k) == have) == !k.bf16);
    }
  }
}

// Row by row, each a step of its own, against steps of M rows by one to four workers.
void check_invariance(const LinearKernel& k, int64_t most_rows, int64_t N, int64_t K, int64_t first_M, int64_t by) {
  const Problem p = random_problem(k.op, k.bf16, most_rows, N, K, 11);
  Operands operands(p);
  std::vector<std::byte> alone;
  for (int64_t m = 0; m < p.M; ++m) {
    const std::vector<std::byte> row = operands.run(k, m, 1, 1, false);
    alone.insert(alone.end(), row.begin(), row.end());
  }
  const int64_t row_bytes = p.out_bytes() / p.M;
  for (int64_t M = first_M; M <= most_rows; M += by) {
    const int workers = static_cast<int>(1 + M / by % 4);
    const int64_t first = M % 2 == 0 ? 0 : most_rows - M;  // at the start or the end of the rows
    const std::vector<std::byte> together = operands.run(k, first, M, workers, false);
    for (int64_t m = 0; m < M; ++m) {
      if (std::memcmp(together.data() + m * row_bytes, alone.data() + (first + m) * row_bytes,
                      static_cast<size_t>(row_bytes)) == 0) {
        continue;
      }
      std::printf("%s M=%ld N=%ld K=%ld workers=%d: row %ld differs from the same row alone\n", k.symbol,
                  static_cast<long>(M), static_cast<long>(N), static_cast<long>(K), workers, static_cast<long>(m));
      CHECK(!"a row depends on its step");
      return;
    }
  }
}

TEST(row_alone_equals_row_in_batch) {
  for (const LinearKernel& k : runnable_kernels()) check_invariance(k, 70, 115, 206, 1, 1);
}

TEST(row_alone_equals_row_in_batch_over_several_k_blocks) {
  for (const LinearKernel& k : runnable_kernels()) check_invariance(k, 70, 40, 2100, 1, 23);
}

TEST(row_alone_equals_row_in_large_batch) {
  for (const LinearKernel& k : runnable_kernels()) check_invariance(k, 300, 90, 64, 96, 17);
}

TEST(any_number_of_workers_gives_the_same_bits) {
  for (const LinearKernel& k : runnable_kernels()) {
    for (int64_t M : {1, 8, 32, 150}) {
      const Problem p = random_problem(k.op, k.bf16, M, 333, 98, 23);
      Operands operands(p);
      const std::vector<std::byte> one = operands.run(k, 1);
      for (int workers = 2; workers <= 4; ++workers) CHECK(operands.run(k, workers) == one);
    }
  }
}

TEST(avx2_and_avx512_give_the_same_bits) {
  const std::vector<LinearKernel>& all = runnable_kernels();
  for (const LinearKernel& a : all) {
    for (const LinearKernel& b : all) {
      if (!is_isa(a, "avx2") || !is_isa(b, "avx512") || a.op != b.op || a.bf16 != b.bf16) continue;
      for (const Shape& s : {Shape{1, 100, 576}, Shape{5, 33, 1530}, Shape{29, 80, 576}, Shape{90, 70, 1100}}) {
        const Problem p = random_problem(a.op, a.bf16, s.M, s.N, s.K, 29);
        Operands operands(p);
        CHECK(operands.run(a) == operands.run(b));
      }
    }
  }
}

TEST(silu_is_exact_at_its_ends) {
  const float gates[] = {-1e30f, -1000.0f, -100.0f, -88.0f, -20.0f, -1.0f, -0.0f,
                         0.0f,   1.0f,     20.0f,   88.0f,  100.0f, 1e30f};
  for (const LinearKernel& k : runnable_kernels()) {
    if (k.op != Op::SiluMul) continue;
    for (float gate : gates) {
      Problem p = random_problem(k.op, k.bf16, 1, 1, 2, 1);
      p.x = {1.0f, 0.0f};
      p.w = {k.bf16 ? from_bf16(to_bf16(gate)) : gate, 0.0f, 1.0f, 0.0f};
      const double g = static_cast<double>(p.w[0]), exact = g / (1 + std::exp(-g));
      const double got = element(p, Operands(p).run(k), 0);
      CHECK(std::fabs(got - exact) <= std::fabs(exact) * (k.bf16 ? 0x1p-8 : 0x1p-20) + 1e-7);
    }
  }
}

TEST(nan_stays_in_its_row) {
  for (const LinearKernel& k : runnable_kernels()) {
    Problem p = random_problem(k.op, k.bf16, 20, 18, 34, 31);
    const std::vector<std::byte> clean = Operands(p).run(k);
    for (int64_t i = 0; i < p.K; ++i) p.x[static_cast<size_t>(7 * p.K + i)] = INFINITY;
    p.x[static_cast<size_t>(7 * p.K)] = -INFINITY;  // inf - inf for most weights
    const std::vector<std::byte> out = Operands(p).run(k);
    const int64_t row_bytes = p.out_bytes() / p.M;
    for (int64_t m = 0; m < p.M; ++m) {
      const bool same = std::memcmp(out.data() + m * row_bytes, clean.data() + m * row_bytes,
                                    static_cast<size_t>(row_bytes)) == 0;
      CHECK(same == (m != 7));
    }
  }
}

}  // namespace

TEST_MAIN
