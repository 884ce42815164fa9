"""LaunchGraph: what one bucket's step runs, as pure data. It is what a build writes and a device replays.

A graph is a list of nodes in an order that respects their edges. A node names a kernel by symbol and gives
its arguments; an argument is a place in a region (never an address), a number, or a size of the current
step. A GPU node also has a Launch: which binary holds the kernel, and how many threads run it. ``encode`` and
``decode`` are the file format (graph_file.py, docs/launch_graph.md); the C++ reader is csrc/device/graph.cpp.
graph_verify.py proves that a graph is safe to replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum, IntFlag
from typing import Any, TypeAlias

from tokenspeed.step import STEP_SCALARS

POINTER_ALIGNMENT = 4
"""Bytes to which every pointer is aligned at least: the largest scalar that a kernel may load on its own."""


class Region(IntEnum):
    """The address ranges of a device; the numbers are those of the file format.

    HOST_IO is a GPU's alone: the host's memory of a step's inputs and outputs, laid out as IO, which kernels read and
    write where it lies. A CPU has one memory: there a step's inputs and outputs are in IO.
    """

    WEIGHTS = 0
    KV = 1
    ARENA = 2
    IO = 3
    STATE = 4
    HOST_IO = 5

    def __str__(self) -> str:
        return self.name.lower()


class Access(IntFlag):
    """What a kernel does to the bytes of a pointer."""

    READ = 1
    WRITE = 2

    def __str__(self) -> str:
        return {1: "r", 2: "w", 3: "rw"}.get(self.value, "-")


@dataclass(frozen=True, slots=True)
class Pointer:
    """Bytes ``[offset, offset + extent)`` of a region, the most that the kernel touches in this bucket.

    In region kv both lie within one page: the kernel strides over the pages itself.
    """

    region: Region
    offset: int
    extent: int
    access: Access

    def __str__(self) -> str:
        return f"{self.region}[{self.offset}:{self.offset + self.extent}]{self.access}"

    @property
    def end(self) -> int:
        return self.offset + self.extent

    @property
    def writes(self) -> bool:
        return self.access >= Access.WRITE  # far cheaper than a bit test of an IntFlag


@dataclass(frozen=True, slots=True)
class Int:
    """A signed number, fixed at build; ``size`` is that of the kernel's parameter, 4 or 8 bytes."""

    value: int
    size: int = 8

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Float:
    """A finite number, fixed at build; the kernel's parameter is a float64, or a float32 if ``size`` is 4."""

    value: float
    size: int = 8

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class StepScalar:
    """A size of the current step: ``index`` into ``STEP_SCALARS``. The kernel sees it as a signed 64-bit number."""

    index: int

    def __str__(self) -> str:
        return STEP_SCALARS[self.index] if 0 <= self.index < len(STEP_SCALARS) else f"scalar {self.index}"


@dataclass(frozen=True, slots=True)
class Bytes:
    """A parameter that is passed as it lies in memory, such as a struct of a library's kernel.

    ``pointers`` are the addresses in it: (byte offset, what it points to), ascending; offsets are multiples of 8, and
    the 8 bytes of ``data`` there are zero.
    """

    data: bytes
    pointers: tuple[tuple[int, Pointer], ...] = ()

    def __str__(self) -> str:
        inside = ", ".join(f"{at}: {pointer}" for at, pointer in self.pointers)
        return f"{self.size} bytes" + (f" {{{inside}}}" if inside else "")

    @property
    def size(self) -> int:
        return len(self.data)


Argument: TypeAlias = Pointer | Int | Float | StepScalar | Bytes

Dim3: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Launch:
    """How a GPU runs a node.

    Attributes:
        binary: name of the code object that holds the symbol: the stem of its file in the artifact.
        grid: blocks in x, y, z.
        block: threads of a block in x, y, z.
        shared_bytes: dynamic shared memory of a block.
        cluster: blocks of a cluster in x, y, z.
        programmatic: the kernel may start before its predecessors have finished, and waits for them itself
            (programmatic dependent launch).
    """

    binary: str
    grid: Dim3
    block: Dim3
    shared_bytes: int = 0
    cluster: Dim3 = (1, 1, 1)
    programmatic: bool = False

    def __str__(self) -> str:
        parts = [f"<{_dims(self.grid)} x {_dims(self.block)}"]
        if self.cluster != (1, 1, 1):
            parts.append(f"clusters {_dims(self.cluster)}")
        if self.shared_bytes:
            parts.append(f"{self.shared_bytes} B shared")
        return ", ".join(parts) + (", programmatic>" if self.programmatic else ">")


def _dims(dims: Dim3) -> str:
    x, y, z = dims
    return f"{x}x{y}x{z}" if z > 1 else f"{x}x{y}" if y > 1 else str(x)


@dataclass(frozen=True, slots=True)
class Node:
    """One kernel launch. ``predecessors`` are indexes of earlier nodes that must have finished, ascending;
    ``launch`` is None for a function of the native kernel library."""

    name: str
    symbol: str
    args: tuple[Argument, ...]
    predecessors: tuple[int, ...] = ()
    launch: Launch | None = None

    def pointers(self) -> Iterator[tuple[int, Pointer]]:
        """All pointers with the positions of their arguments."""
        for i, arg in enumerate(self.args):
            if isinstance(arg, Pointer):
                yield i, arg
            elif isinstance(arg, Bytes):
                yield from ((i, pointer) for _, pointer in arg.pointers)

    def __str__(self) -> str:
        after = f"  after {', '.join(map(str, self.predecessors))}" if self.predecessors else ""
        launch = "" if self.launch is None else f"{self.launch} "
        return f"{self.name} = {self.symbol}{launch.rstrip()}({', '.join(map(str, self.args))}){after}"


@dataclass(frozen=True, slots=True)
class LaunchGraph:
    """The nodes of one bucket, in an order that respects every edge."""

    nodes: tuple[Node, ...]

    def __str__(self) -> str:
        return "\n".join(f"{i:4d}  {node}" for i, node in enumerate(self.nodes))

    def to_json(self) -> dict[str, Any]:
        """The graph as plain values for ``inspect --json``."""
        return {"nodes": [_node_json(node) for node in self.nodes]}

    def encode(self) -> bytes:
        """The graph's file: equal graphs give equal bytes. Raises ProgramError for what no file can hold."""
        from tokenspeed.graph_file import encode_graph

        return encode_graph(self)

    @classmethod
    def decode(cls, data: bytes) -> LaunchGraph:
        """The graph of a file. Raises ProgramError, and nothing else, for bytes that are no such file."""
        from tokenspeed.graph_file import decode_graph

        return decode_graph(data)


def _node_json(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "symbol": node.symbol,
        "args": [_argument_json(arg) for arg in node.args],
        "predecessors": list(node.predecessors),
        **({} if node.launch is None else {"launch": asdict(node.launch)}),
    }


def _argument_json(arg: Argument) -> dict[str, Any]:
    match arg:
        case Pointer(region, offset, extent, access):
            return {"region": str(region), "offset": offset, "extent": extent, "access": str(access)}
        case Int(value, size):
            return {"int": value, "bytes": size}
        case Float(value, size):
            return {"float": value, "bytes": size}
        case StepScalar():
            return {"step": str(arg)}
        case Bytes(data, pointers):
            return {"hex": data.hex(), "pointers": {str(at): _argument_json(pointer) for at, pointer in pointers}}
