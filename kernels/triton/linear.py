"""Projections on the matrix unit: ``x W^T`` with float32 sums, alone, added to the residual, or gated.

The kernels here run on every GPU. On Hopper a choice may name those of linear_wide.py instead, with the same bits.

One tile of the result is one program: it walks K from 0 to the end in steps of BLOCK_K and never shares a sum with
another program, so the order in which a row's products are added is fixed by K alone. On Hopper every tile shape,
with either operand order, gives the same bits (measured by benchmarks/gpu/bench_linear.py, which asserts it); on the
other architectures linear_config.py keeps to tiles that use one matrix instruction.

Two operand orders. Many rows: ``acc[rows, features] = x tile @ (W tile)^T``. Few rows (SWAPPED): ``acc[features,
rows] = W tile @ (x tile)^T``: the matrix unit works on 16 or 64 rows of its first operand at a time, so the weights
take that side and a step of 1 to 16 rows pads the cheap side only.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from tokenspeed.kernels.registry import (
    DTYPES_TRITON,
    Band,
    KernelSpec,
    MultipleOf,
    Request,
    Stage,
    device_stage,
)
from tokenspeed.kernels.triton.common import FEATURES, dot, pdl_wait
from tokenspeed.kernels.triton.linear_config import Config, choose
from tokenspeed.kernels.triton.linear_wide import (
    SCRATCH_BYTES,
    linear_add_rounded_wide,
    linear_add_wide,
    linear_silu_mul_wide,
    linear_wide,
)
from tokenspeed.target import GPU_TARGETS


@triton.jit
def _prefetch_rows(weight, first, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
                   BYTES: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Ask L2 for the first ``BYTES`` (the row at most) of ``BLOCK_N`` rows of W from row ``first`` on.

    One bulk prefetch per thread, of a multiple of 16 bytes. Called before pdl_wait: memory is idle while the kernel
    before this one ends, and weights depend on nothing.
    """
    row_bytes: tl.constexpr = K * (weight.dtype.element_ty.primitive_bitwidth // 8)
    parts: tl.constexpr = LANES // BLOCK_N if LANES > BLOCK_N else 1
    span: tl.constexpr = min(BYTES, row_bytes) // parts // 16 * 16
    if span > 0:
        lane = tl.arange(0, BLOCK_N * parts)
        row = tl.minimum(first + lane % BLOCK_N, N - 1)
        start = (weight + row.to(tl.int64) * K).to(tl.pointer_type(tl.uint8), bitcast=True) + (lane // BLOCK_N) * span
        size = tl.full((BLOCK_N * parts,), span, tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [start, size],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _place(N: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The tile of this program: (row tile, feature tile).

    GROUP_M row tiles take one feature tile in turn before the next feature tile, so that programs that run
    together share rows of x and rows of W in L2. The grid covers the bucket; how many row tiles it has follows.
    """
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    tiles_m = tl.num_programs(0) // tiles_n
    group = program // (GROUP_M * tiles_n)
    group_rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    inside = program % (GROUP_M * tiles_n)
    return group * GROUP_M + inside % group_rows, inside // group_rows


@triton.jit
def _load_tile(base, rows, limit, k, FULL: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """``[len(rows), BLOCK_K]`` of a row-major ``[limit, K]`` matrix from column ``k``; 0 outside of it.

    FULL: no row is outside, so only columns are masked, and those only where BLOCK_K does not divide K.
    """
    columns = k + tl.arange(0, BLOCK_K)
    pointers = base + rows.to(tl.int64)[:, None] * K + columns[None, :]
    if FULL and K % BLOCK_K == 0:
        return tl.load(pointers)
    elif FULL:
        return tl.load(pointers, mask=(columns < K)[None, :], other=0.0)
    elif K % BLOCK_K == 0:
        return tl.load(pointers, mask=(rows < limit)[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=(rows < limit)[:, None] & (columns < K)[None, :], other=0.0)


@triton.jit
def _product(x, weight, rows, num_rows, features, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """``x[rows] @ W[features]^T`` in float32, [BLOCK_M, BLOCK_N]."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        a = _load_tile(x, rows, num_rows, k, False, K, BLOCK_K)
        b = _load_tile(weight, features, N, k, N % BLOCK_N == 0, K, BLOCK_K)
        acc = dot(a, tl.trans(b), acc)
    return acc


@triton.jit
def _product_swapped(x, weight, rows, num_rows, features, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The same [BLOCK_M, BLOCK_N], computed as its transpose: ``W[features] @ x[rows]^T``."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        a = _load_tile(weight, features, N, k, N % BLOCK_N == 0, K, BLOCK_K)
        b = _load_tile(x, rows, num_rows, k, False, K, BLOCK_K)
        acc = dot(a, tl.trans(b), acc)
    return tl.trans(acc)


@triton.jit
def _silu_mul(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """``silu(gate) * up`` [BLOCK_M, BLOCK_N / 2] of columns that come in groups of 32: 16 gates, then their 16 ups."""
    pairs = tl.permute(tl.reshape(acc, (BLOCK_M, BLOCK_N // 32, 2, 16)), (0, 1, 3, 2))
    gate, up = tl.split(pairs)
    return tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (BLOCK_M, BLOCK_N // 2))


@triton.jit
def _linear(x, weight, residual, out, step_sizes, EPILOGUE: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
            K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAPPED: tl.constexpr, PREFETCH: tl.constexpr,
            LANES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One tile of out[M, WIDTH]. The sizes of the step are no kernel's output: they may be read before pdl_wait."""
    num_rows = tl.load(step_sizes + ROWS)
    tile_m, tile_n = _place(N, BLOCK_N, GROUP_M)
    if PDL and PREFETCH > 0:
        _prefetch_rows(weight, tile_n * BLOCK_N, N, K, BLOCK_N, PREFETCH, LANES)
    pdl_wait(PDL)
    if tile_m * BLOCK_M < num_rows:
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        features = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if SWAPPED:
            acc = _product_swapped(x, weight, rows, num_rows, features, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
        else:
            acc = _product(x, weight, rows, num_rows, features, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
        if EPILOGUE == "silu_mul":
            acc = _silu_mul(acc, BLOCK_M, BLOCK_N)
            features = tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        mask = (rows < num_rows)[:, None] & (features < WIDTH)[None, :]
        offsets = rows.to(tl.int64)[:, None] * WIDTH + features[None, :]
        if EPILOGUE == "add":
            acc += tl.load(residual + offsets, mask=mask, other=0.0)
        elif EPILOGUE == "add_rounded":
            product = acc.to(x.dtype.element_ty).to(tl.float32)
            acc = (product + tl.load(residual + offsets, mask=mask, other=0.0)).to(x.dtype.element_ty)
        tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def linear(x, weight, out, step_sizes, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAPPED: tl.constexpr,
           PREFETCH: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """out[M, N] (float32) = x[M, K] @ weight[N, K]^T, M = step_sizes[ROWS]."""
    _linear(x, weight, out, out, step_sizes, "none", N, N, K, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SWAPPED,
            PREFETCH, LANES, PDL)  # fmt: skip


@triton.jit
def linear_add(x, weight, residual, out, step_sizes, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
               SWAPPED: tl.constexpr, PREFETCH: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """out[M, N] (float32) = residual[M, N] + x[M, K] @ weight[N, K]^T; out may be residual itself."""
    _linear(x, weight, residual, out, step_sizes, "add", N, N, K, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SWAPPED,
            PREFETCH, LANES, PDL)  # fmt: skip


@triton.jit
def linear_add_rounded(x, weight, residual, out, step_sizes, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
                       BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
                       SWAPPED: tl.constexpr, PREFETCH: tl.constexpr, LANES: tl.constexpr,
                       PDL: tl.constexpr):  # fmt: skip
    """linear_add that rounds the product and the sum to x's type: what a framework has that stores both as tensors."""
    _linear(x, weight, residual, out, step_sizes, "add_rounded", N, N, K, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
            SWAPPED, PREFETCH, LANES, PDL)  # fmt: skip


@triton.jit
def linear_silu_mul(x, weight, out, step_sizes, F: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
                    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                    GROUP_M: tl.constexpr, SWAPPED: tl.constexpr, PREFETCH: tl.constexpr, LANES: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    """out[M, F] (artifact dtype) = silu(x @ gate^T) * (x @ up^T).

    weight[N, K] holds the rows of both in groups of 32: 16 of gate, then those of up for the same features;
    N = 2 * F with F rounded up to a multiple of 16.
    """
    _linear(x, weight, out, out, step_sizes, "silu_mul", F, N, K, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SWAPPED,
            PREFETCH, LANES, PDL)  # fmt: skip


_FUNCTIONS = {
    "linear": (linear, linear_wide),
    "linear_add": (linear_add, linear_add_wide),
    "linear_add_rounded": (linear_add_rounded, linear_add_rounded_wide),
    "linear_silu_mul": (linear_silu_mul, linear_silu_mul_wide),
}
"""The tiles and the wide kernel of each op, and of ``linear_add`` where its attribute ``rounded`` is set."""
OPS = ("linear", "linear_add", "linear_silu_mul")


def specs() -> Iterator[KernelSpec]:
    """One kernel per op and dtype; its tile shape is chosen by request, and does not change a row's bits."""
    for op in OPS:
        for dtype, element in DTYPES_TRITON.items():
            yield KernelSpec(
                op=op,
                solution="triton",
                symbol=f"{op}_{element}",
                targets=GPU_TARGETS,
                dtypes=(dtype,),
                arguments=(),
                band=Band.MATRIX,
                features=FEATURES,
                constraints=(MultipleOf("K", 16),),
                weight_layout="rows",
                launches=_launches,
            )


def weight_rows(request: Request) -> int:
    """Rows of W: those of gate and up together for linear_silu_mul."""
    gated = request.op == "linear_silu_mul"
    return 2 * triton.cdiv(request.sizes["F"], 16) * 16 if gated else request.sizes["N"]


def _launches(request: Request) -> tuple[Stage, ...]:
    sizes = request.sizes
    config = choose(request.target, request.op, sizes["M"], weight_rows(request), sizes["K"], request.dtype)
    return stages(request, config)


def stages(request: Request, config: Config) -> tuple[Stage, ...]:
    """What serves ``request`` with the tile shape ``config``."""
    op, sizes = request.op, request.sizes
    gated = op == "linear_silu_mul"
    n = weight_rows(request)
    pointer = f"*{DTYPES_TRITON[request.dtype]}"
    residual, wide = op == "linear_add", config.kind == "wide"
    return (
        device_stage(
            module=f"{__name__}_wide" if wide else __name__,
            function=_FUNCTIONS[f"{op}_rounded" if sizes.get("rounded") else op][wide],
            arguments=f"read x, read weight, {'read residual, ' if residual else ''}write out, sizes step_sizes",
            types=f"{pointer}, {pointer}, {'*fp32, ' if residual else ''}{pointer if gated else '*fp32'}, *i32",
            constants={
                **({"F": sizes["F"]} if gated else {}),
                "N": n,
                "K": sizes["K"],
                "ROWS": sizes["rows"],
                **config.constants(request.target),
            },
            num_warps=4 if wide else config.num_warps,
            num_stages=1 if wide else config.num_stages,
            grid=(config.programs(sizes["M"], n), 1, 1),
            target=request.target,
            max_registers=config.max_registers,
            scratch_bytes=SCRATCH_BYTES if wide else 0,
        ),
    )
