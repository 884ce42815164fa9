"""Capture: what a library launches, read back from the driver and made independent of addresses.

A launcher (kernels/library.py) is called twice under stream capture, with addresses that no memory has: one for each
of its arguments, others each time. In what it launched, exactly those words that moved as an argument moved are
addresses of it; anything else that differs is an error. So no number is ever taken for an address, and no memory is
needed. The result holds no address: it is a template that binds to any layer, bucket and region
(``CapturedCall.nodes``), and it is kept in the cache of compiled kernels, from which a build without a GPU takes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenspeed.device_code import read_device_code
from tokenspeed.errors import TargetError
from tokenspeed.gpu_verify import runs_on
from tokenspeed.graph import Argument, Bytes, Dim3, Int, Launch, Node, Pointer
from tokenspeed.kernels.library import LibraryKernel
from tokenspeed.target import Target

WORD = 8
"""Bytes of an address. Compilers align addresses inside structs to their size."""
ARGUMENT_SPAN = 1 << 36
"""Distance between the stand-ins of two arguments: more than any argument has bytes."""
_ORIGINS = (0x1A5C << 32, 0x5E93 << 32)
"""Where the stand-ins of the two captures begin. User addresses have 47 bits."""
MAX_ARGUMENTS = 64


@dataclass(frozen=True)
class CaptureJob:
    """One call to capture: a launcher, how many pointers it gets, and its floats. Equal jobs launch the same."""

    kernel: LibraryKernel
    num_pointers: int
    floats: tuple[float, ...] = ()


@dataclass(frozen=True)
class RawLaunch:
    """A launch as the driver recorded it. ``parameters`` are the bytes of each."""

    symbol: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    parameters: tuple[bytes, ...]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "parameters": [parameter.hex() for parameter in self.parameters]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RawLaunch:
        grid, block, cluster = ((x, y, z) for x, y, z in (data["grid"], data["block"], data["cluster"]))
        parameters = tuple(bytes.fromhex(text) for text in data["parameters"])
        return cls(data["symbol"], grid, block, cluster, data["shared_bytes"], parameters)


@dataclass(frozen=True)
class Relocation:
    """At byte ``place`` of a parameter goes the address of argument number ``argument`` plus ``delta`` bytes."""

    place: int
    argument: int
    delta: int


@dataclass(frozen=True)
class CapturedParameter:
    """A parameter whose ``data`` is zero where an address goes."""

    data: bytes
    relocations: tuple[Relocation, ...] = ()


@dataclass(frozen=True)
class CapturedLaunch:
    """A launch that holds no address."""

    symbol: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    parameters: tuple[CapturedParameter, ...]


@dataclass(frozen=True)
class CapturedCall:
    """What a launcher launches, in order; ``binary`` is the name of the code object that holds the kernels."""

    binary: str
    launches: tuple[CapturedLaunch, ...]

    def nodes(self, name: str, pointers: Sequence[Pointer]) -> Iterator[Node]:
        """The launches as nodes of a LaunchGraph, without edges: ``name``, ``name.1``, ``name.2``, ...

        ``pointers`` are the launcher's arguments. A pointer into one reaches from there to its end, with its access.
        """
        for number, launch in enumerate(self.launches):
            args = tuple(_argument(parameter, pointers, launch.symbol) for parameter in launch.parameters)
            how = Launch(self.binary, launch.grid, launch.block, launch.shared_bytes, launch.cluster)
            yield Node(f"{name}.{number}" if number else name, launch.symbol, args, (), how)


@dataclass(frozen=True)
class Captures:
    """The captured calls of one target, and the code objects that their kernels are in, by name."""

    calls: Mapping[CaptureJob, CapturedCall]
    binaries: Mapping[str, bytes]


def stand_ins(num_arguments: int, capture: int) -> tuple[int, ...]:
    """An address for each argument of a launcher, in capture 0 or 1. No two arguments move by the same distance, and
    they lie in another order and wider apart in capture 1: what is computed of several of them changes as well."""
    assert num_arguments <= MAX_ARGUMENTS and capture in (0, 1)
    order, stride = (range(num_arguments), 1) if capture == 0 else (range(num_arguments - 1, -1, -1), 3)
    return tuple(_ORIGINS[capture] + number * stride * ARGUMENT_SPAN for number in order)


def relocate(
    first: Sequence[RawLaunch], second: Sequence[RawLaunch], num_arguments: int, where: str
) -> tuple[CapturedLaunch, ...]:
    """What two captures of one call have in common, with the addresses found.

    Raises TargetError, beginning with ``where``, if they differ in anything but addresses of arguments, or if an
    argument is passed to no kernel (a launcher that reads its arguments in the wrong order does that).
    """
    if [replace(a, parameters=()) for a in first] != [replace(b, parameters=()) for b in second]:
        have = f"{_shapes(first)} and {_shapes(second)}"
        raise _failure(where, f"need equal launches whatever the addresses, have {have}")
    bases = stand_ins(num_arguments, 0), stand_ins(num_arguments, 1)
    launches = []
    for a, b in zip(first, second, strict=True):
        if list(map(len, a.parameters)) != list(map(len, b.parameters)):
            raise _failure(where, f"need parameters of equal sizes in both captures of {a.symbol}")
        parameters = tuple(
            _relocate_parameter(x, y, bases, f"{where}: parameter {i} of {a.symbol}")
            for i, (x, y) in enumerate(zip(a.parameters, b.parameters, strict=True))
        )
        launches.append(CapturedLaunch(a.symbol, a.grid, a.block, a.cluster, a.shared_bytes, parameters))
    used = {r.argument for launch in launches for parameter in launch.parameters for r in parameter.relocations}
    unused = sorted(set(range(num_arguments)) - used)
    if unused:
        raise _failure(where, f"need every pointer to be passed to a kernel, have none that gets argument {unused[0]}")
    return tuple(launches)


def _relocate_parameter(
    a: bytes, b: bytes, bases: tuple[tuple[int, ...], tuple[int, ...]], where: str
) -> CapturedParameter:
    data, found = bytearray(a), []
    for place in range(0, len(a), WORD):
        word, other = a[place : place + WORD], b[place : place + WORD]
        if word == other:
            continue
        argument = _argument_of(word, other, bases)
        if argument is None:
            at = next(i for i in range(place, len(a)) if a[i] != b[i])
            raise TargetError(
                f"{where}: need bytes that depend on nothing but addresses, have {word.hex()} and {other.hex()} at "
                f"{at}, which are no address of an argument",
                hint="zero the launcher's structs before they are filled: padding must not be left to chance",
            )
        data[place : place + WORD] = bytes(WORD)
        found.append(Relocation(place, argument, int.from_bytes(word, "little") - bases[0][argument]))
    return CapturedParameter(bytes(data), tuple(found))


def _argument_of(word: bytes, other: bytes, bases: tuple[tuple[int, ...], tuple[int, ...]]) -> int | None:
    """The argument into which the address ``word`` points in the first capture, and ``other`` in the second."""
    if len(word) < WORD:
        return None
    at, then = int.from_bytes(word, "little"), int.from_bytes(other, "little")
    for argument, (base, base_then) in enumerate(zip(*bases, strict=True)):
        if 0 <= at - base < ARGUMENT_SPAN and at - base == then - base_then:
            return argument
    return None


def _argument(parameter: CapturedParameter, pointers: Sequence[Pointer], symbol: str) -> Argument:
    inside = tuple((r.place, _inner_pointer(r, pointers, symbol)) for r in parameter.relocations)
    size = len(parameter.data)
    if inside and size == WORD:
        return inside[0][1]
    if not inside and size in (4, 8):
        return Int(int.from_bytes(parameter.data, "little", signed=True), size)
    return Bytes(parameter.data, inside)


def _inner_pointer(relocation: Relocation, pointers: Sequence[Pointer], symbol: str) -> Pointer:
    whole = pointers[relocation.argument]
    if relocation.delta >= whole.extent:
        raise _failure(
            symbol, f"need addresses inside the arguments, have byte {relocation.delta} of {whole}, argument "
            f"{relocation.argument}"
        )  # fmt: skip
    return replace(whole, offset=whole.offset + relocation.delta, extent=whole.extent - relocation.delta)


def check_binary(launches: Sequence[CapturedLaunch], binary: bytes, target: Target, where: str) -> None:
    """Check the launches against what ``binary``, the launcher's device code, says of itself.

    Raises TargetError if it is for another target, lacks a kernel, or has one with other parameters.
    """
    code = read_device_code(binary)
    if not runs_on(code.arch, target):
        raise _failure(where, f"need code for {target}, have {code.arch}")
    for launch in launches:
        info = code.kernels.get(launch.symbol)
        if info is None:
            raise _failure(where, f"need kernel {launch.symbol} in the launcher's own code, have it elsewhere")
        have, need = [len(p.data) for p in launch.parameters], [size for _, size in info.params]
        if have != need:
            raise _failure(where, f"need parameters of {need} bytes for {launch.symbol}, have {have}")


def _shapes(launches: Sequence[RawLaunch]) -> str:
    return "; ".join(f"{a.symbol} {a.grid} x {a.block}, {a.shared_bytes} B shared" for a in launches) or "none"


def _failure(where: str, text: str) -> TargetError:
    return TargetError(f"{where}: {text}", hint="choose another solution for this op with --solution")


# --- what the cache keeps -----------------------------------------------------------------------


def job_key(job: CaptureJob, launcher: str) -> str:
    """Cache key of a captured call; ``launcher`` is the key of its compiled launcher."""
    facts = [launcher, job.kernel.function, job.kernel.integers, job.num_pointers, [f.hex() for f in job.floats]]
    return hashlib.sha256(json.dumps(["capture", *facts]).encode()).hexdigest()


def launches_to_bytes(launches: Sequence[CapturedLaunch]) -> bytes:
    """Launches as JSON, for ``launches_from_bytes``."""

    def parameter(p: CapturedParameter) -> list[Any]:
        return [p.data.hex(), [[r.place, r.argument, r.delta] for r in p.relocations]]

    return json.dumps([{**vars(a), "parameters": [parameter(p) for p in a.parameters]} for a in launches]).encode()


def launches_from_bytes(data: bytes) -> tuple[CapturedLaunch, ...]:
    """Launches that ``launches_to_bytes`` wrote."""
    launches = []
    for item in json.loads(data):
        grid, block, cluster = ((x, y, z) for x, y, z in (item["grid"], item["block"], item["cluster"]))
        parameters = tuple(
            CapturedParameter(bytes.fromhex(text), tuple(Relocation(*r) for r in relocations))
            for text, relocations in item["parameters"]
        )
        launches.append(CapturedLaunch(item["symbol"], grid, block, cluster, item["shared_bytes"], parameters))
    return tuple(launches)
