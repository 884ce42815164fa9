// Projections on vector registers (AVX2, AVX-512, AVX-512 BF16). An instruction set brings an Op: how a row of a
// panel (16 columns times one k, or one pair of k) meets a broadcast element of x, and how many registers there are.
//
// A tile of R rows x P panels keeps R * P accumulators in registers over a block of k; between blocks they rest
// in the worker's scratch as float32, which loses nothing, so the order over k is unbroken.
#pragma once

#include <array>
#include <utility>

#include "linear_ops.h"

namespace tokenspeed::kernels::TS_ISA {

inline constexpr int64_t kStepsPerBlock = 512;  // panel rows; kUnitPanels of them are 128 KiB, part of any L2
inline constexpr int64_t kMaxBlockRows = 48;
static_assert(kMaxBlockRows * kUnitColumns * sizeof(float) <= kLinearScratchBytes);

// Weights that this worker will need, fetched in small bursts while it computes. The bits never depend on it.
struct Prefetch {
  static constexpr int64_t kStepsPerBurst = 8;
  const char* at = nullptr;
  const char* end = nullptr;
  int64_t burst_bytes = 0;

  template <_mm_hint Hint>
  void burst() {
    const char* stop = std::min(end, at + burst_bytes);
    for (; at < stop; at += 64) _mm_prefetch(at, Hint);
  }
};

struct TileArgs {
  const std::byte* x;  // first row, at the block's first k
  int64_t x_row_bytes;
  const std::byte* w;  // first panel, at the block's first k
  int64_t panel_bytes;
  int64_t steps;
  float* acc;          // float32[R][kUnitColumns], P * 16 columns used
  bool resume;         // acc holds the sum over the earlier k
};

template <class Op, int R, int P, _mm_hint Hint>
void tile(const TileArgs& a, Prefetch& prefetch) {
  f32x16 acc[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[r][p] = a.resume ? load(a.acc + r * kUnitColumns + p * 16) : zero();
  }
  const std::byte* x = a.x;
  const std::byte* w = a.w;
  const int64_t ld = a.x_row_bytes, panel = a.panel_bytes;
  const auto step = [&] {
#pragma GCC unroll 2
    for (int h = 0; h < Op::kHalves; ++h) {
      // Load again for the second half: keeping what the first one loaded would spill accumulators.
      if (h > 0) asm volatile("" : "+r"(x), "+r"(w));
      typename Op::Weights b[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) b[p] = Op::weights(w + p * panel, h);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const typename Op::Broadcast v = Op::broadcast(x + r * ld, h);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) acc[r][p] = Op::multiply_add(v, b[p], acc[r][p]);
      }
    }
    x += Op::kStepBytes;
    w += kPanelRowBytes;
  };
  int64_t left = a.steps;
  for (; left >= Prefetch::kStepsPerBurst; left -= Prefetch::kStepsPerBurst) {
    prefetch.burst<Hint>();
    for (int s = 0; s < Prefetch::kStepsPerBurst; ++s) step();
  }
  for (; left > 0; --left) step();
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) store(a.acc + r * kUnitColumns + p * 16, acc[r][p]);
  }
}

using TileFn = void (*)(const TileArgs&, Prefetch&);

// tiles[R - 1]: R rows by P panels.
template <class Op, int P, _mm_hint Hint, int... R>
constexpr auto tiles_by_rows(std::integer_sequence<int, R...>) {
  return std::array<TileFn, sizeof...(R)>{&tile<Op, R + 1, P, Hint>...};
}

template <class Op>
class SimdProjector {
 public:
  using Element = typename Op::Element;

  template <class Epilogue>
  static void project(const Invocation& inv, int64_t M, int64_t num_panels, int64_t K, const Epilogue& epilogue) {
    const SimdProjector p(inv, K);
    if (M <= Op::kStreamRows) {
      p.stream(inv, UnitSpace(M, Op::kStreamRows, 1, num_panels, inv.num_workers, true), epilogue);
    } else {
      p.blocked(inv, UnitSpace(M, kMaxBlockRows, Op::kTileRows, num_panels, inv.num_workers, false), epilogue);
    }
  }

 private:
  SimdProjector(const Invocation& inv, int64_t K)
      : x_(inv.ptr<const std::byte>(0)), x_row_bytes_(K * static_cast<int64_t>(sizeof(Element))),
        w_(inv.ptr<const std::byte>(1)), steps_(x_row_bytes_ / Op::kStepBytes),
        panel_bytes_(steps_ * kPanelRowBytes), acc_(reinterpret_cast<float*>(inv.scratch)) {}

  TileArgs tile_args(int64_t row, int64_t panel, int64_t step, int64_t steps, float* acc) const {
    return {x_ + row * x_row_bytes_ + step * Op::kStepBytes, x_row_bytes_,
            w_ + panel * panel_bytes_ + step * kPanelRowBytes, panel_bytes_, steps, acc, step > 0};
  }

