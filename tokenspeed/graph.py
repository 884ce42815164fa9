"""LaunchGraph: what one bucket's step runs, as pure data. It is what a build writes and a device replays.

A graph is a list of nodes in an order that respects their edges. A node names a kernel by symbol and gives
its arguments; an argument is a place in a region (never an address), a number, or a size of the current
step. A GPU node also has a Launch: which binary holds the kernel, and how many threads run it. ``encode`` and ``decode`` are the file format (docs/launch_graph.md); the C++ reader is
csrc/device/graph.cpp. graph_verify.py proves that a graph is safe to replay.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum, IntFlag
from typing import Any, TypeAlias

from tokenspeed.errors import ProgramError
from tokenspeed.step import STEP_SCALARS

POINTER_ALIGNMENT = 4
"""Bytes to which every pointer is aligned at least: the largest scalar that a kernel may load on its own."""


class Region(IntEnum):
    """The five address ranges of a device; the numbers are those of the file format."""

    WEIGHTS = 0
    KV = 1
    ARENA = 2
    IO = 3
    STATE = 4

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


Argument: TypeAlias = Pointer | Int | Float | StepScalar


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
        """The pointer arguments with their positions."""
        return ((i, arg) for i, arg in enumerate(self.args) if isinstance(arg, Pointer))

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
        return _Encoder(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> LaunchGraph:
        """The graph of a file. Raises ProgramError, and nothing else, for bytes that are no such file."""
        return _Decoder(data).decode()


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


# --- the file format, little-endian (docs/launch_graph.md) --------------------------------------

MAGIC = b"TSLG"
VERSION = 2
"""History: 2 (2026-11-29) GPU nodes: binaries, launches, parameters of 4 bytes. 1 (2026-11-29) CPU nodes."""
_HEADER = struct.Struct("<4sHHIIIIIIII24s")
_SYMBOL = struct.Struct("<II")
_NODE = struct.Struct("<8I")
_LAUNCH = struct.Struct("<12I")
_ARG = struct.Struct("<BBBB4sQQQ")
_PROGRAMMATIC = 1
_U32_LIMIT = 1 << 32
_U64_LIMIT = 1 << 64
_POINTER, _INT, _FLOAT, _STEP_SCALAR = range(4)


class _Encoder:
    """Writes one graph. Symbols and binaries are sorted, and strings follow one another in the order of their use."""

    def __init__(self, graph: LaunchGraph):
        self._graph = graph
        self._strings = bytearray()

    def encode(self) -> bytes:
        nodes = self._graph.nodes
        symbols = sorted({node.symbol for node in nodes})
        binaries = sorted({node.launch.binary for node in nodes if node.launch is not None})
        names = b"".join(_SYMBOL.pack(*self._intern(name)) for name in (*symbols, *binaries))
        records, args, edges = self._node_sections(symbols)
        launches = self._launch_section(binaries) if binaries else b""
        body = names + records + launches + args + edges + bytes(self._strings)
        if _HEADER.size + len(body) >= _U32_LIMIT:
            raise ProgramError(f"launch graph: need fewer than 4 GiB, have {_HEADER.size + len(body)} bytes")
        header = _HEADER.pack(
            MAGIC, VERSION, _HEADER.size, _HEADER.size + len(body), len(symbols), len(binaries), len(nodes),
            len(args) // _ARG.size, len(edges) // 4, len(self._strings), zlib.crc32(body), bytes(24),
        )  # fmt: skip
        return header + body

    def _node_sections(self, symbols: list[str]) -> tuple[bytes, bytes, bytes]:
        number = {symbol: i for i, symbol in enumerate(symbols)}
        records, args, edges = bytearray(), bytearray(), bytearray()
        for node in self._graph.nodes:
            first_arg, first_edge = len(args) // _ARG.size, len(edges) // 4
            for position, arg in enumerate(node.args):
                args += _encode_argument(node, position, arg)
            edges += _encode_edges(node)
            counts = (number[node.symbol], first_arg, len(node.args), first_edge, len(node.predecessors))
            records += _NODE.pack(*counts, *self._intern(node.name), 0)
        return bytes(records), bytes(args), bytes(edges)

    def _launch_section(self, binaries: list[str]) -> bytes:
        number = {binary: i for i, binary in enumerate(binaries)}
        records = bytearray()
        for node in self._graph.nodes:
            launch = node.launch
            if launch is None:
                raise ProgramError(f"node {node.name!r}: need a launch, as other nodes of the graph have one")
            dims = (*launch.grid, *launch.block, *launch.cluster)
            if not all(0 < n < _U32_LIMIT for n in dims) or not 0 <= launch.shared_bytes < _U32_LIMIT:
                raise ProgramError(f"node {node.name!r}: need positive sizes of 32 bits to launch with, have {launch}")
            flags = _PROGRAMMATIC if launch.programmatic else 0
            records += _LAUNCH.pack(number[launch.binary], *dims, launch.shared_bytes, flags)
        return bytes(records)

    def _intern(self, text: str) -> tuple[int, int]:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise ProgramError(f"launch graph: need names in UTF-8, have {text!r}") from error
        offset = len(self._strings)
        self._strings += data
        return offset, len(data)


def _encode_edges(node: Node) -> bytes:
    for edge in node.predecessors:
        if not 0 <= edge < _U32_LIMIT:
            raise ProgramError(f"node {node.name!r}: need predecessors of 32 bits, have {edge}")
    return struct.pack(f"<{len(node.predecessors)}I", *node.predecessors)


def _encode_argument(node: Node, position: int, arg: Argument) -> bytes:
    where = f"node {node.name!r} arg {position}"
    match arg:
        case Pointer(region, offset, extent, access):
            if not _is_pointer(region, offset, extent, access):
                raise ProgramError(f"{where}: need an aligned range of 64 bits with an access, have {arg}")
            return _ARG.pack(_POINTER, region, access, 8, bytes(4), offset, extent, 0)
        case Int(value, size):
            if size not in _SIZES or not -(1 << 8 * size - 1) <= value < 1 << 8 * size - 1:
                raise ProgramError(f"{where}: need a signed number of 4 or 8 bytes, have {value} in {size}")
            return _ARG.pack(_INT, 0, 0, size, bytes(4), value % _U64_LIMIT, 0, 0)
        case Float(number, size):
            if size not in _SIZES or not _is_float(number, size):
                raise ProgramError(f"{where}: need a finite number of 4 or 8 bytes, have {number} in {size}")
            return _ARG.pack(_FLOAT, 0, 0, size, bytes(4), _float_bits(number), 0, 0)
        case StepScalar(index):
            if not 0 <= index < len(STEP_SCALARS):
                raise ProgramError(f"{where}: need a step scalar below {len(STEP_SCALARS)}, have {index}")
            return _ARG.pack(_STEP_SCALAR, 0, 0, 8, bytes(4), index, 0, 0)


_SIZES = (4, 8)


def _is_float(number: float, size: int) -> bool:
    """Whether a kernel gets ``number`` as it is: a parameter of 4 bytes holds float32 numbers only."""
    if not math.isfinite(number):
        return False
    try:
        return size == 8 or struct.unpack("<f", struct.pack("<f", number))[0] == number
    except OverflowError:
        return False


def _is_pointer(region: int, offset: int, extent: int, access: int) -> bool:
    """Whether a file can hold such a pointer. Sizes of regions are the verifier's business."""
    known = 0 <= region < len(Region) and 0 < access <= Access.READ | Access.WRITE
    return known and offset >= 0 and extent > 0 and offset + extent < _U64_LIMIT and offset % POINTER_ALIGNMENT == 0


