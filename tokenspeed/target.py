"""Targets: the machines an artifact is compiled for. A Target is a name, never a live device.

CPU targets form a ladder; a machine that runs one rung runs every rung below it:

=====================  ==========================================================================
``cpu:x86-64-v3``      AVX2 + FMA + F16C (Haswell and later, every Zen)
``cpu:x86-64-v4``      AVX-512 F/BW/CD/DQ/VL (Skylake-SP and later, Zen 4 and later)
``cpu:x86-64-v4+bf16`` the above with AVX512_BF16 (Cooper Lake, Zen 4 and later)
``cpu:x86-64-v4+amx``  the above with AMX-TILE and AMX-BF16 (Sapphire Rapids and later)
=====================  ==========================================================================
"""

from __future__ import annotations

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


@dataclass(frozen=True, order=True)
class Target:
    """One machine kind: ``backend`` ('cpu'; 'cuda' and 'hip' to come) and ``arch``."""

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
        if backend != "cpu":
            raise TargetError(
                f"unknown target {text!r}: the backend is {backend!r}, but this version builds for 'cpu' only",
                hint=f"use one of {', '.join('cpu:' + a for a in CPU_ARCHS)} or cpu:native",
            )
        if arch == "native":
            return cls.native()
        if arch not in CPU_ARCHS:
            raise TargetError(
                f"unknown CPU target {text!r}",
                hint=f"use one of {', '.join('cpu:' + a for a in CPU_ARCHS)} or cpu:native",
            )
        return cls(backend, arch)

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
        return self.backend == other.backend and CPU_ARCHS.index(other.arch) <= CPU_ARCHS.index(self.arch)


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