  // All rows in one tile, one panel after the other: memory is read in order, once. With one to four rows the
  // hardware prefetcher keeps up by itself, and best undisturbed; with more it needs help.
  template <class Epilogue>
  void stream(const Invocation& inv, const UnitSpace& units, const Epilogue& epilogue) const {
    static constexpr auto kTiles = tiles_by_rows<Op, 1, _MM_HINT_T0>(
        std::make_integer_sequence<int, Op::kStreamRows>{});
    constexpr int64_t kAhead = 2048;
    for (Unit unit; units.claim(inv, unit);) {
      const char* begin = reinterpret_cast<const char*>(w_ + unit.panel * panel_bytes_);
      Prefetch prefetch{begin + kAhead, begin + unit.num_panels * panel_bytes_,
                        unit.num_rows * Op::kHalves > 4 ? Prefetch::kStepsPerBurst * kPanelRowBytes : 0};
      for_each_part(unit, [&](const Unit& part) {
        for (int64_t p = 0; p < part.num_panels; ++p) {
          kTiles[static_cast<size_t>(part.num_rows - 1)](
              tile_args(part.row, part.panel + p, 0, steps_, acc_ + p * 16), prefetch);
        }
        epilogue(part, acc_);
      });
    }
  }

  // A unit is claimed one ahead, so that its operands arrive in L2 while the current one computes.
  template <class Epilogue>
  void blocked(const Invocation& inv, const UnitSpace& units, const Epilogue& epilogue) const {
    Unit now, next;
    bool more = units.claim(inv, next);
    while (more) {
      now = next;
      more = units.claim(inv, next);
      Prefetch prefetch = more ? prefetch_during(now, next) : Prefetch{};
      multiply(now, prefetch, epilogue);
      epilogue(now, acc_);
    }
  }

  // Rows split evenly over as few tiles as hold them; panels kTilePanels at a time, then halves of that.
  template <class Epilogue>
  void multiply(const Unit& unit, Prefetch& prefetch, const Epilogue& epilogue) const {
    const int64_t tile_rows = rows_per_tile(unit.num_rows);
    for (int64_t step = 0; step < steps_; step += kStepsPerBlock) {
      const int64_t steps = std::min(kStepsPerBlock, steps_ - step);
      for (int64_t r = 0; r < unit.num_rows; r += tile_rows) {
        const int64_t rows = std::min(tile_rows, unit.num_rows - r);
        if (step == 0) epilogue.prefetch(unit, r, rows);
        for (int64_t p = 0; p < unit.num_panels;) {
          const int64_t panels = widest(unit.num_panels - p);
          tile_for(rows, panels)(
              tile_args(unit.row + r, unit.panel + p, step, steps, acc_ + r * kUnitColumns + p * 16), prefetch);
          p += panels;
        }
      }
    }
  }

  static int64_t rows_per_tile(int64_t rows) {
    const int64_t passes = (rows + Op::kTileRows - 1) / Op::kTileRows;
    return (rows + passes - 1) / passes;
  }

  static int64_t widest(int64_t panels_left) {
    int64_t panels = Op::kTilePanels;
    while (panels > panels_left) panels /= 2;
    return panels;
  }

  static TileFn tile_for(int64_t rows, int64_t panels) {
    constexpr auto kRows = std::make_integer_sequence<int, Op::kTileRows>{};
    static constexpr auto kOne = tiles_by_rows<Op, 1, _MM_HINT_T1>(kRows);
    if constexpr (Op::kTilePanels == 4) {
      static constexpr auto kTwo = tiles_by_rows<Op, 2, _MM_HINT_T1>(kRows);
      static constexpr auto kFour = tiles_by_rows<Op, 4, _MM_HINT_T1>(kRows);
      if (panels == 4) return kFour[static_cast<size_t>(rows - 1)];
      if (panels == 2) return kTwo[static_cast<size_t>(rows - 1)];
    }
    return kOne[static_cast<size_t>(rows - 1)];
  }

  // What the next unit brings, spread evenly over the bursts of the current one: other panels, or the same panels
  // and other rows.
  Prefetch prefetch_during(const Unit& now, const Unit& next) const {
    const bool panels = next.panel != now.panel;
    const auto* begin = reinterpret_cast<const char*>(panels ? w_ + next.panel * panel_bytes_
                                                             : x_ + next.row * x_row_bytes_);
    const int64_t bytes = panels ? next.num_panels * panel_bytes_ : next.num_rows * x_row_bytes_;
    const int64_t tile_rows = rows_per_tile(now.num_rows);
    const int64_t tiles = (now.num_rows + tile_rows - 1) / tile_rows *
                          ((now.num_panels + Op::kTilePanels - 1) / Op::kTilePanels);
    const int64_t bursts = std::max<int64_t>(tiles * (steps_ / Prefetch::kStepsPerBurst), 1);
    return {begin, begin + bytes, (bytes / bursts / 64 + 1) * 64};
  }

  const std::byte* x_;
  int64_t x_row_bytes_;
  const std::byte* w_;
  int64_t steps_;
  int64_t panel_bytes_;
  float* acc_;  // float32[kMaxBlockRows][kUnitColumns]
};

}  // namespace tokenspeed::kernels::TS_ISA
