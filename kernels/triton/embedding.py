"""Embedding: the table row of each token, widened to the float32 residual stream."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from tokenspeed.kernels.registry import DTYPES_TRITON, KernelSpec, Request, Stage, device_stage
from tokenspeed.kernels.triton.common import pdl_wait, vector_spec


@triton.jit
def embedding(token_ids, last_tokens, table, out, step_sizes, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``out[t] = table[token_ids[t]]``; a negative id -1 - s stands for the last token of request slot s.

    token_ids i32[T], last_tokens i32[S], table [V][H], out f32[T][H]. Program (t, b): columns from b * BLOCK on.
    """
    token = tl.program_id(0)
    pdl_wait(PDL)
    if token >= tl.load(step_sizes):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    row = tl.load(token_ids + token)
    if row < 0:
        row = tl.load(last_tokens + (-1 - row))
    values = tl.load(table + row.to(tl.int64) * H + columns, mask=inside)
    tl.store(out + token.to(tl.int64) * H + columns, values.to(tl.float32), mask=inside)


def specs() -> Iterator[KernelSpec]:
    """One kernel per dtype of the table."""
    for dtype, element in DTYPES_TRITON.items():
        yield vector_spec("embedding", f"embedding_{element}", _launches, dtypes=(dtype,), weight_layout="rows")


def _launches(request: Request) -> tuple[Stage, ...]:
    hidden = request.sizes["H"]
    block = min(triton.next_power_of_2(hidden), 2048)
    return (
        device_stage(
            module=__name__,
            function=embedding,
            arguments="read token_ids, read last_tokens, read table, write out, sizes step_sizes",
            types=f"*i32, *i32, *{DTYPES_TRITON[request.dtype]}, *fp32, *i32",
            constants={"H": hidden, "BLOCK": block},
            num_warps=4,
            num_stages=1,
            grid=(request.sizes["num_tokens"], triton.cdiv(hidden, block), 1),
            target=request.target,
        ),
    )
