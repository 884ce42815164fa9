"""What tests of `tokenspeed prove` share: small cases, and a GPU that is the Triton interpreter.

The interpreter adds up in float64, so kernels that differ in the order of their float32 sums agree there. What it shows
is that runs, operands and labels fit one another, and that a kernel of other results is found out: those of ``wrong``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tokenspeed import _native
from tokenspeed.compile import codegen, pack_writer, proving
from tokenspeed.compile.interpret_graph import Memory
from tokenspeed.compile.interpret_triton import run_gpu_graph
from tokenspeed.compile.proof_cases import Case
from tokenspeed.graph import LaunchGraph, Region
from tokenspeed.kernels.registry import DeviceKernel
from tokenspeed.step import PlacedTensor
from tokenspeed.target import Target

HOPPER = Target.parse("cuda:sm_90a")
H200 = (0, "NVIDIA H200", "sm_90", 140 << 30, 13000)
_SIZES = PlacedTensor("step_sizes", "int32", (8,), 0)


class InterpretedGpu:
    """Stands in for ``_native.GpuDevice``. Class attributes are what a test sets.

    Attributes:
        kernels: binary name -> kernel, of all packs that were made.
        spoil: called with (kernel names of a graph, number of rows, the results) after it has run.
    """

    kernels: ClassVar[dict[str, DeviceKernel]] = {}
    spoil: ClassVar[Callable[[Sequence[DeviceKernel], int, Any], None]] = staticmethod(lambda *_: None)

    def __init__(self, backend: str, ordinal: int, io_sets: int, **_: Any):
        self._regions: dict[Region, Any] = dict.fromkeys(Region, np.zeros(0, np.uint8))
        self._graphs: list[LaunchGraph] = []

    def load_weights(self, path: str, file_offset: int, nbytes: int) -> None:
        data = np.fromfile(path, np.uint8, nbytes, offset=file_offset)
        assert len(data) == nbytes
        self._regions[Region.WEIGHTS] = _aligned(data)

    def allocate(self, region: str, nbytes: int) -> None:
        self._regions[Region[region.upper()]] = _aligned(np.full(nbytes, 0xFF, np.uint8))

    def allocate_io(self, nbytes: int, step_sizes_offset: int) -> None:
        assert step_sizes_offset == 0
        for region in (Region.IO, Region.HOST_IO):
            self._regions[region] = _aligned(np.zeros(nbytes, np.uint8))

    def view(self, region: str) -> memoryview:
        assert region == "io"
        return memoryview(self._regions[Region.HOST_IO])

    def load_binary(self, name: str, data: bytes) -> None:
        assert name in self.kernels and data.startswith(b"\x7fELF")

    def load_graph(self, data: bytes, kv_page_stride: int) -> int:
        self._graphs.append(LaunchGraph.decode(data))
        return len(self._graphs) - 1

    def submit(self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int, io_set: int) -> int:
        memory = Memory.__new__(Memory)
        memory.regions, memory.kv_page_bytes = self._regions, 0
        nodes = self._graphs[graph].nodes
        run_gpu_graph(self._graphs[graph], self.kernels, memory, _SIZES, (num_tokens, num_seqs, num_logit_rows))
        if len(nodes) > 1:
            used = [self.kernels[node.launch.binary] for node in nodes[1:] if node.launch is not None]
            self.spoil(used, num_logit_rows, self._regions[Region.ARENA])
        return 0

    def wait(self, ticket: int) -> None: ...

    def close(self) -> None: ...


def _aligned(data: Any) -> Any:
    memory = np.empty(len(data) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    memory[start : start + len(data)] = data
    return memory[start : start + len(data)]


class Context:
    def __init__(self, backend: str, ordinal: int): ...

    def close(self) -> None: ...


def plug_in(monkeypatch: Any) -> None:
    """One H200 that interprets what it runs, until the test is over."""
    monkeypatch.setattr(_native, "GpuDevice", InterpretedGpu)
    monkeypatch.setattr(_native, "GpuContext", Context)
    monkeypatch.setattr(_native, "gpu_devices", lambda b: ([H200], "") if b == "cuda" else ([], "none"))
    monkeypatch.setattr(InterpretedGpu, "spoil", staticmethod(lambda *_: None))

    def remembering(jobs: Any, **more: Any) -> Any:
        compiled = codegen.compile_kernels(jobs, **more)
        InterpretedGpu.kernels |= {code.name: kernel for (kernel, _), code in compiled.items()}
        return compiled

    monkeypatch.setattr(pack_writer, "compile_kernels", remembering)


@contextlib.contextmanager
def members(monkeypatch: Any, kept: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[None]:
    """The members of some ops are these alone."""
    from tokenspeed.kernels.triton.proofs import MEMBERS

    for op, found in kept.items():
        monkeypatch.setattr(type(MEMBERS[op]), "members", lambda self, request, found=found: tuple(found))
    yield


def packed(path: Path, cases: Sequence[Case], cache: Path | None) -> Any:
    return proving.pack(path, HOPPER, cases=cases, force=True, workers=2, cache=cache)
