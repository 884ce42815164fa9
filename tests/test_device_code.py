"""The readers of code objects agree with NVIDIA's and AMD's own tools, and survive hostile bytes."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_kernels import JOBS, TARGETS, compiled, product_kernel, scale_kernel

from tokenspeed.compile.codegen import Job
from tokenspeed.device_code import KernelInfo, read_device_code
from tokenspeed.device_code.model import MAX_FILE_BYTES
from tokenspeed.device_code.msgpack import decode
from tokenspeed.errors import ArtifactError
from tokenspeed.target import Target

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CUDA = tuple(t for t in TARGETS if t.backend == "cuda")
HIP = tuple(t for t in TARGETS if t.backend == "hip")
RESERVED = 1024  # bytes of shared memory that the system keeps of a block; cuobjdump counts them where any is used
PTX = """
.version {version}
.target {arch}
.address_size 64
.visible .entry plain(.param .u64 a, .param .u32 b, .param .u8 c, .param .align 8 .b8 d[24]) .maxntid 96
{{ .reg .u64 %r<2>; .reg .u32 %x<2>;
 ld.param.u64 %r1, [a]; ld.param.u32 %x1, [b]; st.global.u32 [%r1], %x1; ret; }}
.visible .entry fixed(.param .u64 a) .reqntid 64, 2, 1
{{ .reg .u64 %r<2>; .reg .u32 %x<3>; .shared .align 4 .b8 kept[40];
 ld.param.u64 %r1, [a]; mov.u32 %x1, kept; ld.shared.u32 %x2, [%x1]; st.global.u32 [%r1], %x2; ret; }}
.visible .entry stacked(.param .u64 a)
{{ .local .align 4 .b8 buffer[400]; .reg .u64 %r<4>; .reg .u32 %x<5>;
 ld.param.u64 %r1, [a]; ld.global.u32 %x1, [%r1]; mul.wide.u32 %r3, %x1, 4; mov.u64 %r2, buffer; add.u64 %r2, %r2, %r3;
 mov.u32 %x2, %tid.x; st.local.u32 [%r2], %x2; ld.global.u32 %x3, [%r1+4]; mul.wide.u32 %r3, %x3, 4;
 mov.u64 %r2, buffer; add.u64 %r2, %r2, %r3; ld.local.u32 %x4, [%r2]; st.global.u32 [%r1+8], %x4; ret; }}
.visible .entry wide(.param .u64 a, .param .align 8 .b8 d[20000], .param .u32 z) .reqnctapercluster 2, 1, 1
{{ .reg .u64 %r<2>; .reg .u32 %x<2>;
 ld.param.u64 %r1, [a]; ld.param.u32 %x1, [z]; st.global.u32 [%r1], %x1; ret; }}
"""
AMDGCN = """
import json, sys
from pathlib import Path
from triton import compiler
from triton.backends.compiler import GPUTarget
import tiny_kernels
kernel, arch = tiny_kernels.product_kernel(), sys.argv[1]
names = tiny_kernels.product.arg_names
types, constants = dict(kernel.signature), dict(kernel.constants)
source = compiler.ASTSource(
    tiny_kernels.product, {n: types.get(n, "constexpr") for n in names},
    {(names.index(n),): v for n, v in constants.items()}, {(names.index(n),): [["tt.divisibility", 16]] for n in types})
