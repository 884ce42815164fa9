// Projections on AMX: bf16 tiles, the same instruction for one row as for many. A panel is an AMX B operand as it
// lies in memory: 16 pair rows of 64 bytes are one tile of 32 k. Blocks of up to 32 rows by 2 panels fill the eight
// tile registers: C 0-3 (row tile * 2 + panel), A 4-5, B 6-7.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "linear_ops.h"

namespace tokenspeed::kernels {
namespace amx {

inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileRowBytes = 64;
inline constexpr int64_t kTileBytes = kTileRows * kTileRowBytes;
inline constexpr int64_t kBlockRows = 2 * kTileRows;
inline constexpr int64_t kMaxUnitRows = 3 * kBlockRows;

// A worker's scratch: accumulators float32[kMaxUnitRows][kUnitColumns], then the last k of two A and two B tiles,
// padded with zeros.
inline constexpr int64_t kAccBytes = kMaxUnitRows * kUnitColumns * static_cast<int64_t>(sizeof(float));
inline constexpr int64_t kTailBytes = 4 * kTileBytes;
static_assert(kAccBytes + kTailBytes <= static_cast<int64_t>(kLinearScratchBytes));

// The thread's tile configuration: row counts are exact, so no row past M is read. Loading one clears all tiles.
class TileConfig {
 public:
  TileConfig() = default;
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;
  ~TileConfig() {
    if (rows_ != 0) _tile_release();
  }

  // For blocks of `rows` (1 .. 32) rows: the first 16 in row tile 0, the others in row tile 1.
  void set(int64_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    const auto upper = static_cast<uint8_t>(std::min(rows, kTileRows));
    const auto lower = static_cast<uint8_t>(std::max<int64_t>(rows - kTileRows, 0));
    Layout config = {};
    config.palette = 1;
    const uint8_t tile_rows[8] = {upper, upper, lower, lower, upper, lower, kTileRows, kTileRows};
    for (int t = 0; t < 8; ++t) {
      config.rows[t] = tile_rows[t];
      config.row_bytes[t] = tile_rows[t] == 0 ? 0 : kTileRowBytes;
    }
    // GCC 12 declares that ldtilecfg reads 8 bytes and would drop the stores to the other 56.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }

 private:
  struct alignas(64) Layout {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Layout) == 64);

  int64_t rows_ = 0;
};

struct BlockArgs {
  const std::byte* x;  // bf16[rows][K]
  int64_t x_row_bytes;
  const std::byte* w;  // the first of the panels
  int64_t panel_bytes;
  float* acc;          // float32[rows][kUnitColumns]
  std::byte* tail;     // kTailBytes
};

// C[i][j] += A[i] * B[j], A at `a` (row tiles 16 rows apart), B at `b` (panels `panel_bytes` apart).
template <int RowTiles, int Panels>
TS_INLINE void multiply_add(const std::byte* a, int64_t a_row_bytes, const std::byte* b, int64_t panel_bytes) {
  _tile_loadd(4, a, a_row_bytes);
  _tile_loadd(6, b, kTileRowBytes);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (Panels == 2) {
    _tile_loadd(7, b + panel_bytes, kTileRowBytes);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (RowTiles == 2) {
    _tile_loadd(5, a + kTileRows * a_row_bytes, a_row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (Panels == 2) _tile_dpbf16ps(3, 5, 7);
  }
}

template <int RowTiles, int Panels>
TS_INLINE void zero_accumulators() {
  _tile_zero(0);
  if constexpr (Panels == 2) _tile_zero(1);
  if constexpr (RowTiles == 2) _tile_zero(2);
  if constexpr (RowTiles == 2 && Panels == 2) _tile_zero(3);
}

template <int RowTiles, int Panels>
TS_INLINE void store_accumulators(float* acc) {
  constexpr int64_t kPitch = kUnitColumns * static_cast<int64_t>(sizeof(float));
  _tile_stored(0, acc, kPitch);
  if constexpr (Panels == 2) _tile_stored(1, acc + 16, kPitch);
  if constexpr (RowTiles == 2) _tile_stored(2, acc + kTileRows * kUnitColumns, kPitch);
  if constexpr (RowTiles == 2 && Panels == 2) _tile_stored(3, acc + kTileRows * kUnitColumns + 16, kPitch);
}

TS_INLINE void prefetch_tile(const std::byte* p) {
  for (int64_t i = 0; i < kTileBytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p) + i, _MM_HINT_T0);
}

// The last k, fewer than 32, as whole tiles padded with zeros: tail holds A of row tile 0 and 1, then B of each panel.
TS_INLINE void copy_tail(const BlockArgs& args, int64_t rows, int64_t panels, int64_t full_blocks, int64_t tail_bytes) {
  std::memset(args.tail, 0, kTailBytes);
  const std::byte* x = args.x + full_blocks * kTileRowBytes;
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(args.tail + r * kTileRowBytes, x + r * args.x_row_bytes, static_cast<size_t>(tail_bytes));
  }
  const int64_t pair_rows = tail_bytes / 4;
  for (int64_t p = 0; p < panels; ++p) {
    std::memcpy(args.tail + (2 + p) * kTileBytes, args.w + p * args.panel_bytes + full_blocks * kTileBytes,
                static_cast<size_t>(pair_rows * kPanelRowBytes));
  }
  asm volatile("" : : : "memory");  // GCC does not know that tileloadd reads memory
}

template <int RowTiles, int Panels, bool FetchAhead>
void block(const BlockArgs& args, int64_t rows) {
  constexpr int64_t kAhead = 2 * kTileBytes;  // past the last panel a prefetch is void
  const int64_t full_blocks = args.x_row_bytes / kTileRowBytes, tail_bytes = args.x_row_bytes % kTileRowBytes;
  zero_accumulators<RowTiles, Panels>();
  for (int64_t i = 0; i < full_blocks; ++i) {
    const std::byte* w = args.w + i * kTileBytes;
    if constexpr (FetchAhead) {
      prefetch_tile(w + kAhead);
      if constexpr (Panels == 2) prefetch_tile(w + args.panel_bytes + kAhead);
    }
    multiply_add<RowTiles, Panels>(args.x + i * kTileRowBytes, args.x_row_bytes, w, args.panel_bytes);
  }
  if (tail_bytes != 0) {
    copy_tail(args, rows, Panels, full_blocks, tail_bytes);
    multiply_add<RowTiles, Panels>(args.tail, kTileRowBytes, args.tail + 2 * kTileBytes, kTileBytes);
  }
  store_accumulators<RowTiles, Panels>(args.acc);
}

class AmxProjector {
 public:
  using Element = bf16;

