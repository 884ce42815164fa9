"""Reads a cubin: the ELF file that ptxas writes.

NVIDIA does not document the format. What is read here was worked out from files that ptxas 12.8 and 12.9 wrote,
and is checked against what cuobjdump says of them (tests/test_device_code.py):

- e_flags holds the architecture: the compute capability in bits 0-7 and "a" as bit 11 up to ABI version 7
  (Hopper), in bits 8-15 and as bit 3 in version 8 (Blackwell).
- ``.nv.info.KERNEL`` and ``.nv.info`` are lists of attributes: a byte of format, a byte of attribute, then two
  bytes of value, or, in format 4, of the length of the value that follows.
- ``.nv.shared.KERNEL`` has the size of the static shared memory. Since Hopper it starts with 1024 bytes that
  belong to the system; they are not among the bytes that a block may use, and are not counted here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Set

from tokenspeed.device_code.elf import FUNCTION, GLOBAL, SYMTAB, WEAK, Elf, Section, Symbol
from tokenspeed.device_code.model import MAX_KERNELS, DeviceCode, Dim3, KernelInfo, check_params, damaged
from tokenspeed.target import Target

_ENTRY = 0x10  # in st_other: a kernel, not a function called by one
_VALUE_FOLLOWS = 4
_MAX_THREADS, _REQUIRED_BLOCK, _FRAME_SIZE, _MIN_STACK_SIZE = 0x05, 0x10, 0x11, 0x12
_PARAM, _PARAM_BYTES, _NUM_REGISTERS, _REQUIRED_CLUSTER, _WIDE_PARAM = 0x17, 0x19, 0x2F, 0x3D, 0x45
_RESERVED_SHARED_BYTES = 1024
_THREADS_OF_A_BLOCK = 1024  # the limit of every architecture
_WARP_SIZE = 32


def read_cubin(elf: Elf) -> DeviceCode:
    """The kernels of a cubin. Raises ArtifactError, and nothing else."""
    capability, arch = _architecture(elf)
    by_name: dict[str, Section] = {}
    for section in elf.sections[1:]:
        if by_name.setdefault(section.name, section) is not section and section.name.startswith((".nv.info", ".text")):
            raise damaged(f"need one section {section.name}, have two")
    entries: dict[str, Symbol] = {}
    for symbol in _entries(elf):
        if symbol.name in entries or len(entries) == MAX_KERNELS:
            raise damaged(f"need at most {MAX_KERNELS} kernels with names of their own, have {symbol.name!r} on top")
        entries[symbol.name] = symbol
    facts = _per_symbol(elf, by_name.get(".nv.info"), {symbol.index for symbol in entries.values()})
    reserved = _RESERVED_SHARED_BYTES if capability >= 90 else 0
    kernels = {}
    for name, symbol in entries.items():
        shared = by_name.get(f".nv.shared.{name}")
        static = 0 if shared is None else max(0, shared.size - reserved)
        kernels[name] = _kernel(elf, symbol, by_name.get(f".nv.info.{name}"), facts, static)
    return DeviceCode(arch, kernels)


def _architecture(elf: Elf) -> tuple[int, Target]:
    match elf.abi_version:
        case 7:
            capability, specific = elf.flags & 0xFF, elf.flags & 0x800
        case 8:
            capability, specific = elf.flags >> 8 & 0xFF, elf.flags & 0x8
        case version:
            raise damaged(f"need a cubin of ABI version 7 or 8, have {version}")
    return capability, Target("cuda", f"sm_{capability}{'a' if specific else ''}")


def _entries(elf: Elf) -> Iterator[Symbol]:
    for table in elf.sections:
        if table.kind == SYMTAB and not table.name.startswith(".nv.merc"):
            for symbol in elf.symbols(table):
                visible = symbol.binding in (GLOBAL, WEAK) and symbol.section
                if visible and symbol.kind == FUNCTION and symbol.other & _ENTRY:
                    if elf.section(symbol.section).name != f".text.{symbol.name}":
                        raise damaged(f"kernel {symbol.name!r}: need its code in a section of its own")
                    yield symbol


def _attributes(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(attribute, value) of a list of attributes."""
    at = 0
    while at < len(data):
        if at + 4 > len(data):
            raise damaged(f"need an attribute of 4 bytes, have {len(data) - at}")
        form, attribute, length = data[at], data[at + 1], data[at + 2] | data[at + 3] << 8
        start, size = (at + 4, length) if form == _VALUE_FOLLOWS else (at + 2, 2)
        if start + size > len(data):
            raise damaged(f"need an attribute of {size} bytes, have {len(data) - start}")
        yield attribute, data[start : start + size]
        at = start + size


