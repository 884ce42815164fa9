"""The loader: verify an artifact, place its regions, read the weights, resolve the LaunchGraphs.

After ``load`` the device is sealed: no allocation, no graph, no weight enters it again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed import _native
from tokenspeed.artifact import Artifact, TargetSection, choose_target
from tokenspeed.errors import ArtifactError, ResourceError, UsageError
from tokenspeed.runtime.executor import Executor
from tokenspeed.runtime.tokenizer import Tokenizer
from tokenspeed.target import Target, runnable_targets

KV_SHARE_OF_MEMORY = 0.25
"""Share of the memory left after weights and arena that KV pages may take when no size is given. The operating
system hands the pages out as they are first used."""
SETTLE_NICENESS = 10
"""Scheduling priority of weights that settle beside requests: about a tenth of a core while the workers want all."""


@dataclass(frozen=True)
class LoadOptions:
    """How to load. ``threads`` None uses every core this process may use; ``kv_gib`` None sizes the KV pages from
    free memory; ``verify`` is one of tokenspeed.artifact.VERIFY_LEVELS. Weights begin as pages of the artifact's
    file, and settle in memory of their own: ``settle`` waits for that, otherwise it goes on beside the first
    requests, which makes ready sooner and the first second slower."""

    target: Target | None = None
    threads: int | None = None
    kv_gib: float | None = None
    verify: str = "quick"
    pin: bool = False
    settle: bool = True


@dataclass
class Loaded:
    """A model in memory, ready to run steps. ``seconds`` says where the time went; ``weights`` and ``tokenizer``
    pass at the same time, and ``weights`` ends with a wait for the interpreter's lock."""

    artifact: Artifact
    section: TargetSection
    executor: Executor
    tokenizer: Tokenizer
    num_pages: int
    threads: int
    seconds: dict[str, float] = field(default_factory=dict)


def load(path: str | os.PathLike[str], options: LoadOptions | None = None) -> Loaded:
    """Load the artifact at ``path``.

    Raises:
        ArtifactError: missing, damaged, or built for other machines.
        ResourceError: not enough memory for one sequence of max_model_len.
    """
    options = options or LoadOptions()
    seconds: dict[str, float] = {}
    with _timed(seconds, "verify"):
        artifact = Artifact.open(Path(path))
        section = choose_target(artifact.manifest, runnable_targets(), options.target)
        _check_kernels(section)
        artifact.verify(options.verify)
    threads = options.threads or len(os.sched_getaffinity(0))
    num_pages = plan_pages(artifact, section, options.kv_gib)
    try:
        device = _native.CpuDevice(threads, options.pin)
    except _native.DeviceError as e:
        raise ResourceError(f"cannot start {threads} worker threads: {e}", hint="lower --threads") from None
    # The library that parses tokenizers keeps the interpreter's lock meanwhile; mapping weights needs none.
    weights = _Background("tokenspeed-weights", lambda: _load_weights(device, artifact, section, seconds))
    with _timed(seconds, "tokenizer"):
        tokenizer = Tokenizer.from_artifact(artifact)
    weights.result()
    with _timed(seconds, "graphs"):
        _allocate(device, section, num_pages)
        graphs = [_load_graph(device, artifact, bucket.graph, section.kv_page_bytes) for bucket in section.buckets]
        device.seal()
    if options.settle:
        with _timed(seconds, "settle"):
            device.settle()
    else:
        _Background("tokenspeed-settle", lambda: _settle_gently(device))
    return Loaded(artifact, section, Executor(device, section, graphs), tokenizer, num_pages, threads, seconds)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


def plan_pages(artifact: Artifact, section: TargetSection, kv_gib: float | None) -> int:
    """How many KV pages to hold: enough for every sequence at full length, or what memory allows.

    Raises ResourceError when not even one sequence of max_model_len fits, saying what would.
    """
    envelope = artifact.manifest.envelope
    available = available_memory()
    fixed = section.weights_bytes + section.arena_bytes + section.io_bytes + section.state_bytes
    if kv_gib is not None:
        if not 0 < kv_gib < 1 << 24:
            raise UsageError(f"the KV size is {kv_gib} GiB; it must be above 0 and at most what the memory holds")
        budget = int(kv_gib * (1 << 30))
        if budget + fixed > available:
            raise ResourceError(
                f"{_gib(budget)} of KV pages and {_gib(fixed)} of weights and buffers need more than the"
                f" {_gib(available)} of memory that are free",
                hint="lower --kv-gib",
            )
    else:
        budget = int(max(0, available - fixed) * KV_SHARE_OF_MEMORY)
    pages = min(budget // section.kv_page_bytes, envelope.max_num_seqs * envelope.pages_per_seq)
    if pages < envelope.pages_per_seq:
        fits = pages * envelope.page_size
        raise ResourceError(
            f"max_model_len = {envelope.max_model_len} does not fit in memory: one sequence of that length needs"
            f" {_gib(envelope.pages_per_seq * section.kv_page_bytes)} of KV pages, and {_gib(budget)} may be used"
            f" ({_gib(available)} of memory are free)",
            hint=("free memory" if kv_gib is None else "raise --kv-gib")
            + (f", or rebuild with `tokenspeed build --max-model-len {fits}`" if fits else ""),
        )
    return int(pages)


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


def _check_kernels(section: TargetSection) -> None:
    if (section.kernel_library, section.kernel_abi) != ("native", _native.KERNEL_ABI):
        raise ArtifactError(
            f"the artifact was built against kernels {section.kernel_library!r} ABI {section.kernel_abi}; this runtime"
            f" has 'native' ABI {_native.KERNEL_ABI}",
            hint="rebuild the artifact with this version of `tokenspeed build`",
        )


def _load_weights(device: Any, artifact: Artifact, section: TargetSection, seconds: dict[str, float]) -> None:
    at = artifact.locate(section.weights)
    if section.weights_offset + section.weights_bytes > at.bytes:
        raise ArtifactError(f"{section.weights} is too short: the manifest places weights beyond its end")
    try:
        with _timed(seconds, "weights"):
            device.load_weights(str(at.path), at.offset + section.weights_offset, section.weights_bytes)
    except _native.DeviceError as e:
        raise ResourceError(f"cannot load the weights: {e}") from None


def _settle_gently(device: Any) -> None:
    # Requests come first; on an idle machine this makes no difference.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SETTLE_NICENESS)
    device.settle()


def _allocate(device: Any, section: TargetSection, num_pages: int) -> None:
    for region, nbytes in (
        ("kv", num_pages * section.kv_page_bytes),
        ("arena", section.arena_bytes),
        ("io", section.io_bytes),
        ("state", section.state_bytes),
    ):
        try:
            device.allocate(region, nbytes)
        except _native.DeviceError as e:  # a limit that available_memory does not see, such as `ulimit -v`
            raise ResourceError(f"cannot allocate memory: {e}", hint="lower --kv-gib") from None


def _load_graph(device: Any, artifact: Artifact, name: str, kv_page_bytes: int) -> int:
    try:
        return int(device.load_graph(artifact.read(name), kv_page_bytes))
    except _native.GraphError as e:
        raise ArtifactError(f"{name} cannot be loaded: {e}", hint="rebuild the artifact") from None


class _Background:
    """``work`` on a thread of its own. The process does not end before it: it may be inside the native module."""

    def __init__(self, name: str, work: Callable[[], None]):
        self._error: BaseException | None = None
        self._work = work
        # Said outright, as a thread inherits it: `serve` loads on a daemon thread.
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:  # carried to the thread that asks for the result
            self._error = e

    def result(self) -> None:
        """Wait for the end. Raises what ``work`` raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"