def _float_bits(number: float) -> int:
    bits: int = struct.unpack("<Q", struct.pack("<d", number))[0]
    return bits


@dataclass(frozen=True)
class _Counts:
    """What a header says of the sections; a file with binaries has a launch for every node, one without has none."""

    symbols: int
    binaries: int
    nodes: int
    args: int
    edges: int
    string_bytes: int

    @property
    def launches(self) -> int:
        return self.nodes if self.binaries else 0

    @property
    def file_bytes(self) -> int:
        names = (self.symbols + self.binaries) * _SYMBOL.size
        records = self.nodes * _NODE.size + self.launches * _LAUNCH.size + self.args * _ARG.size
        return _HEADER.size + names + records + self.edges * 4 + self.string_bytes


class _Decoder:
    """Reads one graph from bytes that may be damaged or hostile.

    Nothing is believed before it is checked, and what was checked once is used as checked: sizes against the
    number of bytes, then the checksum, then every record. The tables must tile: each node owns exactly the
    arguments, edges and string that follow those of the node before it, so no file can make a small number
    of bytes look like a large graph, and a graph has one encoding only.
    """

    def __init__(self, data: bytes):
        self._data = bytes(data)

    def decode(self) -> LaunchGraph:
        counts = self._read_header()
        offset = _HEADER.size
        symbol_table, offset = self._take(offset, counts.symbols * _SYMBOL.size)
        binary_table, offset = self._take(offset, counts.binaries * _SYMBOL.size)
        node_table, offset = self._take(offset, counts.nodes * _NODE.size)
        launch_table, offset = self._take(offset, counts.launches * _LAUNCH.size)
        arg_table, offset = self._take(offset, counts.args * _ARG.size)
        edge_table, offset = self._take(offset, counts.edges * 4)
        self._strings, offset = self._take(offset, counts.string_bytes)
        self._next_string = 0
        symbols, binaries = self._names(symbol_table, "symbols"), self._names(binary_table, "binaries")
        launches = [_decode_launch(i, r, binaries) for i, r in enumerate(_LAUNCH.iter_unpack(launch_table))]
        args = list(_ARG.iter_unpack(arg_table))
        edges = [edge for (edge,) in struct.iter_unpack("<I", edge_table)]
        nodes, used_args, used_edges, used_symbols = [], 0, 0, set()
        for index, record in enumerate(_NODE.iter_unpack(node_table)):
            symbol, first_arg, count_args, first_edge, count_edges, name_offset, name_length, zero = record
            name = self._string(name_offset, name_length)
            if symbol >= counts.symbols:
                raise _damaged(f"node {name!r}: need a symbol below {counts.symbols}, have {symbol}")
            if zero or first_arg != used_args or first_edge != used_edges:
                raise _damaged(f"node {name!r}: need its arguments and edges right after those of the node before")
            used_args, used_edges = used_args + count_args, used_edges + count_edges
            if used_args > counts.args or used_edges > counts.edges:
                raise _damaged(
                    f"node {name!r}: need at most {counts.args} arguments and {counts.edges} edges, have more"
                )
            before = tuple(edges[first_edge:used_edges])
            if any(edge >= index for edge in before):
                raise _damaged(f"node {name!r}: need predecessors before node {index}, have {max(before)}")
            own = tuple(_decode_argument(name, i, args[first_arg + i]) for i in range(count_args))
            used_symbols.add(symbol)
            nodes.append(Node(name, symbols[symbol], own, before, launches[index] if launches else None))
        used = (used_args, used_edges, self._next_string, len(used_symbols))
        unused = set(binaries) - {launch.binary for launch in launches}
        if used != (counts.args, counts.edges, counts.string_bytes, counts.symbols) or unused:
            raise _damaged("need every argument, edge, symbol, binary and string to be used, have some left over")
        return LaunchGraph(tuple(nodes))

    def _read_header(self) -> _Counts:
        data = self._data
        if len(data) < _HEADER.size:
            raise _damaged(f"need a header of {_HEADER.size} bytes, have {len(data)}")
        magic, version, header_bytes, total, *numbers, crc, zeros = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise _damaged(f"need the magic {MAGIC!r}, have {magic!r}")
        if version != VERSION:
            raise ProgramError(
                f"launch graph: need format version {VERSION}, have {version}",
                hint="rebuild the artifact with this version of tokenspeed",
            )
        counts = _Counts(*numbers)
        need = counts.file_bytes
        if header_bytes != _HEADER.size or zeros.strip(b"\0") or total != len(data) or need != total:
            raise _damaged(f"need {need} bytes by its counts and {total} by its header, have {len(data)}")
        if zlib.crc32(memoryview(data)[_HEADER.size :]) != crc:
            raise _damaged("need the checksum of its header, have another")
        return counts

    def _names(self, table: bytes, what: str) -> list[str]:
        names = [self._string(*record) for record in _SYMBOL.iter_unpack(table)]
        if names != sorted(set(names)):
            raise _damaged(f"need {what} sorted and unique, have another order")
        return names

    def _take(self, offset: int, nbytes: int) -> tuple[bytes, int]:
        return self._data[offset : offset + nbytes], offset + nbytes

    def _string(self, offset: int, length: int) -> str:
        if offset != self._next_string or length > len(self._strings) - offset:
            raise _damaged(f"need a string at byte {self._next_string}, have {length} bytes at {offset}")
        self._next_string += length
        try:
            return self._strings[offset : offset + length].decode()
        except UnicodeDecodeError as error:
            raise _damaged(f"need a string in UTF-8 at byte {offset}, have none") from error