made = compiler.compile(source, target=GPUTarget("hip", arch, 64),
                        options={"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False})
facts = {"name": made.metadata.name, "shared": made.metadata.shared, "num_warps": made.metadata.num_warps}
print(json.dumps({"facts": facts, "text": made.asm["amdgcn"]}))
"""


def cuobjdump(path: Path, *options: str) -> str:
    return subprocess.run([TOOLS / "cuobjdump", *options, path], capture_output=True, text=True, check=True).stdout


def usage(path: Path) -> dict[str, dict[str, int]]:
    """Resources of every kernel, as cuobjdump prints them."""
    found = re.findall(r" Function (\w+):\n\s+(.*)", cuobjdump(path, "-res-usage"))
    return {name: {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)} for name, line in found}


def dumped_params(path: Path) -> dict[str, dict[int, tuple[int, int]]]:
    """Ordinal -> (offset, size) of the parameters of every kernel, as cuobjdump prints them."""
    found: dict[str, dict[int, tuple[int, int]]] = {}
    text = cuobjdump(path, "--dump-elf")
    for name, section in re.findall(r"^\.nv\.info\.(\w+)\n(.*?)(?=^\.|\Z)", text, re.DOTALL | re.MULTILINE):
        items = re.findall(r"Ordinal : 0x(\w+)\s+Offset  : 0x(\w+)\s+Size    : 0x(\w+)", section)
        found[name] = {int(o, 16): (int(at, 16), int(n, 16)) for o, at, n in items}
    return found


def agrees(path: Path, kernels: Any) -> None:
    resources, params = usage(path), dumped_params(path)
    assert set(kernels) == set(resources) == set(params)
    for name, info in kernels.items():
        assert info.num_registers == resources[name]["REG"] and info.stack_bytes == resources[name]["STACK"], name
        shared = resources[name]["SHARED"]
        assert info.static_shared_bytes == (shared - RESERVED if shared else 0), name
        assert dict(enumerate(info.params)) == params[name], name


# ---- agreement with the tools ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job", [job for job in JOBS if job[1].backend == "cuda"], ids=lambda j: f"{j[1]}-{j[0].function}"
)
def test_cubins_of_triton(job: Job, tmp_path: Path) -> None:
    kernel, target = job
    path = tmp_path / "code.cubin"
    path.write_bytes(compiled()[job].binary)
    code = read_device_code(compiled()[job].binary)
    assert code.arch == target
    agrees(path, code.kernels)
    info = code.kernels[kernel.function]
    assert info.block == (kernel.num_warps * 32, 1, 1) and info.cluster is None
    sizes = [8 if kind.startswith("*") else 4 for _, kind in kernel.signature] + [8, 8]
    assert [size for _, size in info.params] == sizes


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103a", "sm_120", "sm_120a"])
def test_cubins_of_ptxas(arch: str, tmp_path: Path) -> None:
    """Parameters of all kinds, stack, static shared memory, fixed blocks and clusters: none of it in Triton's code."""
    tool, version = ("ptxas", "8.6") if arch.startswith("sm_9") else ("ptxas-blackwell", "8.8")
    (tmp_path / "code.ptx").write_text(PTX.format(arch=arch, version=version))
    subprocess.run([TOOLS / tool, f"--gpu-name={arch}", "code.ptx", "-o", "code.cubin"], cwd=tmp_path, check=True)
    code = read_device_code((tmp_path / "code.cubin").read_bytes())
    assert code.arch == Target("cuda", arch)
    agrees(tmp_path / "code.cubin", code.kernels)
    plain, fixed, stacked, wide = (code.kernels[name] for name in ("plain", "fixed", "stacked", "wide"))
    assert plain.params == ((0, 8), (8, 4), (12, 1), (16, 24)) and (plain.block, plain.max_threads) == (None, 96)
    assert (fixed.static_shared_bytes, fixed.block, fixed.max_threads) == (40, (64, 2, 1), 128)
    assert (stacked.stack_bytes, stacked.static_shared_bytes, stacked.max_threads) == (400, 0, 1024)
    assert wide.params == ((0, 8), (8, 20000), (20008, 4)) and wide.cluster == (2, 1, 1)


@pytest.mark.parametrize("target", HIP, ids=str)
def test_hsacos(target: Target) -> None:
    """The assembly text has the same metadata in YAML, and Triton says of it what it knows itself."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_ALWAYS_COMPILE": "1"}
    env.pop("TRITON_INTERPRET", None)
    ran = subprocess.run([sys.executable, "-c", AMDGCN, target.arch], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr
    made = json.loads(ran.stdout)
    text, facts = made["text"].split(".amdgpu_metadata")[1], made["facts"]

    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", text)[1])  # type: ignore[index]

    args = re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)", text)
    code = compiled()[product_kernel(), target]
    assert read_device_code(code.binary).arch == target and f"amdgcn-amd-amdhsa--{target.arch}" in text
    assert code.info == KernelInfo(
        params=tuple((int(offset), int(size)) for offset, size in args),
        static_shared_bytes=number("group_segment_fixed_size"),
        max_threads=number("max_flat_workgroup_size"),
        block=None,
        cluster=None,
        num_registers=number("vgpr_count"),
        stack_bytes=number("private_segment_fixed_size"),
        warp_size=number("wavefront_size"),
    )
    assert (code.symbol, code.shared_bytes, code.threads) == (facts["name"], facts["shared"], facts["num_warps"] * 64)


# ---- hostile bytes --------------------------------------------------------------------------------------------

SAMPLES = {f"{target}": lambda target=target: compiled()[scale_kernel(), target].binary for target in TARGETS}
every_sample = pytest.mark.parametrize("sample", SAMPLES)


def survives(data: bytes) -> bool:
    """Whether ``data`` reads as a code object. Anything but an answer or an ArtifactError fails the test."""
    try:
        read_device_code(data)
    except ArtifactError as e:
        assert e.message.startswith("device code: ") and e.hint
        return False
    return True


@every_sample
def test_truncated_files_are_refused(sample: str) -> None:
    data = SAMPLES[sample]()
    for size in [*range(0, 1024), *range(1024, len(data), 13)]:
        cut = data[:size]
        assert not survives(cut) or sample.startswith("hip"), size  # AMD's linker puts nothing needed at the end


@every_sample
def test_damaged_bytes_never_raise_anything_else(sample: str) -> None:
    data, random_ = SAMPLES[sample](), random.Random(sample)
    refused = 0
    for _ in range(1500):
        copy = bytearray(data)
        for _ in range(random_.choice((1, 1, 2, 8))):
            at = random_.randrange(len(copy))
            if random_.random() < 0.5:
                copy[at] = random_.randrange(256)
            else:
                word = random_.choice((0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, len(data), random_.getrandbits(32)))
                copy[at : at + 4] = struct.pack("<I", word)[: len(copy) - at]
        refused += not survives(bytes(copy))
    assert refused > 50


@every_sample
def test_every_byte_of_the_headers(sample: str) -> None:
    data = SAMPLES[sample]()
    (sections,) = struct.unpack_from("<Q", data, 40)
    (count,) = struct.unpack_from("<H", data, 60)
    for at in [*range(64), *range(sections, sections + 64 * count)]:
        for value in (0, 0x7F, 0xFF):
            survives(data[:at] + bytes([value]) + data[at + 1 :])


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused(data: bytes) -> None:
    assert not survives(data)
    assert not survives(b"\x7fELF\x02\x01\x01" + data)


def section_header(kind: int, offset: int, size: int, name: int = 0, link: int = 0) -> bytes:
    return struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, link, 0, 0, 0)


def elf_file(sections: list[bytes], body: bytes = b"", *, machine: int = 190, flags: int = 0x5A0D5A) -> bytes:
    ident = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(7)
    sizes = (64, 56, 0, 64, len(sections), 0)
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 2, machine, 1, 0, 0, 64 + len(body), flags, *sizes)
    return header + body + b"".join(sections)


def test_work_is_bounded_by_the_size_of_the_file() -> None:
    """Sections that all claim the same bytes would multiply the work; names may not be long either."""
    body = bytes(1 << 16)
    overlapping = [section_header(1, 64, len(body)) for _ in range(1000)]
    with pytest.raises(ArtifactError, match="need sections apart from one another, have overlapping ones"):
        read_device_code(elf_file(overlapping, body))
    names = b"x" * 5000 + b"\0"
    long_name = [section_header(3, 64, len(names))]
    with pytest.raises(ArtifactError, match="need a name of fewer than 1024 bytes at 0, have none"):
        read_device_code(elf_file(long_name, names))
    with pytest.raises(ArtifactError, match=f"need at most {MAX_FILE_BYTES} bytes"):
        read_device_code(bytes(MAX_FILE_BYTES + 1))


def test_other_files_are_named() -> None:
    empty = [section_header(3, 64, 1)]
    for data, text in (
        (b"", "need a 64-bit little-endian ELF file, have another"),
        (Path(sys.executable).read_bytes()[:4096], "need"),
        (
            elf_file(empty, b"\0", machine=62),
            r"need an ELF file for CUDA \(machine 190\) or AMDGPU \(224\), have machine 62",
        ),
        (elf_file(empty, b"\0", machine=224), "need one note of AMDGPU metadata, have 0"),
        (
            elf_file(empty, b"\0")[:8] + b"\x09" + elf_file(empty, b"\0")[9:],
            "need a cubin of ABI version 7 or 8, have 9",
        ),
    ):
        with pytest.raises(ArtifactError, match=text):
            read_device_code(data)
    assert read_device_code(elf_file(empty, b"\0")).kernels == {}


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            b"gfx942",
            b"gfx950",
            r"need the target amdgcn-amd-amdhsa--gfx942 in AMDGPU metadata, have 'amdgcn-amd-amdhsa--gfx9",
        ),
        (b".kernarg_segment_size", b".kernarg_segment_sizf", "need '.kernarg_segment_size' as int"),
        (b".wavefront_size\x40", b".wavefront_size\xc3", "need '.wavefront_size' as int in AMDGPU metadata, have True"),
        (
            b".private_segment_fixed_size\0",
            b".private_segment_fixed_size\x08",
            r"need a descriptor that says \(0, 8, 40\)",
        ),
        (b"scale.kd\0", b"scalf.kd\0", "kernel 'scale': need a descriptor of 64 bytes, have none"),
        (b".offset\x08", b".offset\x07", "need parameters one after another, have 8 bytes at 7"),
    ],
)
def test_lies_in_an_hsaco_are_found(old: bytes, new: bytes, text: str) -> None:
    data = compiled()[scale_kernel(), Target("hip", "gfx942")].binary
    assert old in data
    with pytest.raises(ArtifactError, match=text):
        read_device_code(data.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "04170c0000000000 0500",
            "04170c0000000000 0600",
            "kernel 'scale': need parameters numbered from 0, have others",
        ),
        ("04170c0000000000 0500", "04170c0000000000 0400", "kernel 'scale': need one parameter 4, have two"),
        (
            "04170c0000000000 0100 0800",
            "04170c0000000000 0100 0700",
            "need parameters one after another, have 8 bytes at 7",
        ),
        ("0319 2800", "0319 2400", "kernel 'scale': need 40 bytes of parameters, have 36"),
        ("04100c00", "04100800", "need an attribute of 12 bytes, have 8"),
        ("042f0800", "042e0800", "kernel 'scale': need its number of registers, have none"),
    ],
)
def test_lies_in_a_cubin_are_found(old: str, new: str, text: str) -> None:
    data = compiled()[scale_kernel(), Target("cuda", "sm_90a")].binary
    assert data.count(bytes.fromhex(old)) == 1
    with pytest.raises(ArtifactError, match=text):
        read_device_code(data.replace(bytes.fromhex(old), bytes.fromhex(new)))


# ---- MessagePack ----------------------------------------------------------------------------------------------


def packed(value: Any) -> Iterator[bytes]:
    """MessagePack of a value in the longest form of each kind, and single bytes for small numbers."""
    match value:
        case None | False | True:
            yield {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
        case int():
            yield (
                bytes([value % 256])
                if -32 <= value < 128
                else (b"\xcf" + struct.pack(">Q", value) if value >= 0 else b"\xd3" + struct.pack(">q", value))
            )
        case float():
            yield b"\xcb" + struct.pack(">d", value)
        case str():
            yield b"\xdb" + struct.pack(">I", len(value.encode())) + value.encode()
        case bytes():
            yield b"\xc6" + struct.pack(">I", len(value)) + value
        case list():
            yield b"\xdd" + struct.pack(">I", len(value))
            for item in value:
                yield from packed(item)
        case dict():
            yield b"\xdf" + struct.pack(">I", len(value))
            for pair in value.items():
                for item in pair:
                    yield from packed(item)


leaves = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
values = st.recursive(
    leaves, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(), v, max_size=4), max_leaves=20
)


@given(values)
@settings(max_examples=200, deadline=None)
def test_messages_round_trip(value: Any) -> None:
    got = decode(b"".join(packed(value)))
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        ("cc ff", 255), ("cd ffff", 65535), ("ce 00010000", 65536), ("d0 80", -128), ("d1 8000", -32768),
        ("d2 80000000", -(2**31)), ("e0", -32), ("7f", 127), ("ca 3fc00000", 1.5), ("a3 616263", "abc"),
        ("d9 01 61", "a"), ("da 0001 61", "a"), ("c4 01 61", b"a"), ("c5 0001 61", b"a"), ("92 01 02", [1, 2]),
        ("dc 0002 01 02", [1, 2]), ("82 a161 01 a162 c0", {"a": 1, "b": None}), ("de 0001 a161 90", {"a": []}),
    ],
)  # fmt: skip
def test_every_short_form(data: str, value: Any) -> None:
    assert decode(bytes.fromhex(data)) == value


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("", "need 1 bytes of metadata at 0, have 0"), ("a3 6162", "need 3 bytes of metadata at 1, have 2"),
        ("01 02", "need 1 bytes of metadata, have 2"), ("df 00ffffff 00", "need 16777215 values in metadata"),
        ("dd ffffffff", "need 4294967295 values in metadata, have 0 bytes"),
        ("c1", "need a plain value in metadata, have kind 0xc1"), ("91" * 40 + "00", "at most 32 deep"),
        ("d4 01 00", "have kind 0xd4"), ("a1 ff", "need texts in UTF-8"), ("81 01 02", "need texts as keys"),
        ("82 a161 01 a161 02", "need texts as keys of metadata, each once, have 'a'"),
    ],
)  # fmt: skip
def test_bad_messages_say_why(data: str, text: str) -> None:
    with pytest.raises(ArtifactError, match=text):
        decode(bytes.fromhex(data))


def test_memory_is_bounded_by_the_message() -> None:
    message = b"\xdd" + struct.pack(">I", 100_000) + b"\x90" * 99_999  # one value short
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError):
            decode(message)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(message)
    finally:
        tracemalloc.stop()
