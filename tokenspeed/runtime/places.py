"""Where an artifact can be loaded: this machine's processors, or one of its GPUs.

A place opens its device and answers what the loader asks of either kind, so that loading is one path.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from tokenspeed import _native
from tokenspeed.artifact import Manifest, TargetSection, choose_target
from tokenspeed.errors import ArtifactError, ResourceError, UsageError
from tokenspeed.runtime.drivers import GPU_BACKENDS
from tokenspeed.step import STEP_SIZES
from tokenspeed.target import GPU_TARGETS, Target, runnable_targets

STEPS_IN_FLIGHT = 2
"""On a GPU: one that runs, and one that waits in its queue for when that ends."""
GPU_RESERVE_BYTES = 512 << 20
GPU_RESERVE_SHARE = 0.01
"""Left free on a GPU: what the driver takes for modules, graphs and local memory, and this share of all memory."""
KV_SHARE_OF_HOST = 0.25
"""Share of the host's memory left after weights and arena that KV pages may take when no size is given. The operating
system hands the pages out as they are first used."""


FilePlace: TypeAlias = tuple[str, str, int, int]
"""A file of an artifact: its name there, the path that holds it, where in that, and how many bytes."""
BinaryPlace: TypeAlias = tuple[str, str, str, int, int]
"""A file of a code object: the name by which graphs launch from it, then as FilePlace."""
LOAD_THREADS = 1
"""That load code objects and graphs onto a GPU: more of them make the driver copy weights more slowly."""


class Place(Protocol):
    """What the loader asks. ``io_sets`` is also the number of steps that may be in flight. ``load_files`` returns the
    handles of the graphs, and the seconds that binaries and graphs took: it is one call, so that a place may do without
    the interpreter's lock all the while. A GraphError that it raises begins with the name of the file."""

    @property
    def io_sets(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def kv_share(self) -> float: ...  # of what is free beside weights and buffers, that KV pages may take
    @property
    def is_host(self) -> bool: ...  # whether KV pages lie in the host's memory, as those of the host tier do
    @property
    def memory(self) -> str: ...  # in errors: "memory", "memory of GPU 0"
    @property
    def free_hint(self) -> str: ...  # what to do when it is too little
    def open(self) -> Any: ...
    def available(self, device: Any) -> int: ...
    def allocate_io(self, device: Any, section: TargetSection) -> None: ...
    def load_files(
        self, device: Any, binaries: Sequence[BinaryPlace], graphs: Sequence[FilePlace], kv_page_bytes: int
    ) -> tuple[list[int], float, float]: ...
    def settle(self, device: Any) -> None: ...  # moves weights to where they are read fastest, if they are not there
    def time_steps(self, device: Any) -> None: ...  # has the device time them itself, where it can
    def describe(self) -> str: ...


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver reports it. ``driver_version``: CUDA's 13000 is 13.0."""

    backend: str
    ordinal: int
    name: str
    arch: str
    total_bytes: int
    driver_version: int

    @property
    def target(self) -> Target | None:
        """The target that it runs; None for an architecture that no artifact can be built for."""
        for name in (f"{self.backend}:{self.arch}", f"{self.backend}:{self.arch}a"):
            if name in GPU_TARGETS:
                return Target.parse(name)
        return None

    @property
    def driver(self) -> str:
        """The driver's version as people write it."""
        return driver_text(self.backend, self.driver_version)


def driver_text(backend: str, version: int) -> str:
    """The version of a driver as people write it: CUDA 13.0, ROCm 6.4."""
    if backend == "cuda":
        return f"CUDA {version // 1000}.{version % 1000 // 10}"
    return f"ROCm {version // 10_000_000}.{version // 100_000 % 100}"


@dataclass
class Found:
    """GPUs of some backends, and why a backend has none."""

    gpus: list[Gpu]
    reasons: dict[str, str]


def look_for_gpus(backends: Iterable[str] = GPU_BACKENDS) -> Found:
    """Ask the drivers of ``backends``, which starts those that are there."""
    found = Found([], {})
    for backend in backends:
        devices, reason = _native.gpu_devices(backend)
        found.gpus += [Gpu(backend, *device) for device in devices]
        if not devices:
            found.reasons[backend] = reason
    return found


def choose_place(
    manifest: Manifest, wanted: Target | None, ordinal: int | None, *, threads: int | None = None, pin: bool = False
) -> tuple[TargetSection, Place]:
    """The section to run and the place for it: a GPU where there is one that the artifact was built for.

    Raises:
        ArtifactError: the artifact was not built for this machine, or for ``wanted``.
        UsageError: there is no such GPU.
        ResourceError: the driver is too old, or the device file of a GPU is there and its driver does not start.
    """
    built = {section.target.partition(":")[0] for section in manifest.targets}
    backends = [b for b in GPU_BACKENDS if b in built and (wanted is None or wanted.backend == b)]
    found = look_for_gpus(backends)
    if ordinal is not None and (wanted is None or wanted.is_gpu):
        found.gpus = _with_ordinal(found, ordinal)
    # Best last: GPUs in the driver's order behind all kinds of CPU.
    by_target = {gpu.target: gpu for gpu in reversed(found.gpus) if gpu.target is not None}
    try:
        section = choose_target(manifest, (*runnable_targets(), *by_target), wanted)
    except ArtifactError as e:
        raise _explained(e, found) from None
    target = Target.parse(section.target)
    if target.is_gpu:
        return section, GpuPlace(_with_driver(by_target[target], target))
    if ordinal is not None:
        raise UsageError(
            f"--device {ordinal} asks for a GPU; the target {target} runs on the CPU",
            hint="leave --device out, or build the artifact for that GPU",
        )
    for backend, reason in found.reasons.items():
        if wanted is None and os.path.exists(GPU_BACKENDS[backend]):  # never serve on the CPU by accident
            raise ResourceError(
                f"this machine has a GPU whose driver does not start: {reason}",
                hint=f"repair the driver, or pass --target {target} to run on the CPU",
            )
    return section, CpuPlace(threads, pin)


def _with_ordinal(found: Found, ordinal: int) -> list[Gpu]:
    chosen = [gpu for gpu in found.gpus if gpu.ordinal == ordinal]
    if not chosen:
        have = ", ".join(f"{gpu.ordinal} ({gpu.name})" for gpu in found.gpus) or "no GPU"
        reasons = "".join(f"; {reason}" for reason in found.reasons.values())
        raise UsageError(f"there is no GPU {ordinal}: have {have}{reasons}", hint="see `tokenspeed doctor`")
    return chosen


def _explained(error: ArtifactError, found: Found) -> ArtifactError:
    """The error with what is known of the GPUs: which there are, or, in a few words, why there is none."""
    reasons = [re.split(r": | \(", reason, maxsplit=1)[0] for reason in found.reasons.values()]
    more = [f"GPU {gpu.ordinal} is {gpu.name}, {gpu.arch}" for gpu in found.gpus] + reasons
    return ArtifactError("; ".join([error.message, *more]), hint=error.hint)


def _with_driver(gpu: Gpu, target: Target) -> Gpu:
    if gpu.driver_version < target.gpu.min_driver:
        raise ResourceError(
            f"{target} needs a driver of {driver_text(gpu.backend, target.gpu.min_driver)} or later; GPU {gpu.ordinal}"
            f" ({gpu.name}) has one of {gpu.driver}",
            hint="update the GPU driver",
        )
    return gpu


class CpuPlace:
    """This machine's processors. ``threads`` None uses every core this process may use."""

    io_sets = 1
    kv_share = KV_SHARE_OF_HOST
    is_host = True
    memory = "memory"
    free_hint = "free memory"

    def __init__(self, threads: int | None, pin: bool):
        self.threads = threads or len(os.sched_getaffinity(0))
        self._pin = pin

    def open(self) -> Any:
        try:
            return _native.CpuDevice(self.threads, self._pin)
        except _native.DeviceError as e:
            raise ResourceError(f"cannot start {self.threads} worker threads: {e}", hint="lower --threads") from None

    def available(self, device: Any) -> int:
        return available_memory()

    def allocate_io(self, device: Any, section: TargetSection) -> None:
        device.allocate("io", section.io_bytes)

    def load_files(
        self, device: Any, binaries: Sequence[BinaryPlace], graphs: Sequence[FilePlace], kv_page_bytes: int
    ) -> tuple[list[int], float, float]:
        assert not binaries, "a CPU's kernels are in the native module"
        began = time.perf_counter()
        return [_load_graph(device, file, kv_page_bytes) for file in graphs], 0.0, time.perf_counter() - began

    def settle(self, device: Any) -> None:
        device.settle()

    def time_steps(self, device: Any) -> None:
        pass  # a CPU's steps run from their submission on

    def describe(self) -> str:
        return f"{self.threads} threads"


def _load_graph(device: Any, file: FilePlace, kv_page_bytes: int) -> int:
    name, path, offset, nbytes = file
    try:
        with open(path, "rb") as f:
            f.seek(offset)
            return int(device.load_graph(f.read(nbytes), kv_page_bytes))
    except OSError as e:
        raise ArtifactError(f"cannot read {name}: {e.strerror}") from None
    except _native.GraphError as e:
        raise _native.GraphError(f"{name} cannot be loaded: {e}") from None


SPIN_SECONDS, SPIN_CORES = 0.02, 4
"""Who waits for a GPU's step looks again and again for this long where the process has this many cores: the thread that
then plans the next step finds its caches as it left them. One that slept takes three to five times as long."""
SHORT_SPIN_SECONDS = 50e-6
"""Elsewhere: about what a sleeping thread takes to wake."""
TIMED_STEPS = 4096
"""Steps whose times a GPU keeps until somebody asks."""


class GpuPlace:
    """One GPU."""

    io_sets = STEPS_IN_FLIGHT
    threads = 0
    kv_share = 1.0
    is_host = False

    def __init__(self, gpu: Gpu):
        self.gpu = gpu
        self.memory = f"memory of GPU {gpu.ordinal} ({gpu.name})"
        self.free_hint = f"end what else runs on GPU {gpu.ordinal}, or choose another one with --device"

    def open(self) -> Any:
        try:
            spin = SPIN_SECONDS if len(os.sched_getaffinity(0)) >= SPIN_CORES else SHORT_SPIN_SECONDS
            return _native.GpuDevice(self.gpu.backend, self.gpu.ordinal, self.io_sets, spin_seconds=spin)
        except _native.DeviceError as e:
            raise ResourceError(
                f"cannot open GPU {self.gpu.ordinal} ({self.gpu.name}): {e}", hint=self.free_hint
            ) from None

    def available(self, device: Any) -> int:
        free, total = device.memory()
        return max(0, int(free) - GPU_RESERVE_BYTES - int(total * GPU_RESERVE_SHARE))

    def allocate_io(self, device: Any, section: TargetSection) -> None:
        (sizes,) = (tensor for tensor in section.io if tensor.name == STEP_SIZES.name)
        device.allocate_io(section.io_bytes, sizes.offset)

    def load_files(
        self, device: Any, binaries: Sequence[BinaryPlace], graphs: Sequence[FilePlace], kv_page_bytes: int
    ) -> tuple[list[int], float, float]:
        handles, for_binaries, for_graphs = device.load_files(list(binaries), list(graphs), kv_page_bytes, LOAD_THREADS)
        return handles, for_binaries, for_graphs

    def settle(self, device: Any) -> None:
        pass  # weights on a GPU have nowhere better to be

    def time_steps(self, device: Any) -> None:
        device.time_steps(TIMED_STEPS)

    def describe(self) -> str:
        return self.gpu.name


def available_memory() -> int:
    """Bytes this process may still use: what the machine has free, within its control group's limit."""
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        if (limit := (group / "memory.max").read_text().strip()) != "max":
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text()) - int(stat["file"])  # the page cache gives way
            available = min(available, int(limit) - used)
    except (OSError, ValueError, KeyError):
        pass  # no control group of version 2 here
    return available