def _decode_launch(index: int, record: tuple[int, ...], binaries: list[str]) -> Launch:
    binary, *dims, shared_bytes, flags = record
    if binary >= len(binaries) or not all(dims) or flags & ~_PROGRAMMATIC:
        raise _damaged(f"node {index}: need a binary below {len(binaries)}, sizes above 0 and known flags to launch")
    grid, block, cluster = ((dims[i], dims[i + 1], dims[i + 2]) for i in (0, 3, 6))
    return Launch(binaries[binary], grid, block, shared_bytes, cluster, bool(flags & _PROGRAMMATIC))


def _decode_argument(
    node: str, position: int, record: tuple[int, int, int, int, bytes, int, int, int]
) -> Argument:  # fmt: skip
    kind, region, access, size, zeros, value, extent, zero = record
    where = f"node {node!r} arg {position}"
    if zero or zeros.strip(b"\0") or (kind != _POINTER and (region or access or extent)):
        raise _damaged(f"{where}: need zeros in unused bytes, have others")
    if size != 8 and not (size == 4 and kind in (_INT, _FLOAT)):
        raise _damaged(f"{where}: need a parameter of 8 bytes, or of 4 for a number, have {size}")
    if kind == _POINTER:
        if not _is_pointer(region, value, extent, access):
            raise _damaged(
                f"{where}: need a region below {len(Region)}, access 1 to 3 and an aligned range of 64 bits, "
                f"have region {region}, access {access}, {extent} bytes at {value}"
            )
        return Pointer(Region(region), value, extent, Access(access))
    if kind == _INT:
        signed = value - _U64_LIMIT if value >> 63 else value
        if size == 4 and not -(1 << 31) <= signed < 1 << 31:
            raise _damaged(f"{where}: need a signed number of 4 bytes, have {signed}")
        return Int(signed, size)
    if kind == _FLOAT:
        number: float = struct.unpack("<d", struct.pack("<Q", value))[0]
        if not _is_float(number, size):
            raise _damaged(f"{where}: need a finite number of {size} bytes, have {number}")
        return Float(number, size)
    if kind == _STEP_SCALAR and value < len(STEP_SCALARS):
        return StepScalar(value)
    raise _damaged(f"{where}: need a known kind of argument, have kind {kind} with value {value}")


def _damaged(text: str) -> ProgramError:
    return ProgramError(f"launch graph: {text}", hint="the file is damaged: copy or build the artifact again")
