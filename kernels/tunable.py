"""What a family of kernels says so that ``tokenspeed tune`` can time its choices.

A family answers for the ops whose launches it may choose freely: which variants there are for a request, what a table
calls each of them, which operands they take, and how much work one call is. tokenspeed/compile/tuning.py does the
rest without knowing any op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenspeed.kernels.registry import Constant, Request, Stage


@dataclass(frozen=True)
class Variant:
    """One way to serve a request: ``config`` as tables hold it, and the launches."""

    config: Mapping[str, Constant]
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Operand:
    """Bytes of an operand or result. ``cold``: in a step it comes from memory, never from the cache."""

    nbytes: int
    cold: bool = False


@dataclass(frozen=True)
class Work:
    """What one call must do at least: bytes that it moves to and from memory, floating-point operations."""

    nbytes: int
    flops: int


@dataclass(frozen=True)
class Predecessor:
    """The op that comes before a call in a step: ``request`` for it, ``operand`` of the call that it writes, bytes of
    what it reads and values of its attributes by name."""

    request: Request
    operand: str
    operands: Mapping[str, int]
    attributes: Mapping[str, float]


class Family(Protocol):
    """Kernels of one file that share a table.

    Attributes:
        name: the list of kernels/tuning/<arch>.json that holds its entries.
        ops: kinds of op that it serves.
        dtypes: program dtypes worth tuning.
    """

    name: str
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]

    def key(self, request: Request) -> dict[str, int]:
        """The sizes by which a table finds an entry, but for M."""

    def variants(self, request: Request) -> Sequence[Variant]:
        """What is worth timing, the present choice among it. All give equal bits."""

    def operands(self, request: Request) -> Mapping[str, Operand]:
        """What the launches read, by the names of their argument rules; exactly one of them is cold."""

    def result(self, request: Request) -> tuple[str, int]:
        """Name of what the launches write, and the bytes of each of its M rows."""

    def work(self, request: Request) -> Work:
        """The least that one call does."""

    def predecessor(self, request: Request) -> Predecessor | None:
        """What comes before the call, or None where that makes no difference to the choice."""
