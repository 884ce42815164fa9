"""Targets: the machines an artifact is compiled for. A Target is a name, never a live device.

GPU targets are one architecture each; binaries of one do not run on another:

==================  ==============================================================================
``cuda:sm_90a``     Hopper (H100, H200)
``cuda:sm_100a``    Blackwell (B200)
``cuda:sm_103a``    Blackwell Ultra (B300)
``cuda:sm_120a``    Blackwell workstation (RTX PRO 6000, RTX 50)
``hip:gfx942``      CDNA 3 (MI300X, MI325X)
``hip:gfx950``      CDNA 4 (MI350X, MI355X)
==================  ==============================================================================

CPU targets form a ladder; a machine that runs one rung runs every rung below it:

=====================  ==========================================================================
``cpu:x86-64-v3``      AVX2 + FMA + F16C (Haswell and later, every Zen)
``cpu:x86-64-v4``      AVX-512 F/BW/CD/DQ/VL (Skylake-SP and later, Zen 4 and later)
``cpu:x86-64-v4+bf16`` the above with AVX512_BF16 (Cooper Lake, Zen 4 and later)
``cpu:x86-64-v4+amx``  the above with AMX-TILE and AMX-BF16 (Sapphire Rapids and later)
=====================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.errors import TargetError

# Lowest rung first. Each rung lists the /proc/cpuinfo flags that it adds to the rung below.
_CPU_LADDER: tuple[tuple[str, frozenset[str]], ...] = (
    ("x86-64-v3", frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})),
    ("x86-64-v4", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})),
    ("x86-64-v4+bf16", frozenset({"avx512_bf16"})),
    ("x86-64-v4+amx", frozenset({"amx_tile", "amx_bf16"})),
)
CPU_ARCHS: tuple[str, ...] = tuple(name for name, _ in _CPU_LADDER)


@dataclass(frozen=True)
class GpuArch:
    """Facts of one GPU architecture that a build needs; limits are per thread block (hip: workgroup).

    Attributes:
        compiler_arch: how the kernel compiler names it: compute capability as a number, or the gfx name.
        warp_size: threads that run in step.
        max_threads: threads of a block at most.
        max_shared_bytes: shared memory of a block at most, static and dynamic together.
        max_grid: blocks per dimension at most.
        min_driver: oldest driver that loads this build's binaries, as the driver reports its version.
        proven: how far this project has tried it.
    """

    compiler_arch: int | str
    warp_size: int
    max_threads: int
    max_shared_bytes: int
    max_grid: tuple[int, int, int]
    min_driver: int
    proven: str

    @property
    def binary_suffix(self) -> str:
        """File suffix of its code objects."""
        return "cubin" if isinstance(self.compiler_arch, int) else "hsaco"


_COMPILED_ONLY = "compiled and statically verified; never run by this project"
_CUDA_GRID = (2**31 - 1, 65535, 65535)
# Shared memory: CUDA C++ Programming Guide, "Compute Capabilities"; AMD CDNA 3 and 4 ISA guides (LDS). Drivers: the
# cubins are made by ptxas 12.8 (Hopper) and 12.9 (Blackwell), which need a driver of CUDA 12.8 and 12.9.
_GPU_ARCHS: Mapping[str, GpuArch] = {
    "cuda:sm_90a": GpuArch(90, 32, 1024, 227 << 10, _CUDA_GRID, 12080, "run on an H200"),
    "cuda:sm_100a": GpuArch(100, 32, 1024, 227 << 10, _CUDA_GRID, 12090, _COMPILED_ONLY),
    "cuda:sm_103a": GpuArch(103, 32, 1024, 227 << 10, _CUDA_GRID, 12090, _COMPILED_ONLY),
    "cuda:sm_120a": GpuArch(120, 32, 1024, 99 << 10, _CUDA_GRID, 12090, _COMPILED_ONLY),
    "hip:gfx942": GpuArch("gfx942", 64, 1024, 64 << 10, (2**31 - 1, 65535, 65535), 60000000, _COMPILED_ONLY),
    "hip:gfx950": GpuArch("gfx950", 64, 1024, 160 << 10, (2**31 - 1, 65535, 65535), 60000000, _COMPILED_ONLY),
}
GPU_TARGETS: tuple[str, ...] = tuple(_GPU_ARCHS)


@dataclass(frozen=True, order=True)
class Target:
    """One machine kind: ``backend`` ('cpu', 'cuda' or 'hip') and ``arch``."""

    backend: str
    arch: str

    def __str__(self) -> str:
        return f"{self.backend}:{self.arch}"

    @property
    def path_name(self) -> str:
        """The name as one path component, for folders inside an artifact."""
        return f"{self.backend}-{self.arch}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse ``backend:arch``; ``cpu:native`` is the best rung that this machine runs."""
        backend, _, arch = text.partition(":")
        if text == "cpu:native":
            return cls.native()
        if text not in ALL_TARGETS:
            family = [name for name in ALL_TARGETS if name.startswith(f"{backend}:")] or list(ALL_TARGETS)
            raise TargetError(f"unknown target {text!r}", hint=f"use one of {', '.join(family)} or cpu:native")
        return cls(backend, arch)

    @property
    def is_gpu(self) -> bool:
        return self.backend != "cpu"

    @property
    def gpu(self) -> GpuArch:
        """Facts of a GPU target."""
        return _GPU_ARCHS[str(self)]

    @classmethod
    def native(cls) -> Target:
        """The best CPU target that this machine runs. Raises TargetError if there is none."""
        runnable = runnable_targets()
        if not runnable:
            raise TargetError(
                "this machine runs no CPU target: x86-64-v3 (AVX2 and FMA) is the least that is needed",
                hint="run `tokenspeed doctor` to see which CPU flags are missing",
            )
        return runnable[-1]

    def covers(self, other: Target) -> bool:
        """Whether every machine of this target also runs what was built for ``other``."""
        if self.is_gpu or other.is_gpu:
            return self == other
        return CPU_ARCHS.index(other.arch) <= CPU_ARCHS.index(self.arch)


ALL_TARGETS: tuple[str, ...] = (*(f"cpu:{arch}" for arch in CPU_ARCHS), *GPU_TARGETS)


def cpu_flags() -> frozenset[str]:
    """CPU feature flags of this machine, by their /proc/cpuinfo names; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_name() -> str:
    """What this machine's processor calls itself; "an unnamed CPU" where there is no /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, "") or "an unnamed CPU"


def missing_flags(target: Target, flags: frozenset[str] | None = None) -> tuple[str, ...]:
    """CPU flags that ``target`` needs and this machine (or ``flags``) lacks, sorted."""
    have = cpu_flags() if flags is None else flags
    need: set[str] = set()
    for name, added in _CPU_LADDER:
        need |= added
        if name == target.arch:
            break
    return tuple(sorted(need - have))


def runnable_targets(flags: frozenset[str] | None = None) -> tuple[Target, ...]:
    """CPU targets that this machine (or one with ``flags``) runs, lowest rung first."""
    have = cpu_flags() if flags is None else flags
    return tuple(t for t in (Target("cpu", a) for a in CPU_ARCHS) if not missing_flags(t, have))
