"""The tuning space of the projections: which tile shapes are worth timing for a number of rows.

Hopper's lists are short: what was within 2% of the fastest for some shape in the measurements behind
kernels/tuning/sm_90a.json, and the wide kernels. The others' are long, as nobody has measured there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tokenspeed.kernels.triton.linear_config import Config, _power_of_two, rule, usable
from tokenspeed.target import Target


def candidates(target: Target, op: str, m: int, n: int, k: int) -> tuple[Config, ...]:
    """The tile shapes worth timing for bfloat16, at most some forty."""
    hopper = target.arch == "sm_90a"
    found = [*(_hopper(m) if hopper else _candidates(m)), rule(target, op, m, n, k, "bfloat16")]
    if hopper:
        found += [config for config in _wide(target, op, m) if config.block_k <= k]
    sized = (c for c in found if c.block_k <= 2 * k and c.block_n <= 2 * n)
    return tuple(dict.fromkeys(c for c in sized if usable(c, target, op)))


# --- any GPU ------------------------------------------------------------------------------------------

# (block_n, block_k, warps, stages) with W as the first operand: at most 32 rows, then more.
_SWAPPED_FEW = (
    (16, 256, 1, 4), (16, 256, 2, 6), (16, 512, 2, 4), (16, 64, 2, 8),
    (32, 64, 2, 8), (32, 128, 2, 6), (32, 128, 4, 6), (32, 256, 2, 4), (32, 256, 4, 4), (32, 256, 4, 6),
    (64, 64, 4, 8), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (64, 256, 4, 4),
    (128, 64, 4, 6), (128, 128, 4, 3), (128, 128, 4, 5), (128, 128, 8, 4),
)  # fmt: skip
_SWAPPED_MORE = (
    (16, 128, 2, 5), (32, 64, 4, 6), (32, 128, 4, 4), (32, 128, 4, 6), (64, 64, 4, 5), (64, 64, 4, 8), (64, 128, 4, 3),
    (64, 128, 4, 4), (64, 128, 4, 6), (128, 64, 4, 4), (128, 64, 4, 6), (128, 64, 8, 4), (128, 128, 8, 3),
)  # fmt: skip
# (block_m, block_n, block_k, warps, stages) with x as the first operand.
_STRAIGHT = (
    (64, 64, 64, 4, 6), (64, 128, 64, 4, 4), (64, 128, 128, 4, 3), (128, 64, 64, 4, 4), (128, 64, 128, 4, 3),
    (128, 128, 64, 4, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 128, 128, 8, 3),
)  # fmt: skip
_STRAIGHT_LARGE = (
    (128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4),
    (256, 128, 64, 8, 3), (256, 128, 64, 8, 4), (128, 256, 32, 8, 6), (64, 256, 64, 4, 4),
)  # fmt: skip


def _candidates(m: int) -> Iterator[Config]:
    if m <= 32:
        for block_m in (8, 16) if m <= 8 else (_power_of_two(m),):
            for block_n, block_k, warps, stages in _SWAPPED_FEW:
                yield Config(block_m, block_n, block_k, warps, stages, swapped=True, prefetch=2048)
        return
    if m <= 256:
        for block_m in {min(128, _power_of_two(m)), min(64, _power_of_two(m) // 2)}:
            for block_n, block_k, warps, stages in _SWAPPED_MORE:
                yield Config(block_m, block_n, block_k, warps, stages, swapped=True, prefetch=1024)
    if 64 <= m <= 512:
        for shape in _STRAIGHT:
            yield Config(*shape, swapped=False, prefetch=1024)
    if m >= 256:
        for shape in _STRAIGHT_LARGE:
            yield Config(*shape, swapped=False)
    if m >= 2048:
        for group_m in (4, 16):
            yield Config(128, 256, 64, 8, 4, swapped=False, group_m=group_m)


# --- Hopper -------------------------------------------------------------------------------------------

# As above.
_HOPPER_FEW = (
    (16, 64, 2, 8), (16, 512, 2, 4), (32, 128, 2, 6), (32, 256, 4, 6), (64, 64, 4, 8), (64, 128, 4, 6),
    (128, 128, 4, 5),
)  # fmt: skip
_HOPPER_SWAPPED = ((64, 64, 4, 8), (64, 128, 4, 6), (128, 64, 4, 6))
_HOPPER_STRAIGHT = ((64, 64, 64, 4, 6), (128, 128, 64, 8, 4), (128, 256, 64, 8, 4))
_HOPPER_LARGE = (
    (64, 64, 64, 4, 6), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4),
)  # fmt: skip


def _hopper(m: int) -> Iterator[Config]:
    if m <= 32:
        for block_n, block_k, warps, stages in _HOPPER_FEW:
            yield Config(max(8, _power_of_two(m)), block_n, block_k, warps, stages, swapped=True, prefetch=1024)
    elif m <= 256:
        for block_n, block_k, warps, stages in _HOPPER_SWAPPED:
            yield Config(64, block_n, block_k, warps, stages, swapped=True, prefetch=1024)
        for shape in _HOPPER_STRAIGHT:
            yield Config(*shape, swapped=False, prefetch=1024)
    else:
        for shape in _HOPPER_LARGE:
            yield Config(*shape, swapped=False)


# (least m, most m), then block_n, block_k, warps that multiply, programs a multiprocessor; W is the first operand.
_WIDE_SWAPPED = (
    ((1, 64), 64, 128, 4, 1), ((1, 64), 64, 256, 4, 1), ((1, 32), 64, 128, 4, 2), ((1, 64), 128, 128, 8, 1),
    ((33, 128), 64, 64, 4, 1), ((65, 128), 128, 64, 8, 1),
)  # fmt: skip
# The same with x as the first operand: block_m, block_n, warps that multiply, programs, row tiles in turn.
_WIDE_STRAIGHT = (
    ((33, 512), 64, 32, 4, 2, 8), ((33, 512), 64, 64, 4, 1, 8), ((65, 512), 128, 64, 8, 1, 8),
    ((65, 8192), 128, 128, 8, 1, 8), ((65, 8192), 128, 256, 8, 1, 8), ((513, 8192), 128, 256, 8, 1, 16),
    ((513, 8192), 256, 128, 8, 1, 8), ((513, 8192), 256, 128, 8, 1, 4),
)  # fmt: skip
_MOST_STAGES = 24
_LATE = range(65, 1024)
"""Numbers of rows where it matters when a wide kernel lets the next one start: with fewer it starts at once, with more
the multiprocessors are full until the end."""


def _wide(target: Target, op: str, m: int) -> Iterator[Config]:
    """Wide kernels, with as deep a pipeline as fits."""
    for (least, most), block_n, block_k, warps, units in _WIDE_SWAPPED:
        if least <= m <= most:
            block_m = max(8, _power_of_two(m))
            yield from _deep(target, op, Config(block_m, block_n, block_k, warps, 2, True, 8, 0, "wide", units), m)
    for (least, most), block_m, block_n, warps, units, group in _WIDE_STRAIGHT:
        if least <= min(m, 8192) <= most:
            yield from _deep(target, op, Config(block_m, block_n, 64, warps, 2, False, group, 0, "wide", units), m)


def _deep(target: Target, op: str, config: Config, m: int) -> Iterator[Config]:
    depths = (replace(config, num_stages=stages) for stages in range(_MOST_STAGES, 1, -1))
    deepest = next((deep for deep in depths if usable(deep, target, op)), None)
    if deepest is not None:
        yield deepest
        if m in _LATE:
            yield replace(deepest, early=False)
