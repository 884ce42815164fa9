"""RMS norm (Zhang and Sennrich, "Root mean square layer normalization", NeurIPS 2019, arXiv:1910.07467).

A row is one program whatever the bucket, with a block and a number of warps that depend on its width alone, so the
sum of squares is always taken in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from tokenspeed.kernels.registry import DTYPES_TRITON, AtMost, KernelSpec, Request, Stage, device_stage
from tokenspeed.kernels.triton.common import pdl_wait, starts_next_early, vector_spec

MAX_WIDTH = 16384
"""A program holds its whole row in registers."""


@triton.jit
def rms_norm(
    x, weight, out, step_sizes, eps, H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    """``out = x * (1 / sqrt(mean(x^2) + eps)) * weight``: x f32[M][H], weight f32[H], out [M][H].

    Float32 arithmetic, each product rounded, with correctly rounded root and division. Program r: row r of the
    step_sizes[ROWS] rows. The weights are read before the wait: no kernel writes them.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    pdl_wait(PDL)
    if row >= tl.load(step_sizes + ROWS):
        return
    start = row.to(tl.int64) * H
    values = tl.load(x + start + columns, mask=inside, other=0.0)
    mean = tl.div_rn(tl.sum(values * values, axis=0), H * 1.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(out + start + columns, (values * scale * scales).to(out.dtype.element_ty), mask=inside)


def specs() -> Iterator[KernelSpec]:
    """One kernel per dtype of the result."""
    for dtype, element in DTYPES_TRITON.items():
        yield vector_spec(
            "rms_norm",
            f"rms_norm_{element}",
            launches,
            dtypes=(dtype,),
            constraints=(AtMost("H", MAX_WIDTH),),
            weight_layout="rows",
        )


def launches(request: Request) -> tuple[Stage, ...]:
    hidden = request.sizes["H"]
    block = triton.next_power_of_2(hidden)
    return (
        device_stage(
            module=__name__,
            function=rms_norm,
            arguments="read x, read weight, write out, sizes step_sizes, float eps",
            types=f"*fp32, *fp32, *{DTYPES_TRITON[request.dtype]}, *i32, fp32",
            constants={"H": hidden, "BLOCK": block, "ROWS": request.sizes["rows"]},
            num_warps=min(16, max(4, block // 512)),
            num_stages=1,
            grid=(request.sizes["M"], 1, 1),
            target=request.target,
            early=starts_next_early(request.sizes),
        ),
    )
