"""The file format of LaunchGraphs, little-endian (docs/launch_graph.md): writer and reader."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tokenspeed.errors import ProgramError
from tokenspeed.graph import (
    POINTER_ALIGNMENT,
    Access,
    Argument,
    Bytes,
    Float,
    Int,
    Launch,
    LaunchGraph,
    Node,
    Pointer,
    Region,
    StepScalar,
)
from tokenspeed.step import STEP_SCALARS

MAGIC = b"TSLG"
VERSION = 3
"""History: 3 (2026-11-29) region host_io. 2 (2026-11-29) GPU nodes: binaries, launches, parameters of any size.
1 (2026-11-29) CPU nodes."""
_HEADER = struct.Struct("<4sHHIIIIIIIII20s")
_SYMBOL = struct.Struct("<II")
_NODE = struct.Struct("<8I")
_LAUNCH = struct.Struct("<12I")
_ARG = struct.Struct("<BBBB4sQQQ")
_PROGRAMMATIC = 1
_U32_LIMIT = 1 << 32
_U64_LIMIT = 1 << 64
_POINTER, _INT, _FLOAT, _STEP_SCALAR, _BYTES, _ADDRESS = range(6)
"""Kinds of argument records; an _ADDRESS is the place of a pointer in the _BYTES before it."""
_ADDRESS_BYTES = 8
_Record: TypeAlias = tuple[int, int, int, int, bytes, int, int, int]


def encode_graph(graph: LaunchGraph) -> bytes:
    """The file of ``graph``. Raises ProgramError for what no file can hold."""
    return _Encoder(graph).encode()


def decode_graph(data: bytes) -> LaunchGraph:
    """The graph in ``data``. Raises ProgramError, and nothing else, for bytes that are no such file."""
    return _Decoder(data).decode()


class _Encoder:
    """Writes one graph. Symbols and binaries are sorted; bytes and strings follow one another in the order of their
    use."""

    def __init__(self, graph: LaunchGraph):
        self._graph = graph
        self._data = bytearray()
        self._strings = bytearray()

    def encode(self) -> bytes:
        nodes = self._graph.nodes
        symbols = sorted({node.symbol for node in nodes})
        binaries = sorted({node.launch.binary for node in nodes if node.launch is not None})
        names = b"".join(_SYMBOL.pack(*self._intern(name)) for name in (*symbols, *binaries))
        records, args, edges = self._node_sections(symbols)
        launches = self._launch_section(binaries) if binaries else b""
        body = names + records + launches + args + edges + bytes(self._data) + bytes(self._strings)
        if _HEADER.size + len(body) >= _U32_LIMIT:
            raise ProgramError(f"launch graph: need fewer than 4 GiB, have {_HEADER.size + len(body)} bytes")
        header = _HEADER.pack(
            MAGIC, VERSION, _HEADER.size, _HEADER.size + len(body), len(symbols), len(binaries), len(nodes),
            len(args) // _ARG.size, len(edges) // 4, len(self._strings), zlib.crc32(body), len(self._data), bytes(20),
        )  # fmt: skip
        return header + body

    def _node_sections(self, symbols: list[str]) -> tuple[bytes, bytes, bytes]:
        number = {symbol: i for i, symbol in enumerate(symbols)}
        records, args, edges = bytearray(), bytearray(), bytearray()
        for node in self._graph.nodes:
            first_arg, first_edge = len(args) // _ARG.size, len(edges) // 4
            for position, arg in enumerate(node.args):
                args += self._argument(f"node {node.name!r} arg {position}", arg)
            edges += _encode_edges(node)
            count_args = len(args) // _ARG.size - first_arg
            counts = (number[node.symbol], first_arg, count_args, first_edge, len(node.predecessors))
            records += _NODE.pack(*counts, *self._intern(node.name), 0)
        return bytes(records), bytes(args), bytes(edges)

    def _argument(self, where: str, arg: Argument) -> bytes:
        if not isinstance(arg, Bytes):
            return _encode_argument(where, arg)
        problem = _bytes_problem(arg)
        if problem is not None:
            raise ProgramError(f"{where}: need {problem}")
        records = [_ARG.pack(_BYTES, 0, 0, 0, bytes(4), len(self._data), arg.size, 0)]
        self._data += arg.data
        for at, pointer in arg.pointers:
            _require_pointer(where, pointer)
            region, offset, extent, access = pointer.region, pointer.offset, pointer.extent, pointer.access
            records.append(_ARG.pack(_ADDRESS, region, access, 8, bytes(4), offset, extent, at))
        return b"".join(records)

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


def _encode_argument(where: str, arg: Pointer | Int | Float | StepScalar) -> bytes:
    match arg:
        case Pointer(region, offset, extent, access):
            _require_pointer(where, arg)
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


def _require_pointer(where: str, pointer: Pointer) -> None:
    if not _is_pointer(pointer.region, pointer.offset, pointer.extent, pointer.access):
        raise ProgramError(f"{where}: need an aligned range of 64 bits with an access, have {pointer}")


def _bytes_problem(arg: Bytes) -> str | None:
    """What a parameter passed by value needs and does not have, or None."""
    if not 0 < arg.size < _U32_LIMIT:
        return f"a parameter of 1 byte to 4 GiB, have {arg.size} bytes"
    end = 0
    for at, _ in arg.pointers:
        if at % _ADDRESS_BYTES or not end <= at <= arg.size - _ADDRESS_BYTES:
            places = [place for place, _ in arg.pointers]
            return f"ascending addresses at multiples of 8 within {arg.size} bytes, have them at {places}"
        end = at + _ADDRESS_BYTES
        if any(arg.data[at:end]):
            return f"zeros where an address goes, have others at {at}"
    return None


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
    data_bytes: int

    @property
    def launches(self) -> int:
        return self.nodes if self.binaries else 0

    @property
    def file_bytes(self) -> int:
        names = (self.symbols + self.binaries) * _SYMBOL.size
        records = self.nodes * _NODE.size + self.launches * _LAUNCH.size + self.args * _ARG.size
        return _HEADER.size + names + records + self.edges * 4 + self.data_bytes + self.string_bytes


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
        self._bytes, offset = self._take(offset, counts.data_bytes)
        self._strings, offset = self._take(offset, counts.string_bytes)
        self._next_byte, self._next_string = 0, 0
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
            own = self._arguments(name, args[first_arg:used_args])
            used_symbols.add(symbol)
            nodes.append(Node(name, symbols[symbol], own, before, launches[index] if launches else None))
        used = (used_args, used_edges, self._next_byte, self._next_string, len(used_symbols))
        unused = set(binaries) - {launch.binary for launch in launches}
        all_ = (counts.args, counts.edges, counts.data_bytes, counts.string_bytes, counts.symbols)
        if used != all_ or unused:
            raise _damaged("need every argument, edge, symbol, binary and string to be used, have some left over")
        return LaunchGraph(tuple(nodes))

    def _read_header(self) -> _Counts:
        data = self._data
        if len(data) < _HEADER.size:
            raise _damaged(f"need a header of {_HEADER.size} bytes, have {len(data)}")
        magic, version, header_bytes, total, *numbers, crc, data_bytes, zeros = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise _damaged(f"need the magic {MAGIC!r}, have {magic!r}")
        if version != VERSION:
            raise ProgramError(
                f"launch graph: need format version {VERSION}, have {version}",
                hint="rebuild the artifact with this version of tokenspeed",
            )
        counts = _Counts(*(*numbers, data_bytes))
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

    def _arguments(self, node: str, records: Sequence[_Record]) -> tuple[Argument, ...]:
        """The arguments of one node; addresses join the bytes that they follow."""
        args: list[Argument] = []
        at = 0
        while at < len(records):
            where = f"node {node!r} arg {len(args)}"
            first, at = records[at], at + 1
            if first[0] != _BYTES:
                args.append(_decode_argument(where, first))
                continue
            addresses = []
            while at < len(records) and records[at][0] == _ADDRESS:
                addresses.append(_decode_address(where, records[at]))
                at += 1
            parameter = Bytes(self._parameter(where, first), tuple(addresses))
            problem = _bytes_problem(parameter)
            if problem is not None:
                raise _damaged(f"{where}: need {problem}")
            args.append(parameter)
        return tuple(args)

    def _parameter(self, where: str, record: _Record) -> bytes:
        _, region, access, size, zeros, start, length, zero = record
        if region or access or size or zeros.strip(b"\0") or zero:
            raise _damaged(f"{where}: need zeros in unused bytes, have others")
        if start != self._next_byte or length > len(self._bytes) - start:
            raise _damaged(f"{where}: need bytes from {self._next_byte} on, have {length} bytes at {start}")
        self._next_byte += length
        return self._bytes[start : self._next_byte]

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


def _decode_address(where: str, record: _Record) -> tuple[int, Pointer]:
    """(place in the bytes, pointer): the record of a pointer, but for its last word."""
    _, region, access, size, zeros, value, extent, at = record
    pointer = _decode_argument(where, (_POINTER, region, access, size, zeros, value, extent, 0))
    assert isinstance(pointer, Pointer)
    return at, pointer


def _decode_argument(where: str, record: _Record) -> Argument:
    kind, region, access, size, zeros, value, extent, zero = record
    if kind == _ADDRESS:
        raise _damaged(f"{where}: need an address after the bytes that it lies in, have none before it")
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
