"""Ceilings of a GPU: what an artifact brings so that `tokenspeed bench` can say how much of the device a step uses.

A GPU runs only what its artifact holds, so the kernels that measure it travel in the artifact too: one that reads
memory, and a large matrix product by the projections' own kernel. Both work on the regions of the model: they read its
weights, as bytes or as matrices of any shape, and write to the arena.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.compile.layout import Layout
from tokenspeed.graph import Access, Argument, Pointer, Region
from tokenspeed.kernels.registry import Registry, Request, Stage
from tokenspeed.step import DTYPE_BYTES, STEP_SCALARS, align
from tokenspeed.target import Target

REPEATS = 4
"""Launches of a ceiling's graph: the first waits for the host, the others follow one another without a gap."""
LEAST_READ_BYTES = 128 << 20
"""Fewer would be read from caches."""
MOST_READ_BYTES = 4 << 30
SIDES = (8192, 4096, 2048)
"""Rows and columns of the weight matrix: the first that fits the regions."""
SCRATCH_BYTES = 64 << 10
"""Room for the scratch memory of a launch."""
LEAST_ROWS, ROW_STEP = 1024, 256
"""Rows of the other matrix: as many as the arena holds results of, up to the larger of a step's tokens and the side."""


@dataclass(frozen=True)
class Ceiling:
    """One kernel that measures.

    Attributes:
        kind: ``read`` or ``matmul``.
        stage: its launch.
        arguments: of the launch, but for what Triton adds.
        scratch: scratch memory of each of the REPEATS launches, for a kernel that needs some.
        work: bytes read, or floating-point operations (a multiply-add is two), of one launch.
        num_tokens: tokens of the step in which it runs.
    """

    kind: str
    stage: Stage
    arguments: tuple[Argument, ...]
    work: int
    num_tokens: int
    scratch: tuple[Pointer, ...] = ()


def plan_ceilings(target: Target, dtype: str, layout: Layout, registry: Registry) -> tuple[Ceiling, ...]:
    """The ceilings of ``target`` that can be measured within the model's regions: none on a CPU, which measures its
    own, none of what a small model has too little memory for, and matrix products in bfloat16 alone."""
    if not target.is_gpu:
        return ()
    found = (_read(target, layout), _matmul(target, dtype, layout, registry))
    return tuple(ceiling for ceiling in found if ceiling is not None)


def _read(target: Target, layout: Layout) -> Ceiling | None:
    if layout.weights_bytes < LEAST_READ_BYTES:
        return None
    from tokenspeed.kernels.triton.ceiling import read_stage

    stage, nbytes = read_stage(target, min(layout.weights_bytes, MOST_READ_BYTES))
    sums = 4 * stage.grid[0]
    if sums > layout.arena.nbytes:
        return None
    arguments = (
        Pointer(Region.WEIGHTS, 0, nbytes, Access.READ),
        Pointer(Region.ARENA, 0, sums, Access.WRITE),
    )
    return Ceiling("read", stage, arguments, nbytes, 1)


def _matmul(target: Target, dtype: str, layout: Layout, registry: Registry) -> Ceiling | None:
    """``out[M][side] = x[M][side] @ W[side][side]^T`` by the kernel of op linear; x and W are the weights' bytes."""
    if dtype != "bfloat16":
        return None
    element, accumulated = DTYPE_BYTES[dtype], DTYPE_BYTES["float32"]
    for side in SIDES:
        room = layout.arena.nbytes - REPEATS * SCRATCH_BYTES
        rows = min(layout.limits.max_prefill_tokens, side, room // (accumulated * side))
        rows -= rows % ROW_STEP
        if rows < LEAST_ROWS or side * side * element > layout.weights_bytes:
            continue
        sizes = {"N": side, "K": side, "M": rows, "rows": STEP_SCALARS.index("num_tokens")}
        spec, _ = registry.select(Request("linear", target, dtype, sizes))
        (stage,) = spec.stages(Request("linear", target, dtype, sizes))
        operands = {
            "x": Pointer(Region.WEIGHTS, 0, rows * side * element, Access.READ),
            "weight": Pointer(Region.WEIGHTS, 0, side * side * element, Access.READ),
            "out": Pointer(Region.ARENA, 0, rows * side * accumulated, Access.WRITE),
            "step_sizes": layout.step_sizes(),
        }
        arguments = tuple(operands[rule.name] for rule in stage.arguments)
        scratch = _scratch(stage, align(rows * side * accumulated))
        return Ceiling("matmul", stage, arguments, 2 * rows * side * side, rows, scratch)
    return None


def _scratch(stage: Stage, start: int) -> tuple[Pointer, ...]:
    """Scratch memory in the arena from ``start`` on, apart for each launch: the next one may start early."""
    assert stage.scratch_bytes <= SCRATCH_BYTES, stage
    access, nbytes = Access.READ | Access.WRITE, stage.scratch_bytes
    return tuple(Pointer(Region.ARENA, start + i * SCRATCH_BYTES, nbytes, access) for i in range(REPEATS) if nbytes)
