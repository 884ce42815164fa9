"""What tests of `tokenspeed tune` share: three candidates, a stand-in for the GPU, and how they are timed on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpu_double import H200, ContextDouble

from tokenspeed import _native
from tokenspeed.compile import tuning
from tokenspeed.graph import LaunchGraph, Region
from tokenspeed.kernels.triton import linear_tuning
from tokenspeed.kernels.triton.linear_config import Config, to_json
from tokenspeed.runtime.pack_device import find_gpu
from tokenspeed.runtime.tuning import Outcome, Results, measure
from tokenspeed.target import Target
from tokenspeed.tuning_pack import TuningPack

HOPPER = Target.parse("cuda:sm_90a")
SLOW, FAST, WRONG = (Config(16, 32, 64, warps, 2, swapped=True) for warps in (1, 2, 4))
"""The candidates of these tests; what they do differently is up to FakeGpu."""
BEFORE_US = 1.0
ROW_BYTES = 4 * 64
"""Of the results of these tests."""


@contextmanager
def three_candidates() -> Iterator[None]:
    """Packs get SLOW, FAST and WRONG, and few calls of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_tuning, "candidates", lambda *_: (SLOW, FAST, WRONG))
        patch.setattr(linear_tuning, "choose", lambda *_: SLOW)
        patch.setattr(linear_tuning, "PREFETCH", ())
        patch.setattr(tuning, "_MOST_COPIES", 16)
        patch.setattr(tuning, "_REPLAY_SECONDS", 20e-6)
        yield