  // Up to kMaxUnitRows rows, memory is the limit: weights stream.
  template <class Epilogue>
  static void project(const Invocation& inv, int64_t M, int64_t num_panels, int64_t K, const Epilogue& epilogue) {
    const AmxProjector p(inv, K);
    const UnitSpace units(M, kMaxUnitRows, kBlockRows, num_panels, inv.num_workers, M <= kMaxUnitRows);
    float* acc = reinterpret_cast<float*>(inv.scratch);
    TileConfig config;
    for (Unit unit; units.claim(inv, unit);) {
      for_each_part(unit, [&](const Unit& part) {
        p.multiply(part, config, acc, inv.scratch + kAccBytes, epilogue);
        epilogue(part, acc);
      });
    }
  }

 private:
  AmxProjector(const Invocation& inv, int64_t K)
      : x_(inv.ptr<const std::byte>(0)), x_row_bytes_(K * static_cast<int64_t>(sizeof(bf16))),
        w_(inv.ptr<const std::byte>(1)), panel_bytes_(K / 2 * kPanelRowBytes) {}

  template <class Epilogue>
  void multiply(const Unit& unit, TileConfig& config, float* acc, std::byte* tail, const Epilogue& epilogue) const {
    for (int64_t p = 0; p < unit.num_panels; p += 2) {
      for (int64_t r = 0; r < unit.num_rows; r += kBlockRows) {
        const int64_t rows = std::min(kBlockRows, unit.num_rows - r);
        if (p == 0) epilogue.prefetch(unit, r, rows);
        config.set(rows);
        const BlockArgs args{x_ + (unit.row + r) * x_row_bytes_, x_row_bytes_, w_ + (unit.panel + p) * panel_bytes_,
                             panel_bytes_, acc + r * kUnitColumns + p * 16, tail};
        run(args, rows, unit.num_panels - p >= 2, r == 0);  // the first rows meet the panels in memory
      }
    }
  }

  static void run(const BlockArgs& args, int64_t rows, bool two_panels, bool first) {
    const bool two_tiles = rows > kTileRows;
    if (two_panels) {
      if (two_tiles) return first ? block<2, 2, true>(args, rows) : block<2, 2, false>(args, rows);
      return first ? block<1, 2, true>(args, rows) : block<1, 2, false>(args, rows);
    }
    if (two_tiles) return first ? block<2, 1, true>(args, rows) : block<2, 1, false>(args, rows);
    return first ? block<1, 1, true>(args, rows) : block<1, 1, false>(args, rows);
  }

  const std::byte* x_;
  int64_t x_row_bytes_;
  const std::byte* w_;
  int64_t panel_bytes_;
};

// Asked before anyone knows what this processor has, so compiled without the vector instructions of this file.
#define TS_ANY_X86 __attribute__((target("general-regs-only"), noinline))

// CPUID leaf 7: AMX-BF16 is EDX bit 22, AMX-TILE bit 24; the kernels also use AVX-512 and its BF16 (subleaf 1, EAX
// bit 5). XCR0 bits 5-7 and 17-18: the system saves AVX-512 and tile state.
TS_ANY_X86 bool processor_has_amx() {
  unsigned a, b, c, d;
  __cpuid(0, a, b, c, d);
  if (a < 7) return false;
  __cpuid(1, a, b, c, d);
  if ((c & bit_OSXSAVE) == 0) return false;
  __cpuid_count(7, 0, a, b, c, d);
  if ((d & (1u << 22)) == 0 || (d & (1u << 24)) == 0 || (b & bit_AVX512F) == 0 || a < 1) return false;
  __cpuid_count(7, 1, a, b, c, d);
  if ((a & (1u << 5)) == 0) return false;
  unsigned saved, high;
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  constexpr unsigned kNeeded = 7u << 5 | 3u << 17;
  return (saved & kNeeded) == kNeeded;
}

}  // namespace amx

TS_ANY_X86 bool request_amx_permission() noexcept {
  constexpr long kArchRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted =
      amx::processor_has_amx() && syscall(SYS_arch_prctl, kArchRequestPermission, kTileData) == 0;
  return granted;
}

void linear_bf16_amx(const Invocation& inv) noexcept { amx::linear<amx::AmxProjector>(inv); }
void linear_add_bf16_amx(const Invocation& inv) noexcept { amx::linear_add<amx::AmxProjector>(inv); }
void linear_silu_mul_bf16_amx(const Invocation& inv) noexcept { amx::linear_silu_mul<amx::AmxProjector>(inv); }

}  // namespace tokenspeed::kernels
