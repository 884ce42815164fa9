// The rope table as a target makes it: float32 products of positions and inverse frequencies, and their cosines and
// sines in float32, as training frameworks compute them. It runs once, when an artifact is loaded.
//
// Arguments:
//   p inverse_frequencies  float32 [D/2]
//   p table                float32 [P][D]: row p holds factor * cos(p f) of each f, then factor * sin(p f)
//   i P, i D, f factor
//
// Every operation is rounded to float32 once: position (exact below 2^24), product p f, cosine, sine, their products
// with factor. Cosine and sine are those of the rounded product, computed in float64 and rounded to the nearest
// float32; they are wrong by more than half an ulp in about one of 2^27 values only. Products must be below 2^20.
//
// Bits: multiplications, additions and one rounding to an integer, all of IEEE float64: equal on every processor, and
// independent of the C library.
#pragma once

#include "abi.h"

namespace tokenspeed::kernels {

void rope_table_avx2(const Invocation& inv) noexcept;

struct CosSin {
  float cos, sin;
};

// Of an angle in radians, 0 <= angle < 2^20.
CosSin cos_sin(float angle) noexcept;

}  // namespace tokenspeed::kernels
