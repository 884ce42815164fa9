"""Projections of few rows whose programs stay: what a decode step spends its time on is reading W.

Every program takes an equal run of feature tiles and walks (tile, K) as one loop, so that loads of the next tile are
in flight while one ends. It lets the next kernel start at once, and starts loading W into shared memory before it
waits for its own predecessors: W depends on nothing. The wait stands inside the loop, in its first turn, because
the compiler issues the loads of a loop's first turns before the loop; x is loaded a turn ahead, behind conditions,
which keeps it out of those loads. Sums run as in linear.py and have the same bits.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.common import dot
from tokenspeed.kernels.triton.linear import _load_tile, _silu_mul


@triton.jit
def _stream(x, weight, residual, out, step_sizes, EPILOGUE: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
            K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_K: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Feature tiles ``[first, last)`` of out[M, WIDTH], M <= BLOCK_M. There are at least as many as programs."""
    tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    if PDL:
        gdc_launch_dependents()
    num_rows = tl.load(step_sizes + ROWS)
    first = tl.program_id(0) * tiles // tl.num_programs(0)
    turns = ((tl.program_id(0) + 1) * tiles // tl.num_programs(0) - first) * steps
    rows = tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    following = tl.zeros((BLOCK_M, BLOCK_K), x.dtype.element_ty)
    for turn in tl.range(0, turns):
        tile = first + turn // steps
        step = turn % steps
        a = _load_tile(weight, tile * BLOCK_N + tl.arange(0, BLOCK_N), N, step * BLOCK_K, N % BLOCK_N == 0, K, BLOCK_K)
        if turn == 0:
            if PDL:
                gdc_wait()
            b = _load_tile(x, rows, num_rows, 0, False, K, BLOCK_K)
        else:
            b = following
        if turn + 1 < turns:
            following = _load_tile(x, rows, num_rows, (turn + 1) % steps * BLOCK_K, False, K, BLOCK_K)
        if step == 0:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        acc = dot(a, tl.trans(b), acc)
        if step == steps - 1:
            result = tl.trans(acc)
            features = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            if EPILOGUE == "silu_mul":
                result = _silu_mul(result, BLOCK_M, BLOCK_N)
                features = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            mask = (rows < num_rows)[:, None] & (features < WIDTH)[None, :]
            offsets = rows.to(tl.int64)[:, None] * WIDTH + features[None, :]
            if EPILOGUE == "add":
                result += tl.load(residual + offsets, mask=mask, other=0.0)
            tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def linear_stream(x, weight, out, step_sizes, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """out[M, N] (float32) = x[M, K] @ weight[N, K]^T, M = step_sizes[ROWS]."""
    _stream(x, weight, out, out, step_sizes, "none", N, N, K, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, PDL)


@triton.jit
def linear_add_stream(x, weight, residual, out, step_sizes, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                      PDL: tl.constexpr):  # fmt: skip
    """out[M, N] (float32) = residual[M, N] + x[M, K] @ weight[N, K]^T; out may be residual itself."""
    _stream(x, weight, residual, out, step_sizes, "add", N, N, K, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, PDL)


@triton.jit
def linear_silu_mul_stream(x, weight, out, step_sizes, F: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
                           ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                           PDL: tl.constexpr):  # fmt: skip
    """out[M, F] (artifact dtype) = silu(x @ gate^T) * (x @ up^T); weight as linear.linear_silu_mul has it."""
    _stream(x, weight, out, out, step_sizes, "silu_mul", F, N, K, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, PDL)
