"""The memory plan: buffers with lifetimes -> offsets in one arena.

A target has one layout for all of its buckets: sizes are those of the largest step, so every smaller bucket
uses the front of the same buffers. Buffers whose lifetimes meet never share a byte; others may.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from tokenspeed.errors import ProgramError
from tokenspeed.step import ALIGNMENT, align


@dataclass(frozen=True)
class Buffer:
    """``nbytes`` that must stay untouched from op ``first`` (which may write them) to op ``last``, inclusive."""

    name: str
    nbytes: int
    first: int
    last: int

    def meets(self, other: Buffer) -> bool:
        """Whether there is an op during which both are alive."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class ArenaPlan:
    """Offsets by buffer name, each aligned to a cache line, and the size of the arena, in bytes."""

    offsets: Mapping[str, int]
    nbytes: int


def plan_arena(buffers: Iterable[Buffer]) -> ArenaPlan:
    """Place ``buffers``: largest first, each into the tightest gap that is free during its whole lifetime.

    The order of equally large buffers is by lifetime, longest first, then by first op and name, so equal
    buffers give equal plans whatever order they come in.
    """
    order = sorted(buffers, key=lambda b: (-b.nbytes, b.first - b.last, b.first, b.name))
    placed: list[tuple[Buffer, int]] = []
    for buffer in order:
        taken = sorted((at, at + align(other.nbytes)) for other, at in placed if buffer.meets(other))
        placed.append((buffer, _tightest_gap(taken, align(buffer.nbytes))))
    plan = ArenaPlan(
        offsets={buffer.name: at for buffer, at in sorted(placed, key=lambda item: (item[0].first, item[0].name))},
        nbytes=max((at + align(buffer.nbytes) for buffer, at in placed), default=0),
    )
    check_arena((buffer for buffer, _ in placed), plan)
    return plan


def _tightest_gap(taken: list[tuple[int, int]], need: int) -> int:
    """The start of the smallest gap between ``taken`` ranges that holds ``need`` bytes, or the end of them all."""
    best, best_size, end = -1, -1, 0
    for start, stop in taken:
        gap = start - end
        if gap >= need and (best < 0 or gap < best_size):
            best, best_size = end, gap
        end = max(end, stop)
    return end if best < 0 else best


def check_arena(buffers: Iterable[Buffer], plan: ArenaPlan) -> None:
    """Prove that ``plan`` is sound: aligned, inside the arena, and no two buffers that meet overlap.

    Raises ProgramError naming the buffers.
    """
    known = list(buffers)
    for buffer in known:
        at = plan.offsets[buffer.name]
        if at < 0 or at % ALIGNMENT or at + buffer.nbytes > plan.nbytes:
            raise ProgramError(
                f"buffer {buffer.name!r}: need {buffer.nbytes} bytes at a multiple of {ALIGNMENT} inside the arena "
                f"of {plan.nbytes} bytes, have offset {at}"
            )
    for a, b in combinations(known, 2):
        start, other = plan.offsets[a.name], plan.offsets[b.name]
        if a.meets(b) and start < other + b.nbytes and other < start + a.nbytes:
            raise ProgramError(
                f"buffers {a.name!r} and {b.name!r}: need bytes of their own, as both are alive at op "
                f"{max(a.first, b.first)}, have [{start}, {start + a.nbytes}) and [{other}, {other + b.nbytes})"
            )
