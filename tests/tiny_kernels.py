"""Triton kernels of a few lines for tests of the compiler driver, and what they compile to."""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import functools

import triton
import triton.language as tl

from tokenspeed.compile.codegen import CompiledKernel, Job, compile_kernels
from tokenspeed.kernels.registry import Constant, DeviceKernel
from tokenspeed.target import GPU_TARGETS, Target


@triton.jit
def place(BLOCK: tl.constexpr):
    return tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def scale(x, out, n, factor, BLOCK: tl.constexpr):
    """out[i] = factor * x[i] for i below n."""
    at = place(BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n, other=0.0) * factor, mask=at < n)


@triton.jit
def product(x, w, out, N: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """A [TILE, TILE] tile of x [*, K] times w [N, K] transposed."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, K, DEPTH):
        at = k + tl.arange(0, DEPTH)
        a = tl.load(x + row[:, None] * K + at[None, :])
        b = tl.load(w + column[None, :] * K + at[:, None])
        acc = tl.dot(a, b, acc)
    tl.store(out + row[:, None] * N + column[None, :], acc)


@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 1, "this kernel takes one element")


def scale_kernel(block: int = 256, num_warps: int = 4, function: str = "scale", module: str = __name__) -> DeviceKernel:
    signature = (("x", "*fp32"), ("out", "*fp32"), ("n", "i32"), ("factor", "fp32"))
    return DeviceKernel(module, function, signature, (("BLOCK", block),), num_warps, 1)


def product_kernel(tile: int = 64, num_stages: int = 3) -> DeviceKernel:
    constants: dict[str, Constant] = {"DEPTH": 64, "K": 512, "N": 512, "TILE": tile}
    signature = (("x", "*bf16"), ("w", "*bf16"), ("out", "*fp32"))
    return DeviceKernel(__name__, "product", signature, tuple(constants.items()), 4, num_stages)


def broken_kernel() -> DeviceKernel:
    return DeviceKernel(__name__, "broken", (("x", "*fp32"),), (("BLOCK", 2),), 4, 1)


TARGETS = tuple(map(Target.parse, GPU_TARGETS))
JOBS: tuple[Job, ...] = tuple((k, t) for t in TARGETS for k in (scale_kernel(), product_kernel()))


@functools.cache
def compiled() -> dict[Job, CompiledKernel]:
    """Both kernels for every target, compiled by one process without a cache."""
    return compile_kernels(JOBS, workers=1)
