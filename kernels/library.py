"""Kernels that a library launches by itself: a build compiles a launcher around them and captures what it launches
(tokenspeed/compile/capture.py, docs/capture.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """Bytes ``[offset, offset + nbytes)`` of a workspace, under the name by which a launcher's arguments ask for it."""

    name: str
    offset: int
    nbytes: int


def parts(**nbytes: int) -> tuple[Part, ...]:
    """Parts of these sizes one after another, each aligned to 64 bytes."""
    placed, offset = [], 0
    for name, size in nbytes.items():
        placed.append(Part(name, offset, size))
        offset += -(-size // 64) * 64
    return tuple(placed)


def parts_bytes(placed: tuple[Part, ...]) -> int:
    """The workspace that holds all parts."""
    return max((part.offset + part.nbytes for part in placed), default=0)


@dataclass(frozen=True)
class LibraryKernel:
    """A launcher: what its launches depend on, but for the target, and for addresses.

    Attributes:
        library: whose kernels it launches; a key of ``compile.capture_build.LIBRARIES``.
        source: its file, below the folder kernels/.
        function: its symbol in the compiled launcher.
        constants: (macro, value) that it is compiled with, sorted by macro.
        integers: (name, value) of the whole numbers that it is called with, in order.
        parts: of the workspaces, the pieces that it gets pointers to.
    """

    library: str
    source: str
    function: str
    constants: tuple[tuple[str, int], ...]
    integers: tuple[tuple[str, int], ...]
    parts: tuple[Part, ...] = ()

    def __str__(self) -> str:
        numbers = ", ".join(f"{name}={value}" for name, value in (*self.constants, *self.integers))
        return f"{self.function}[{numbers}]"

    def to_json(self) -> dict[str, Any]:
        """What a selection report tells of it: the library has its own warps and stages."""
        return {"function": self.function, "constants": dict((*self.constants, *self.integers))}

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)
