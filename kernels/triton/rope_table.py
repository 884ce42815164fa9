"""The rope table as a target makes it, once, when an artifact is loaded: float32 products of positions and inverse
frequencies, and their cosines and sines in float32, as training frameworks compute them.

On NVIDIA GPUs ``tl.cos`` and ``tl.sin`` are the float32 functions of libdevice, CUDA's math library for compilers, with
its range reduction for large arguments; on AMD's those of OCML. Each element is computed alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import triton
import triton.language as tl

from tokenspeed.kernels.registry import AtMost, KernelSpec, Request, Stage, device_stage
from tokenspeed.kernels.triton.common import pdl_wait, vector_spec

BLOCK = 512
"""Angles of a program."""


@triton.jit
def rope_table(inverse_frequencies, table, attention_factor, POSITIONS: tl.constexpr, HALF: tl.constexpr,
               BLOCK_P: tl.constexpr, BLOCK_HALF: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """table[p] = attention_factor * cos(p f) for each f, then attention_factor * sin(p f): float32 [POSITIONS][2 HALF].

    Program b: BLOCK_P positions from b * BLOCK_P on.
    """
    pdl_wait(PDL)
    position = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    frequency = tl.load(inverse_frequencies + i, mask=i < HALF, other=0.0)
    angle = position.to(tl.float32) * frequency
    mask = (position < POSITIONS) & (i < HALF)
    target = table + position.to(tl.int64) * (2 * HALF) + i
    tl.store(target, tl.cos(angle) * attention_factor, mask=mask)
    tl.store(target + HALF, tl.sin(angle) * attention_factor, mask=mask)


def specs() -> Iterator[KernelSpec]:
    """One kernel: the table is float32 in every program."""
    yield vector_spec(
        "rope_table",
        "triton_rope_table",
        _launches,
        constraints=(AtMost("num_positions", 1 << 24),),  # positions are exact in float32
        weight_layout="rows",
    )


def _launches(request: Request) -> tuple[Stage, ...]:
    positions, half = request.sizes["num_positions"], request.sizes["head_dim"] // 2
    block_half = triton.next_power_of_2(half)
    block_p = max(1, BLOCK // block_half)
    stage = device_stage(
        module=__name__,
        function=rope_table,
        arguments="read inverse_frequencies, write table, float attention_factor",
        types="*fp32, *fp32, fp32",
        constants={"POSITIONS": positions, "HALF": half, "BLOCK_P": block_p, "BLOCK_HALF": block_half},
        num_warps=4,
        num_stages=1,
        grid=(triton.cdiv(positions, block_p), 1, 1),
        target=request.target,
    )
    return (replace(stage, programmatic=False),)  # nothing comes before it
