"""Gather: the residual rows whose logits are needed, packed together."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from tokenspeed.kernels.registry import KernelSpec, Request, Stage, device_stage
from tokenspeed.kernels.triton.common import pdl_wait, vector_spec


@triton.jit
def gather_rows(x, logit_rows, out, step_sizes, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``out[r] = x[logit_rows[r]]``: x f32[T][H], logit_rows i32[R], out f32[R][H]. Program (r, b): columns from
    b * BLOCK on."""
    row = tl.program_id(0)
    pdl_wait(PDL)
    if row >= tl.load(step_sizes + 2):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    source = tl.load(logit_rows + row).to(tl.int64)
    values = tl.load(x + source * H + columns, mask=inside)
    tl.store(out + row.to(tl.int64) * H + columns, values, mask=inside)


def specs() -> Iterator[KernelSpec]:
    """One kernel: the residual stream is float32 in every program."""
    yield vector_spec("gather_rows", "gather_rows_fp32", _launches)


def _launches(request: Request) -> tuple[Stage, ...]:
    hidden = request.sizes["H"]
    block = min(triton.next_power_of_2(hidden), 2048)
    return (
        device_stage(
            module=__name__,
            function=gather_rows,
            arguments="read x, read logit_rows, write out, sizes step_sizes",
            types="*fp32, *i32, *fp32, *i32",
            constants={"H": hidden, "BLOCK": block},
            num_warps=4,
            num_stages=1,
            grid=(request.sizes["num_logit_rows"], triton.cdiv(hidden, block), 1),
            target=request.target,
        ),
    )
