"""Projections of many rows on Hopper: copies by the tensor memory unit, and warps that have one role each.

A program stays on its multiprocessor and takes tile after tile. One warp asks for tiles of x and W, up to STAGES
ahead and across the end of a tile; CONSUMERS groups of four warps multiply, each its own rows of the tile, and write
them while the next tile's operands arrive. Every sum runs over K from 0 to the end in steps of one instruction, as
in linear.py: the same bits.

The maps through which the memory unit sees x and W are made by every program in scratch memory, ``SCRATCH_BYTES`` a
program, before the program has waited for its predecessors: a step gives every launch scratch memory of its own
(tokenspeed/compile/layout.py). What else a program does before it waits is to read W and the sizes of the step.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenspeed.kernels.registry import DeviceKernel

SCRATCH_BYTES = 256
"""Scratch memory of one program: two maps of 128 bytes."""


@gluon.jit
def _wait_for_predecessors(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip


@gluon.jit
def _let_successors_start(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip


@gluon.jit
def _place(tile, tiles_m, tiles_n: gl.constexpr, GROUP_M: gl.constexpr):
    """(row tile, feature tile), in the order of linear.py."""
    group = tile // (GROUP_M * tiles_n)
    group_rows = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    inside = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + inside % group_rows, inside // group_rows


@gluon.jit
def _copy(x_map, w_map, x_tiles, w_tiles, full, empty, num_rows, K: gl.constexpr, tiles_n: gl.constexpr,
          BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
          STAGES: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The role of the copying warp. Weights of the first STAGES steps are asked for before x is there; without EARLY
    the next kernel may start once everything has been asked for."""
    steps: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    early: gl.constexpr = min(STAGES, steps)
    tile_bytes: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * 2
    tiles_m = (num_rows + BLOCK_M - 1) // BLOCK_M
    first = gl.program_id(0)
    if first < tiles_m * tiles_n:
        _, tile_n = _place(first, tiles_m, tiles_n, GROUP_M)
        for step in range(early):
            mbarrier.expect(full.index(step), tile_bytes)
            at = [tile_n * BLOCK_N, step * BLOCK_K]
            tma.async_copy_global_to_shared(w_map, at, full.index(step), w_tiles.index(step))
    _wait_for_predecessors(PDL)
    count = 0
    for tile in range(first, tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP_M)
        for step in range(steps):
            stage = count % STAGES
            bar = full.index(stage)
            if count >= early:
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, tile_bytes)
                tma.async_copy_global_to_shared(
                    w_map, [tile_n * BLOCK_N, step * BLOCK_K], bar, w_tiles.index(stage)
                )  # fmt: skip
            tma.async_copy_global_to_shared(x_map, [tile_m * BLOCK_M, step * BLOCK_K], bar, x_tiles.index(stage))
            count += 1
    _let_successors_start(PDL != 0 and not EARLY)