def _numbers(value: memoryview, form: str) -> tuple[int, ...]:
    if len(value) != struct.calcsize(form):
        raise damaged(f"need an attribute of {struct.calcsize(form)} bytes, have {len(value)}")
    return struct.unpack(form, value)


def _per_symbol(elf: Elf, section: Section | None, wanted: Set[int]) -> Mapping[tuple[int, int], int]:
    """(attribute, index of symbol) -> value, of the attributes that a file gives for all its functions at once."""
    facts: dict[tuple[int, int], int] = {}
    for attribute, value in _attributes(elf.contents(section)) if section is not None else ():
        if attribute in (_NUM_REGISTERS, _FRAME_SIZE, _MIN_STACK_SIZE):
            symbol, number = _numbers(value, "<II")
            if symbol in wanted:
                facts[attribute, symbol] = number
    return facts


def _kernel(
    elf: Elf, symbol: Symbol, section: Section | None, facts: Mapping[tuple[int, int], int], static_shared_bytes: int
) -> KernelInfo:
    if section is None:
        raise damaged(f"kernel {symbol.name!r}: need a section .nv.info.{symbol.name}, have none")
    params: dict[int, tuple[int, int]] = {}
    total = 0
    dims: dict[int, Dim3] = {}
    for attribute, value in _attributes(elf.contents(section)):
        if attribute in (_PARAM, _WIDE_PARAM):
            _, ordinal, offset, packed = _numbers(value, "<IHHI")
            size = packed >> 18 if attribute == _PARAM else packed & 0xFFFF
            if params.setdefault(ordinal, (offset, size)) != (offset, size):
                raise damaged(f"kernel {symbol.name!r}: need one parameter {ordinal}, have two")
        elif attribute == _PARAM_BYTES:
            (total,) = _numbers(value, "<H")
        elif attribute in (_MAX_THREADS, _REQUIRED_BLOCK, _REQUIRED_CLUSTER):
            x, y, z = _numbers(value, "<III")
            dims[attribute] = (x, y, z)
    if sorted(params) != list(range(len(params))):
        raise damaged(f"kernel {symbol.name!r}: need parameters numbered from 0, have others")
    ordered = tuple(params[i] for i in range(len(params)))
    check_params(symbol.name, ordered, total)
    registers = facts.get((_NUM_REGISTERS, symbol.index))
    if registers is None:
        raise damaged(f"kernel {symbol.name!r}: need its number of registers, have none")
    block = dims.get(_REQUIRED_BLOCK)
    x, y, z = block or dims.get(_MAX_THREADS) or (_THREADS_OF_A_BLOCK, 1, 1)
    return KernelInfo(
        params=ordered,
        static_shared_bytes=static_shared_bytes,
        max_threads=min(x * y * z, _THREADS_OF_A_BLOCK),
        block=block,
        cluster=dims.get(_REQUIRED_CLUSTER),
        num_registers=registers,
        stack_bytes=max(facts.get((a, symbol.index), 0) for a in (_FRAME_SIZE, _MIN_STACK_SIZE)),
        warp_size=_WARP_SIZE,
    )