class FakeGpu:
    """As ``_native.GpuDevice`` as far as tuning goes. A graph takes what its nodes take; its result is made of the
    place of the weights that its last node reads. Class attributes are what a test sets.

    Attributes:
        us: binary -> microseconds of a call; others take 10, a norm BEFORE_US.
        wrong, lazy, broken: binaries whose results differ by a bit, that write nothing, that no driver loads graphs of.
        lose: number of the step that never ends well.
        clock: seconds that have passed on the device.
    """

    us: dict[str, float]
    wrong: set[str]
    lazy: set[str]
    broken: set[str]
    lose: int | None
    clock: float
    made: list[FakeGpu]

    def __init__(self, backend: str, ordinal: int, io_sets: int, *, spin_seconds: float = 0):
        assert (backend, ordinal, io_sets) == ("cuda", 0, 2)
        self.regions: dict[str, int] = {}
        self.binaries: set[str] = set()
        self.graphs: list[LaunchGraph] = []
        self.steps: list[tuple[int, int, int, float, float | None]] = []
        self.tickets, self.waited, self.closed = 0, 0, False
        FakeGpu.made.append(self)

    def time_steps(self, num_steps: int) -> None:
        self.ring = num_steps

    def step_times(self) -> list[tuple[int, int, int, float, float | None]]:
        assert self.waited == self.tickets, "a step is still in flight"
        found, self.steps = self.steps[-self.ring :], []
        return found

    def load_weights(self, path: str, file_offset: int, nbytes: int) -> None:
        assert Path(path).stat().st_size >= file_offset + nbytes
        self.regions["weights"] = nbytes

    def allocate(self, region: str, nbytes: int) -> None:
        self.regions[region] = nbytes

    def allocate_io(self, nbytes: int, step_sizes_offset: int) -> None:
        assert nbytes > 32 and step_sizes_offset == 0
        self.regions["io"] = self.regions["host_io"] = nbytes
        self.stride = -(-nbytes // 4096) * 4096
        self.host, self.arena = bytearray(2 * self.stride), bytearray(self.regions["arena"])

    def view(self, region: str) -> memoryview:
        assert region == "io"
        return memoryview(self.host)

    def load_binary(self, name: str, data: bytes) -> None:
        assert data.startswith(b"\x7fELF") and name not in self.binaries
        self.binaries.add(name)

    def load_graph(self, data: bytes, kv_page_stride: int) -> int:
        graph = LaunchGraph.decode(data)
        for i, node in enumerate(graph.nodes):
            assert node.launch is not None and node.launch.binary in self.binaries
            assert node.launch.programmatic is (i >= 2)  # not what brings the sizes in, nor who comes right after
            if node.launch.binary in self.broken:
                raise _native.GraphError("node 0: too much shared memory")
            for _, pointer in node.pointers():
                assert pointer.end <= self.regions[str(pointer.region)]
        self.graphs.append(graph)
        return len(self.graphs) - 1

    def submit(self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int, io_set: int) -> int:
        assert self.tickets - self.waited < 2, "both io sets are in use"
        self.tickets += 1
        nodes = self.graphs[graph].nodes
        seconds = sum(self._us(node) for node in nodes) * 1e-6 * (1 + 0.001 * (self.tickets % 3))
        FakeGpu.clock += seconds
        self.steps.append((self.tickets, num_tokens, num_seqs, seconds, None))
        assert nodes[0].symbol == "stage_io"
        if len(nodes) == 1:
            self._fetch(nodes[0], num_logit_rows, io_set * self.stride)
        else:
            self._run(nodes[-1])
        return self.tickets

    def _fetch(self, node: Any, rows: int, io: int) -> None:
        (source,) = (p for _, p in node.pointers() if p.region is Region.ARENA)
        (target,) = (p for _, p in node.pointers() if p.writes)
        assert target.region is Region.HOST_IO and source.extent == target.extent
        nbytes, at = rows * ROW_BYTES, io + target.offset
        self.host[at : at + nbytes] = self.arena[source.offset : source.offset + nbytes]

    def _us(self, node: Any) -> float:
        known = {"stage_io": 0.0, "rms_norm": BEFORE_US}
        return known[node.symbol] if node.symbol in known else self.us.get(node.launch.binary, 10.0)

    def _run(self, node: Any) -> None:
        binary = node.launch.binary
        if node.symbol == "rms_norm" or binary in self.lazy:
            return
        (out,) = (p for _, p in node.pointers() if p.writes)
        assert out.region is Region.ARENA
        weights = next(p for i, p in node.pointers() if i == 1)
        content = bytearray(hashlib.sha256(str(weights).encode()).digest() * (out.extent // 32))
        content[-1] ^= binary in self.wrong
        self.arena[out.offset : out.end] = content

    def wait(self, ticket: int) -> None:
        assert ticket <= self.tickets
        self.waited = ticket
        if self.lose is not None and ticket >= self.lose:
            raise _native.DeviceLostError("the device NVIDIA H200 is lost: an illegal address")

    def close(self) -> None:
        self.closed = True


def plug_in(monkeypatch: pytest.MonkeyPatch, *gpus: tuple[int, str, str, int, int], reason: str = "") -> None:
    FakeGpu.us, FakeGpu.wrong, FakeGpu.lazy, FakeGpu.broken = {}, set(), set(), set()
    FakeGpu.lose, FakeGpu.clock, FakeGpu.made, ContextDouble.opened = None, 0.0, [], []
    found = list(gpus) if gpus or reason else [H200]
    monkeypatch.setattr(_native, "GpuDevice", FakeGpu)
    monkeypatch.setattr(_native, "GpuContext", ContextDouble)
    monkeypatch.setattr(_native, "gpu_devices", lambda backend: (found, reason))


def binaries(packed: Path, config: Config) -> set[str]:
    """The binaries of a candidate, in all shapes."""
    with TuningPack(packed) as opened:
        graphs = [
            LaunchGraph.decode(opened.read(candidate.graph))
            for shape in opened.manifest.shapes
            for case in shape.cases
            for candidate in case.candidates
            if candidate.config == to_json(config)
        ]
    return {graph.nodes[-1].launch.binary for graph in graphs if graph.nodes[-1].launch is not None}


def speed(packed: Path, config: Config, us: float) -> None:
    FakeGpu.us |= dict.fromkeys(binaries(packed, config), us)


def outcomes(packed: Path, **options: Any) -> tuple[list[Outcome], Results]:
    with TuningPack(packed) as opened:
        results = Results(opened, find_gpu(HOPPER, None, opened.made_by))
        measure(results, clock=lambda: FakeGpu.clock, **options)
    assert all(device.closed for device in FakeGpu.made) and not ContextDouble.opened
    return results.outcomes, results
