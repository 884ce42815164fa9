"""What the Triton kernels share: programmatic dependent launch, and matrix products that the interpreter gets right."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter: TRITON_INTERPRET when Triton was imported."""

FEATURES = frozenset({"batch_invariant", "fixed_reduction_order", "run_invariant"})
"""What a kernel guarantees whose row's bits depend on that row alone, whose sums are taken in one order fixed at
build, and whose bits do not depend on timing."""


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until the kernels before this one in the stream have ended and their writes are visible; then let the
    next one start. Every program calls it before it touches what another kernel writes, and before it returns.
    Nothing where ``PDL`` is false: there a kernel starts when its predecessors have ended."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` with float32 accumulation; float32 operands are multiplied exactly, never as tf32.

    The interpreter multiplies the bit patterns of bfloat16 operands, so they are widened there first.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
