#include <algorithm>
#include <array>
#include <cmath>

#include "rope_table.h"

namespace tokenspeed::kernels {
namespace {

constexpr int64_t kBlock = 64;  // positions of an item

// pi/2 in three parts (Cody and Waite): the first two have 33 bits each, so their products with an integer below 2^20
// are exact.
constexpr double kHalfPi1 = 0x1.921fb54400000p+0;
constexpr double kHalfPi2 = 0x1.0b4611a600000p-34;
constexpr double kHalfPi3 = 0x1.3198a2e037073p-69;
constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;

// Taylor's coefficients +-1/n! of eight terms, the last first: n = last, last - 2, ... with signs that alternate.
constexpr std::array<double, 8> taylor(int last) {
  std::array<double, 8> terms{};
  for (int i = 0, n = last; i < 8; ++i, n -= 2) {
    double factorial = 1.0;
    for (int k = 2; k <= n; ++k) factorial *= k;
    terms[static_cast<size_t>(i)] = (n / 2 % 2 == 0 ? 1.0 : -1.0) / factorial;
  }
  return terms;
}
constexpr std::array<double, 8> kSine = taylor(17), kCosine = taylor(18);

double polynomial(const std::array<double, 8>& terms, double z) {
  double p = 0.0;
  for (const double term : terms) p = z * (p + term);
  return p;
}

// On |r| <= pi/4: what the polynomials leave out is below 2^-58 of the result.
double sine_near_zero(double r) { return r + r * polynomial(kSine, r * r); }
double cosine_near_zero(double r) {
  const double z = r * r, half = 0.5 * z;
  return 1.0 - (half - z * polynomial(kCosine, z));
}

}  // namespace

CosSin cos_sin(float angle) noexcept {
  const double x = angle, n = std::nearbyint(x * kTwoOverPi);
  const double r = ((x - n * kHalfPi1) - n * kHalfPi2) - n * kHalfPi3;
  const double c = cosine_near_zero(r), s = sine_near_zero(r);
  switch (static_cast<int64_t>(n) & 3) {
    case 0: return {static_cast<float>(c), static_cast<float>(s)};
    case 1: return {static_cast<float>(-s), static_cast<float>(c)};
    case 2: return {static_cast<float>(-c), static_cast<float>(-s)};
    default: return {static_cast<float>(s), static_cast<float>(-c)};
  }
}

void rope_table_avx2(const Invocation& inv) noexcept {
  const float* frequencies = inv.ptr<const float>(0);
  float* table = inv.ptr<float>(1);
  const int64_t positions = inv.i64(2), head_dim = inv.i64(3), half = head_dim / 2;
  const float factor = inv.f32(4);
  for (int64_t first; (first = inv.claim(1) * kBlock) < positions;) {
    for (int64_t p = first; p < std::min(first + kBlock, positions); ++p) {
      float* row = table + p * head_dim;
      for (int64_t i = 0; i < half; ++i) {
        const CosSin turn = cos_sin(static_cast<float>(p) * frequencies[i]);
        row[i] = factor * turn.cos;
        row[half + i] = factor * turn.sin;
      }
    }
  }
}

}  // namespace tokenspeed::kernels
