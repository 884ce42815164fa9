"""The loader: verify an artifact, place its regions, read the weights, resolve the LaunchGraphs.

After ``load`` the device is sealed: no allocation, no graph, no weight enters it again. What does not depend on one
another passes at the same time: hashing and the tokenizer beside the device, and there weights beside graphs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed import _native
from tokenspeed.artifact import DEVICE_ABI, DEVICE_LIBRARY, NATIVE_LIBRARY, Artifact, TargetSection
from tokenspeed.errors import ArtifactError, ResourceError, UsageError
from tokenspeed.runtime import drivers, trace
from tokenspeed.runtime.executor import Executor
from tokenspeed.runtime.places import FilePlace, Place, available_memory, choose_place
from tokenspeed.runtime.tokenizer import Tokenizer
from tokenspeed.step import STEP_SIZES
from tokenspeed.switches import RL_BITWISE
from tokenspeed.target import Target

if TYPE_CHECKING:
    from tokenspeed.runtime.invariance.attestation import Standing

SETTLE_NICENESS = 10
"""Scheduling priority of weights that settle beside requests: about a tenth of a core while the workers want all."""
POLL_SECONDS = 1e-4
TOKENIZER = "tokenizer/tokenizer.json"
LARGE_TOKENIZER_BYTES = 1 << 20
"""The library that parses tokenizers keeps the interpreter's lock meanwhile: a quarter of a second for a vocabulary of
100000, in which a driver that has started cannot say so. One that is larger than this waits until the weights stream
and graphs are made, which needs no lock."""


@dataclass(frozen=True)
class LoadOptions:
    """How to load. ``target`` None takes the best that this machine runs, and ``device`` None its first GPU of that
    kind; ``threads`` None uses every core this process may use; ``kv_gib`` None sizes the KV pages from free memory;
    ``host_kv_gib`` is the size of the host tier, to which cached pages go that the device has no room for;
    ``verify`` is one of tokenspeed.artifact.VERIFY_LEVELS. On a CPU weights begin as pages of the artifact's file, and
    settle in memory of their own: ``settle`` waits for that, otherwise it goes on beside the first requests, which
    makes ready sooner and the first second slower. ``opened`` is set once the artifact is open: from then on loading
    waits for the device more than for the interpreter, which others may use. With ``measure`` a GPU's
    ceilings are loaded too, and the GPU times its steps itself, which serving does without. With ``seal`` false the
    device takes further graphs, which the invariance harness loads: nothing that serves does so. With ``attested`` an
    artifact that promises equal bits is refused unless it passed that harness on this target, or ``unattested`` says
    why it is loaded all the same."""

    target: Target | None = None
    device: int | None = None
    threads: int | None = None
    kv_gib: float | None = None
    host_kv_gib: float = 0.0
    verify: str = "quick"
    pin: bool = False
    settle: bool = True
    measure: bool = False
    seal: bool = True
    attested: bool = False
    unattested: str | None = None
    opened: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class LoadedCeiling:
    """A loaded graph that measures the device: see ``artifact.CeilingEntry``."""

    graph: int
    work: int
    num_tokens: int


@dataclass
class Loaded:
    """A model in memory, ready to run steps. ``seconds`` says where the time went; parts pass at the same time, and
    those that end with a wait for the interpreter's lock include it. ``place`` names the device for people;
    ``ceilings`` are by kind; ``times_steps``: the device times steps on its own clock. ``standing``: what proves
    that it keeps its promise of equal bits, where that was asked for."""

    artifact: Artifact
    section: TargetSection
    executor: Executor
    tokenizer: Tokenizer
    num_pages: int
    threads: int
    place: str
    seconds: dict[str, float] = field(default_factory=dict)
    ceilings: dict[str, LoadedCeiling] = field(default_factory=dict)
    num_host_pages: int = 0
    times_steps: bool = False
    standing: Standing | None = None


def load(path: str | os.PathLike[str], options: LoadOptions | None = None) -> Loaded:
    """Load the artifact at ``path``.

    Raises:
        ArtifactError: missing, damaged, or built for other machines.
        ResourceError: not enough memory for one sequence of max_model_len, or a GPU that cannot be used.
        AttestationError: nothing proves what the artifact promises, and ``options`` want that.
        UsageError: an option that makes no sense here.
    """
    options = options or LoadOptions()
    seconds: dict[str, float] = {}
    with trace.span("open artifact"):
        artifact = Artifact.open(Path(path))
    options.opened.set()
    preparation = _Preparation(artifact, options, seconds)
    preparing = _Background("tokenspeed-device", preparation.run)
    verifying = _Background("tokenspeed-verify", lambda: _verify(artifact, preparation, options.verify, seconds))
    try:
        if artifact.locate(TOKENIZER).bytes > LARGE_TOKENIZER_BYTES:
            preparation.weights_on_their_way.wait()
        with _timed(seconds, "tokenizer"):
            tokenizer = Tokenizer.from_artifact(artifact)
        if preparing.running:  # the interpreter would only wait now: later the first chat would wait for this
            with trace.span("chat template"):
                tokenizer.chat.prepare_quietly()
    finally:
        preparing.join()
        drivers.let_go()
        verifying.result()  # before any other error: what stumbled over a damaged file says less than its digest
    preparing.result()
    place, device = preparation.place, preparation.device
    if options.settle:
        with _timed(seconds, "settle"):
            place.settle(device)
    else:
        _Background("tokenspeed-settle", lambda: _settle_gently(place, device))
    return Loaded(
        artifact,
        preparation.section,
        Executor(device, preparation.section, preparation.graphs, place.io_sets),
        tokenizer,
        preparation.num_pages,
        place.threads,
        place.describe(),
        seconds,
        preparation.ceilings,
        preparation.num_host_pages,
        times_steps=options.measure and Target.parse(preparation.section.target).is_gpu,
        standing=preparation.standing,
    )


class _Preparation:
    """Makes one device ready, on the thread that calls ``run``.

    Attributes:
        section: what runs.
        place: where.
        device: sealed.
        graphs: handles parallel to ``section.buckets``.
        ceilings: by kind.
        num_pages: KV pages.
        num_host_pages: those of the host tier.
        target: the name of the section's target; None while that is not known.
        standing: what proves its promise of equal bits; None if nobody asks, or it promises none.
        chosen: set once the target is, or never will be.
        weights_on_their_way: set once their loading has begun and nothing else of the device waits for the
            interpreter, or never will.
    """

    section: TargetSection
    place: Place
    device: Any
    graphs: list[int]
    ceilings: dict[str, LoadedCeiling]
    num_pages: int
    num_host_pages: int
    _prelude: list[int]

    def __init__(self, artifact: Artifact, options: LoadOptions, seconds: dict[str, float]):
        self._artifact = artifact
        self._options = options
        self._seconds = seconds
        self.target: str | None = None
        self.standing: Standing | None = None
        self.chosen = threading.Event()
        self.weights_on_their_way = threading.Event()

    def run(self) -> None:
        try:
            self._run()
        finally:
            self.chosen.set()
            self.weights_on_their_way.set()

    def _run(self) -> None:
        options, manifest = self._options, self._artifact.manifest
        with _timed(self._seconds, "choose"):
            self.section, self.place = choose_place(
                manifest, options.target, options.device, threads=options.threads, pin=options.pin
            )
            check_kernels(self.section)
            if options.attested and manifest.envelope.numerics == RL_BITWISE:
                from tokenspeed.runtime.invariance.attestation import standing_of

                self.standing = standing_of(self._artifact, self.section, options.unattested)
        self.target = self.section.target
        self.chosen.set()
        with _timed(self._seconds, "open"):
            self.device = self.place.open()
        try:
            self._fill()
        except _native.DeviceError as e:  # the driver's own trouble: memory that it needs beside ours, a lost device
            self.device.close()
            raise ResourceError(f"cannot load onto {self.place.describe()}: {e}", hint="lower --kv-gib") from None
        except BaseException:
            self.device.close()  # what it holds is free before the error is told, not when nobody remembers it
            raise

    def _fill(self) -> None:
        options, place, section = self._options, self.place, self.section
        self.num_host_pages = plan_host_pages(section, options.host_kv_gib, available_memory())
        available = place.available(self.device)
        if place.is_host:
            available -= self.num_host_pages * section.kv_page_bytes
        self.num_pages = plan_pages(self._artifact, section, options.kv_gib, place, available)
        weights = _Background("tokenspeed-weights", self._load_weights)
        beside = [weights]
        try:
            self._wait_for_weights_region(weights)
            self._allocate()
            if self.num_host_pages:  # pinning takes a GPU's driver as long as it takes to load everything else
                beside.append(_Background("tokenspeed-host-pages", self._allocate_host_pages))
            self._load_files()
        finally:
            for work in beside:
                work.join()
        for work in beside:
            work.result()
        self._run_prelude()
        if options.measure:
            self.place.time_steps(self.device)
        if options.seal:
            self.device.seal()
        self._trace_driver()

    def _run_prelude(self) -> None:
        """What no step computes: it needs the weights, and every step needs it. It runs as a step of nothing."""
        (sizes,) = (tensor for tensor in self.section.io if tensor.name == STEP_SIZES.name)
        for graph in self._prelude:
            with _timed(self._seconds, "prelude"):
                self.device.view("io")[sizes.offset : sizes.offset + sizes.nbytes] = bytes(sizes.nbytes)
                self.device.wait(self.device.submit(graph, 0, 0, 0, 0))

    def _trace_driver(self) -> None:
        """What the driver did is part of the trace: a GPU notes it itself."""
        current = trace.current()
        if current is not None and hasattr(self.device, "spans"):
            for what, start, seconds, thread in self.device.spans():
                current.add(what, start, start + seconds, track=thread)

    def _load_weights(self) -> None:
        section = self.section
        at = self._artifact.locate(section.weights)
        if section.weights_offset + section.weights_bytes > at.bytes:
            raise ArtifactError(f"{section.weights} is too short: the manifest places weights beyond its end")
        try:
            with _timed(self._seconds, "weights"):
                self.device.load_weights(str(at.path), at.offset + section.weights_offset, section.weights_bytes)
        except _native.DeviceError as e:
            raise ResourceError(f"cannot load the weights: {e}") from None

    def _wait_for_weights_region(self, weights: _Background) -> None:
        # Graphs are bound to where weights lie, not to what they hold: on a GPU that is still on its way.
        with trace.span("place weights"):
            while not self.device.counters()["regions_allocated"] and weights.running:
                time.sleep(POLL_SECONDS)
        if not weights.running:
            weights.result()

    def _allocate(self) -> None:
        section, device = self.section, self.device
        with trace.span("allocate"):
            try:
                device.allocate("kv", self.num_pages * section.kv_page_bytes)
                device.allocate("arena", section.arena_bytes)
                device.allocate("state", section.state_bytes)
                self.place.allocate_io(device, section)
            except _native.DeviceError as e:  # a limit that the place does not see, such as `ulimit -v`
                raise ResourceError(f"cannot allocate memory: {e}", hint="lower --kv-gib") from None

    def _allocate_host_pages(self) -> None:
        try:
            with _timed(self._seconds, "host pages"):
                self.device.allocate_host_pages(self.num_host_pages, self.section.kv_page_bytes)
        except _native.DeviceError as e:
            raise ResourceError(f"cannot allocate the host tier: {e}", hint="lower --host-kv-gib") from None

    def _load_files(self) -> None:
        """Code objects, then graphs: those of the buckets, and of what is measured."""
        section = self.section
        measured = section.ceilings if self._options.measure else ()
        binaries = [(binary.name, *self._place_of(binary.file)) for binary in section.binaries]
        prelude = () if section.prelude is None else (section.prelude.graph,)
        names = [*(bucket.graph for bucket in section.buckets), *(ceiling.graph for ceiling in measured), *prelude]
        graphs = [self._place_of(name) for name in names]
        self.weights_on_their_way.set()  # the next call does without the interpreter's lock until graphs are there
        began = time.perf_counter()
        try:
            handles, for_binaries, for_graphs = self.place.load_files(
                self.device, binaries, graphs, section.kv_page_bytes
            )
        except _native.GraphError as e:
            raise ArtifactError(str(e), hint="rebuild the artifact") from None
        self._seconds |= {"modules": for_binaries, "graphs": for_graphs}
        if (current := trace.current()) is not None:
            current.add("modules", began, began + for_binaries)
            current.add("graphs", began + for_binaries, began + for_binaries + for_graphs)
        self.graphs = handles[: len(section.buckets)]
        self._prelude = handles[len(names) - len(prelude) :]
        loaded = zip(measured, handles[len(section.buckets) : len(names) - len(prelude)], strict=True)
        self.ceilings = {c.kind: LoadedCeiling(graph, c.work, c.num_tokens) for c, graph in loaded}

    def _place_of(self, name: str) -> FilePlace:
        at = self._artifact.locate(name)
        return name, str(at.path), at.offset, at.bytes


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    with trace.span(name):
        yield
    seconds[name] = time.perf_counter() - started


def plan_pages(artifact: Artifact, section: TargetSection, kv_gib: float | None, place: Place, available: int) -> int:
    """How many KV pages to hold: enough for every sequence at full length, or what memory allows.

    Args:
        available: bytes that the place has for weights, buffers and pages.

    Raises ResourceError when not even one sequence of max_model_len fits, saying by how much and what to change.
    """
    envelope = artifact.manifest.envelope
    fixed = section.weights_bytes + section.arena_bytes + section.state_bytes + section.io_bytes
    one_sequence = envelope.pages_per_seq * section.kv_page_bytes
    if kv_gib is not None:
        if not 0 < kv_gib < 1 << 24:
            raise UsageError(f"the KV size is {kv_gib} GiB; it must be above 0 and at most what the memory holds")
        budget = int(kv_gib * (1 << 30))
        if budget + fixed > available:
            raise ResourceError(
                f"{_gib(budget)} of KV pages and {_gib(fixed)} of weights and buffers need more than the"
                f" {_gib(available)} of {place.memory} that are free: {_gib(budget + fixed - available)} are missing",
                hint="lower --kv-gib",
            )
    else:
        budget = int(max(0, available - fixed) * place.kv_share)
    pages = min(budget // section.kv_page_bytes, envelope.max_num_seqs * envelope.pages_per_seq)
    if pages < envelope.pages_per_seq:
        fits = pages * envelope.page_size
        if available < fixed:
            raise ResourceError(
                f"the model does not fit in {place.memory}: weights and buffers need {_gib(fixed)}, and"
                f" {_gib(available)} are free: {_gib(fixed - available)} are missing",
                hint=f"{place.free_hint}, or rebuild with a smaller --max-prefill-tokens",
            )
        raise ResourceError(
            f"max_model_len = {envelope.max_model_len} does not fit in {place.memory}: one sequence of that length"
            f" needs {_gib(one_sequence)} of KV pages, and {_gib(budget)} may be used ({_gib(available)} are free,"
            f" {_gib(fixed)} of them go to weights and buffers): {_gib(one_sequence - budget)} are missing",
            hint=(place.free_hint if kv_gib is None else "raise --kv-gib")
            + (f", or rebuild with `tokenspeed build --max-model-len {fits}`" if fits else ""),
        )
    return int(pages)


def plan_host_pages(section: TargetSection, host_kv_gib: float, available: int) -> int:
    """How many pages the host tier has: as many as fit in ``host_kv_gib``, none for 0.

    Args:
        available: bytes of the host's memory that are free.

    Raises UsageError for a size that holds no page, ResourceError for one that the host does not have.
    """
    if not 0 <= host_kv_gib < 1 << 24:
        raise UsageError(f"the host tier is {host_kv_gib} GiB; it must be 0 or more and at most what the memory holds")
    budget = int(host_kv_gib * (1 << 30))
    pages = budget // section.kv_page_bytes
    if host_kv_gib > 0 and pages == 0:
        raise UsageError(
            f"the host tier is {host_kv_gib} GiB, and one KV page takes {_gib(section.kv_page_bytes)}",
            hint="raise --host-kv-gib, or leave it out",
        )
    if budget > available:
        raise ResourceError(
            f"the host tier needs {_gib(budget)}, and {_gib(available)} of the host's memory are free:"
            f" {_gib(budget - available)} are missing",
            hint="lower --host-kv-gib, or free memory",
        )
    return int(pages)


def check_kernels(section: TargetSection) -> None:
    """Raises ArtifactError for graphs that were built against other kernels than this runtime has."""
    is_gpu = Target.parse(section.target).is_gpu
    have = (DEVICE_LIBRARY, DEVICE_ABI) if is_gpu else (NATIVE_LIBRARY, _native.KERNEL_ABI)
    if (section.kernel_library, section.kernel_abi) != have:
        raise ArtifactError(
            f"the artifact was built against kernels {section.kernel_library!r} ABI {section.kernel_abi}; this runtime"
            f" has {have[0]!r} ABI {have[1]}",
            hint="rebuild the artifact with this version of `tokenspeed build`",
        )


def _verify(artifact: Artifact, preparation: _Preparation, level: str, seconds: dict[str, float]) -> None:
    preparation.chosen.wait()
    with _timed(seconds, "verify"):
        artifact.verify(level, target=preparation.target)


def _settle_gently(place: Place, device: Any) -> None:
    # Requests come first; on an idle machine this makes no difference.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SETTLE_NICENESS)
    place.settle(device)


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

    def join(self) -> None:
        """Wait for the end, however it was."""
        self._thread.join()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> None:
        """Wait for the end. Raises what ``work`` raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"
