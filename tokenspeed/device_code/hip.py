"""Reads an hsaco: the ELF file of AMD's code object formats 4 and 5 (LLVM's AMDGPU usage guide documents them).

The note NT_AMDGPU_METADATA holds a MessagePack map that names the target and describes every kernel. What the
hardware obeys is the kernel descriptor, 64 bytes under the symbol ``KERNEL.kd``: both must say the same.
"""

from __future__ import annotations

import struct
from typing import Any

from tokenspeed.device_code.elf import DYNSYM, OBJECT, Elf, Symbol
from tokenspeed.device_code.model import MAX_KERNELS, DeviceCode, Dim3, KernelInfo, check_params, damaged
from tokenspeed.device_code.msgpack import decode
from tokenspeed.target import Target

_OWNER, _METADATA = b"AMDGPU\0", 32
_MACHINES = {0x4C: "gfx942", 0x4F: "gfx950"}  # EF_AMDGPU_MACH, of the targets that this project builds for
_TRIPLE = "amdgcn-amd-amdhsa--"
_DESCRIPTOR = struct.Struct("<III52x")  # group segment, private segment, kernarg sizes


def read_hsaco(elf: Elf) -> DeviceCode:
    """The kernels of an hsaco. Raises ArtifactError, and nothing else."""
    notes = [contents for owner, kind, contents in elf.notes() if (owner, kind) == (_OWNER, _METADATA)]
    if len(notes) != 1:
        raise damaged(f"need one note of AMDGPU metadata, have {len(notes)}")
    metadata = decode(notes[0])
    if not isinstance(metadata, dict):
        raise damaged("need a map as AMDGPU metadata, have another value")
    entries: dict[str, Any] = {}
    for entry in _field(metadata, "amdhsa.kernels", list):
        name = _field(entry, ".name", str)
        if name in entries or len(entries) == MAX_KERNELS:
            raise damaged(f"need at most {MAX_KERNELS} kernels with names of their own, have {name!r:.80} on top")
        entries[name] = entry
    wanted = {_field(entry, ".symbol", str) for entry in entries.values()}
    tables = (section for section in elf.sections if section.kind == DYNSYM)
    symbols = {s.name: s for t in tables for s in elf.symbols(t) if s.kind == OBJECT and s.name in wanted}
    kernels = {name: _kernel(elf, name, entry, symbols.get(entry[".symbol"])) for name, entry in entries.items()}
    return DeviceCode(_architecture(elf, metadata), kernels)


def _architecture(elf: Elf, metadata: dict[str, Any]) -> Target:
    target = _field(metadata, "amdhsa.target", str)
    arch = target.removeprefix(_TRIPLE).partition(":")[0]
    machine = _MACHINES.get(elf.flags & 0xFF, arch)
    if not target.startswith(_TRIPLE + "gfx") or arch != machine:
        raise damaged(f"need the target {_TRIPLE}{machine} in AMDGPU metadata, have {target!r:.80}")
    return Target("hip", arch)


def _kernel(elf: Elf, name: str, entry: Any, descriptor: Symbol | None) -> KernelInfo:
    args = _field(entry, ".args", list, [])
    passed = [arg for arg in args if not _field(arg, ".value_kind", str).startswith("hidden_")]  # others: the driver's
    params = tuple((_size(arg, ".offset"), _size(arg, ".size")) for arg in passed)
    declared = tuple(
        _size(entry, f".{size}")
        for size in ("group_segment_fixed_size", "private_segment_fixed_size", "kernarg_segment_size")
    )
    check_params(name, params, declared[2])
    if descriptor is None or descriptor.size != _DESCRIPTOR.size:
        raise damaged(f"kernel {name!r}: need a descriptor of {_DESCRIPTOR.size} bytes, have none")
    section = elf.section(descriptor.section)
    at = descriptor.value - section.address
    if not 0 <= at <= section.size - _DESCRIPTOR.size:
        raise damaged(f"kernel {name!r}: need its descriptor inside section {section.name}, have it elsewhere")
    obeyed = _DESCRIPTOR.unpack(elf.bytes_at(section.offset + at, _DESCRIPTOR.size))
    if obeyed != declared:
        raise damaged(f"kernel {name!r}: need a descriptor that says {declared}, have {obeyed}")
    return KernelInfo(
        params=params,
        static_shared_bytes=declared[0],
        max_threads=_size(entry, ".max_flat_workgroup_size"),
        block=_required_block(entry),
        cluster=None,
        num_registers=_size(entry, ".vgpr_count"),
        stack_bytes=declared[1],
        warp_size=_size(entry, ".wavefront_size"),
    )


def _required_block(entry: Any) -> Dim3 | None:
    block = _field(entry, ".reqd_workgroup_size", list, [])
    if not block:
        return None
    if len(block) != 3 or not all(type(n) is int and 0 < n < 1 << 32 for n in block):
        raise damaged(f"need three sizes as the block of a kernel, have {block!r:.80}")
    return block[0], block[1], block[2]


def _field(entry: Any, key: str, kind: type, default: Any = None) -> Any:
    value = entry.get(key, default) if isinstance(entry, dict) else None
    if type(value) is not kind:
        raise damaged(f"need {key!r} as {kind.__name__} in AMDGPU metadata, have {value!r:.80}")
    return value


def _size(entry: Any, key: str) -> int:
    value: int = _field(entry, key, int)
    if not 0 <= value < 1 << 32:
        raise damaged(f"need {key!r} of 32 bits in AMDGPU metadata, have {value}")
    return value
