// The entry points of linear.h, on top of an instruction set's Projector: for an element type `Element`,
//   Projector::project(inv, num_rows, num_panels, K, epilogue)   with x and w as arguments 0 and 1
#pragma once

#include "linear.h"
#include "linear_epilogue.h"

namespace tokenspeed::kernels::TS_ISA {

template <class Projector>
void linear(const Invocation& inv) {
  const int64_t M = inv.i64(3), N = inv.i64(4), K = inv.i64(5);
  Projector::project(inv, M, panels_for(N), K, StoreEpilogue{inv.ptr<float>(2), N});
}

template <class Projector>
void linear_add(const Invocation& inv) {
  const int64_t M = inv.i64(4), N = inv.i64(5), K = inv.i64(6);
  const float* residual = inv.ptr<const float>(2);
  float* out = inv.ptr<float>(3);
  if constexpr (sizeof(typename Projector::Element) == sizeof(bf16)) {
    if (inv.i64(7) != 0) return Projector::project(inv, M, panels_for(N), K, AddEpilogue<true>{residual, out, N});
  }
  Projector::project(inv, M, panels_for(N), K, AddEpilogue<false>{residual, out, N});
}

template <class Projector>
void linear_silu_mul(const Invocation& inv) {
  using T = typename Projector::Element;
  const int64_t M = inv.i64(3), F = inv.i64(4), K = inv.i64(5);
  Projector::project(inv, M, 2 * panels_for(F), K, SiluMulEpilogue<T>{inv.ptr<T>(2), F});
}

}  // namespace tokenspeed::kernels::TS_ISA
