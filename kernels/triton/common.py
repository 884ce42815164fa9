"""What the Triton kernels share: programmatic dependent launch, matrix products, and what their KernelSpecs say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.registry import FIXED_ORDER, Band, KernelSpec, Request, Stage
from tokenspeed.target import GPU_TARGETS

FEATURES = FIXED_ORDER
"""What a kernel guarantees whose row's bits depend on that row alone, whose sums are taken in one order fixed at
build, and whose bits do not depend on timing."""


def vector_spec(
    op: str,
    symbol: str,
    launches: Callable[[Request], tuple[Stage, ...]],
    *,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    **more: Any,
) -> KernelSpec:
    """The KernelSpec of a kernel that runs on every GPU and uses no matrix unit. ``more``: other fields of it."""
    return KernelSpec(
        op=op,
        solution="triton",
        symbol=symbol,
        targets=GPU_TARGETS,
        dtypes=dtypes,
        arguments=(),
        band=Band.VECTOR,
        features=FEATURES,
        launches=launches,
        **more,
    )


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until the kernels before this one in the stream have ended and their writes are visible, and let the next
    one start: after the wait (``PDL`` 1) or before it (2). Every program calls it before it touches what another
    kernel writes, and before it returns. Nothing where ``PDL`` is 0: there a kernel starts when its predecessors have
    ended.

    Before the wait is as safe as after it: the next kernel waits for this one to end, which waits for those before
    it. Its programs take room only when all of this one's have theirs, so neither keeps the other from starting.
    """
    if PDL == 2:
        gdc_launch_dependents()
    if PDL != 0:
        gdc_wait()
    if PDL == 1:
        gdc_launch_dependents()


EARLY_TOKENS = 64
"""Up to here a step waits for memory, and its small kernels let the next kernel start before they wait: on an H200 a
step of 1 to 32 tokens takes 1 to 2% less, one of 128 or 256 takes 3 to 6% more, because the next kernel's programs then
crowd on the multiprocessors that are free first."""


def starts_next_early(sizes: Mapping[str, int]) -> bool:
    """Whether a kernel between projections lets its successor start before it waits, in a bucket of these sizes."""
    return sizes.get("num_tokens", sizes.get("M", 0)) <= EARLY_TOKENS


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` with float32 accumulation; float32 operands are multiplied exactly, never as tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")