@gluon.jit
def _multiply(residual, out, x_tiles, w_tiles, full, empty, num_rows, EPILOGUE: gl.constexpr, WIDTH: gl.constexpr,
              K: gl.constexpr, tiles_n: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
              BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, SWAPPED: gl.constexpr,
              CONSUMERS: gl.constexpr, MINE: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The role of consumer ``MINE``: its rows (SWAPPED: its features) of every tile."""
    steps: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    share: gl.constexpr = (BLOCK_N if SWAPPED else BLOCK_M) // CONSUMERS
    across: gl.constexpr = BLOCK_M if SWAPPED else BLOCK_N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, across, 16])
    _wait_for_predecessors(PDL)
    tiles_m = (num_rows + BLOCK_M - 1) // BLOCK_M
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP_M)
        acc = gl.zeros((share, across), gl.float32, layout)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            if SWAPPED:
                a = w_tiles.index(stage).slice(MINE * share, share)
                acc = warpgroup_mma(a, x_tiles.index(stage).permute((1, 0)), acc, is_async=True)
            else:
                a = x_tiles.index(stage).slice(MINE * share, share)
                acc = warpgroup_mma(a, w_tiles.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # The operands of the product before this one have been read.
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
            count += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        if SWAPPED:
            _write_swapped(acc, residual, out, tile_m * BLOCK_M, tile_n * CONSUMERS + MINE, num_rows, EPILOGUE, WIDTH,
                           BLOCK_M, share)  # fmt: skip
        else:
            _write(acc, residual, out, tile_m * BLOCK_M + MINE * share, tile_n, num_rows, EPILOGUE, WIDTH, share,
                   BLOCK_N)  # fmt: skip


@gluon.jit
def _write_swapped(acc, residual, out, first_row, part, num_rows, EPILOGUE: gl.constexpr, WIDTH: gl.constexpr,
                   ROWS: gl.constexpr, FEATURES: gl.constexpr):  # fmt: skip
    """Write ``acc`` [FEATURES, ROWS], features ``part * FEATURES`` and on."""
    gated: gl.constexpr = EPILOGUE == "silu_mul"
    # A thread that gates holds a group of 32: 16 gates and their 16 ups.
    held: gl.constexpr = 32 if gated else 4
    lanes: gl.constexpr = min(32, FEATURES // held)
    layout: gl.constexpr = gl.BlockedLayout([1, held], [32 // lanes, lanes], [4, 1], [1, 0])
    values = gl.convert_layout(gl.permute(acc, (1, 0)), layout)
    if gated:
        pairs = gl.permute(gl.reshape(values, (ROWS, FEATURES // 32, 2, 16)), (0, 1, 3, 2))
        gate, up = gl.split(pairs)
        values = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, (ROWS, FEATURES // 2))
        narrow: gl.constexpr = gl.BlockedLayout([1, held // 2], [32 // lanes, lanes], [4, 1], [1, 0])
        values = gl.convert_layout(values, narrow)
        _write_part(values, residual, out, first_row, part * (FEATURES // 2), num_rows, "none", WIDTH, ROWS,
                    FEATURES // 2)  # fmt: skip
    else:
        _write_part(values, residual, out, first_row, part * FEATURES, num_rows, EPILOGUE, WIDTH, ROWS, FEATURES)


@gluon.jit
def _write(acc, residual, out, first_row, tile_n, num_rows, EPILOGUE: gl.constexpr, WIDTH: gl.constexpr,
           ROWS: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """Add or gate, and write ``ROWS`` rows of a tile."""
    if EPILOGUE == "silu_mul":
        pairs = gl.permute(gl.reshape(acc, (ROWS, BLOCK_N // 32, 2, 16)), (0, 1, 3, 2))
        gate, up = gl.split(pairs)
        gated = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, (ROWS, BLOCK_N // 2))
        half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N // 2, 16])
        gated = gl.convert_layout(gated, half, assert_trivial=True)
        _write_part(gated, residual, out, first_row, tile_n * (BLOCK_N // 2), num_rows, "none", WIDTH, ROWS,
                    BLOCK_N // 2)  # fmt: skip
    elif EPILOGUE != "none" and BLOCK_N >= 64:
        # In quarters: what is read of the residual takes a quarter of the sums' registers.
        quarter: gl.constexpr = BLOCK_N // 4
        low, high = gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, BLOCK_N // 2)), (0, 2, 1)))
        first, second = gl.split(gl.permute(gl.reshape(low, (ROWS, 2, quarter)), (0, 2, 1)))
        third, fourth = gl.split(gl.permute(gl.reshape(high, (ROWS, 2, quarter)), (0, 2, 1)))
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, quarter, 16])
        at = tile_n * BLOCK_N
        _write_part(gl.convert_layout(first, layout, assert_trivial=True), residual, out, first_row, at, num_rows,
                    EPILOGUE, WIDTH, ROWS, quarter)  # fmt: skip
        _write_part(gl.convert_layout(second, layout, assert_trivial=True), residual, out, first_row, at + quarter,
                    num_rows, EPILOGUE, WIDTH, ROWS, quarter)  # fmt: skip
        _write_part(gl.convert_layout(third, layout, assert_trivial=True), residual, out, first_row,
                    at + 2 * quarter, num_rows, EPILOGUE, WIDTH, ROWS, quarter)  # fmt: skip
        _write_part(gl.convert_layout(fourth, layout, assert_trivial=True), residual, out, first_row,
                    at + 3 * quarter, num_rows, EPILOGUE, WIDTH, ROWS, quarter)  # fmt: skip
    else:
        _write_part(acc, residual, out, first_row, tile_n * BLOCK_N, num_rows, EPILOGUE, WIDTH, ROWS, BLOCK_N)


@gluon.jit
def _write_part(values, residual, out, first_row, first_column, num_rows, EPILOGUE: gl.constexpr, WIDTH: gl.constexpr,
                ROWS: gl.constexpr, COLUMNS: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = values.type.layout
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    offsets = rows.to(gl.int64)[:, None] * WIDTH + columns[None, :]
    if EPILOGUE == "add":
        values += gl.load(residual + offsets, mask=mask, other=0.0)
    elif EPILOGUE == "add_rounded":
        product = values.to(gl.bfloat16).to(gl.float32)
        values = (product + gl.load(residual + offsets, mask=mask, other=0.0)).to(gl.bfloat16)
    gl.store(out + offsets, values.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _linear(x, weight, residual, out, step_sizes, EPILOGUE: gl.constexpr, WIDTH: gl.constexpr, N: gl.constexpr,
            K: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
            BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, SWAPPED: gl.constexpr,
            CONSUMERS: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tiles_n: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    _let_successors_start(PDL != 0 and EARLY)
    num_rows = gl.load(step_sizes + ROWS)
    x_map = tma.make_tensor_descriptor(x, [num_rows, K], [K, 1], [BLOCK_M, BLOCK_K], shared)
    w_map = tma.make_tensor_descriptor(weight, [N, K], [K, 1], [BLOCK_N, BLOCK_K], shared)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], shared)
    w_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, BLOCK_K], shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_multiply, (residual, out, x_tiles, w_tiles, full, empty, num_rows, EPILOGUE, WIDTH, K, tiles_n, BLOCK_M,
                         BLOCK_N, BLOCK_K, GROUP_M, STAGES, SWAPPED, CONSUMERS, 0, PDL)),
            (_copy, (x_map, w_map, x_tiles, w_tiles, full, empty, num_rows, K, tiles_n, BLOCK_M, BLOCK_N, BLOCK_K,
                     GROUP_M, STAGES, EARLY, PDL)),
        ], [1], [40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (residual, out, x_tiles, w_tiles, full, empty, num_rows, EPILOGUE, WIDTH, K, tiles_n, BLOCK_M,
                         BLOCK_N, BLOCK_K, GROUP_M, STAGES, SWAPPED, CONSUMERS, 0, PDL)),
            (_multiply, (residual, out, x_tiles, w_tiles, full, empty, num_rows, EPILOGUE, WIDTH, K, tiles_n, BLOCK_M,
                         BLOCK_N, BLOCK_K, GROUP_M, STAGES, SWAPPED, CONSUMERS, 1, PDL)),
            (_copy, (x_map, w_map, x_tiles, w_tiles, full, empty, num_rows, K, tiles_n, BLOCK_M, BLOCK_N, BLOCK_K,
                     GROUP_M, STAGES, EARLY, PDL)),
        ], [4, 1], [232, 40])  # fmt: skip


@gluon.jit
def linear_wide(x, weight, out, step_sizes, N: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr,
                BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
                STAGES: gl.constexpr, SWAPPED: gl.constexpr, CONSUMERS: gl.constexpr, EARLY: gl.constexpr,
                PDL: gl.constexpr):  # fmt: skip
    """out[M, N] (float32) = x[M, K] @ weight[N, K]^T, M = step_sizes[ROWS]."""
    _linear(x, weight, out, out, step_sizes, "none", N, N, K, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES,
            SWAPPED, CONSUMERS, EARLY, PDL)  # fmt: skip


@gluon.jit
def linear_add_wide(x, weight, residual, out, step_sizes, N: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr,
                    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
                    STAGES: gl.constexpr, SWAPPED: gl.constexpr, CONSUMERS: gl.constexpr, EARLY: gl.constexpr,
                    PDL: gl.constexpr):  # fmt: skip
    """out[M, N] (float32) = residual[M, N] + x[M, K] @ weight[N, K]^T; out may be residual itself."""
    _linear(x, weight, residual, out, step_sizes, "add", N, N, K, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES,
            SWAPPED, CONSUMERS, EARLY, PDL)  # fmt: skip


@gluon.jit
def linear_add_rounded_wide(x, weight, residual, out, step_sizes, N: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr,
                            BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
                            STAGES: gl.constexpr, SWAPPED: gl.constexpr, CONSUMERS: gl.constexpr, EARLY: gl.constexpr,
                            PDL: gl.constexpr):  # fmt: skip
    """linear_add_wide that rounds the product and the sum to bfloat16."""
    _linear(x, weight, residual, out, step_sizes, "add_rounded", N, N, K, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
            STAGES, SWAPPED, CONSUMERS, EARLY, PDL)  # fmt: skip


@gluon.jit
def linear_silu_mul_wide(x, weight, out, step_sizes, F: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
                         ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
                         GROUP_M: gl.constexpr, STAGES: gl.constexpr, SWAPPED: gl.constexpr,
                         CONSUMERS: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """out[M, F] (artifact dtype) = silu(x @ gate^T) * (x @ up^T); weight as linear.linear_silu_mul has it."""
    _linear(x, weight, out, out, step_sizes, "silu_mul", F, N, K, ROWS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES,
            SWAPPED, CONSUMERS, EARLY, PDL)  # fmt: skip


def interpreted(kernel: DeviceKernel, sizes: Sequence[int]) -> tuple[DeviceKernel, tuple[int, int, int]]:
    """(kernel of linear.py with the bits of ``kernel``, its grid in a step of ``sizes``): what runs where these cannot.

    On the device both walk K in steps of one instruction, which ``tokenspeed tune run`` compares
    bit by bit; that these compile, and what they are made of, is tested by tests/interpreted/test_linear_wide.py.
    """
    constants: dict[str, Any] = dict(kernel.constants)
    n, rows, block_m, block_n = (int(constants[name]) for name in ("N", "ROWS", "BLOCK_M", "BLOCK_N"))
    tiles = -(-n // block_n) * -(-sizes[rows] // block_m)
    for own in ("STAGES", "CONSUMERS", "EARLY"):
        del constants[own]
    constants |= {"PREFETCH": 0, "LANES": 32 * kernel.num_warps}
    function, module = kernel.function.removesuffix("_wide"), kernel.module.removesuffix("_wide")
    same = replace(kernel, module=module, function=function, constants=tuple(sorted(constants.items())))
    return replace(same, max_registers=0, scratch_bytes=0), (max(1, tiles), 1, 1)
