"""A stand-in for ``_native.GpuDevice``: its interface, and CPU graphs run behind a queue of their own.

A step takes the inputs of its io set when its turn comes, and leaves its outputs there. The double refuses a set whose
step nobody has waited for, and fails or is lost at the steps it is told. ``gpu_artifact`` makes an artifact whose GPU
section holds a CPU's graphs.
"""

from __future__ import annotations

import hashlib
import json
import queue
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenspeed import _native
from tokenspeed.artifact import DEVICE_ABI, DEVICE_LIBRARY, DIGEST, MANIFEST
from tokenspeed.step import align

H200 = (0, "NVIDIA H200", "sm_90", 140 << 30, 13000)
LOST = "the device NVIDIA H200 is lost: it has fallen off the bus"
Moves = tuple[list[tuple[int, int]], list[tuple[int, int]]]


class GpuDouble:
    """See the module. Class attributes are what a test sets; they are read as steps run.

    Attributes:
        free, total: bytes of memory.
        fail: numbers of steps, from 1, that fail.
        lose: number of the step at which the device is lost.
        graphs_fail: whether no graph can be loaded.
        gate: steps run only while it is set.
        moves_late: whether pages move just before their step runs, else as soon as they may: beside the steps in
            flight.
    """

    free, total = 1 << 30, 2 << 30
    fail: frozenset[int] = frozenset()
    lose: int | None = None
    graphs_fail = False
    gate = threading.Event()
    moves_late = False
    made: list[GpuDouble]

    def __init__(self, backend: str, ordinal: int, io_sets: int, *, spin_seconds: float):
        assert (backend, ordinal) == ("cuda", 0) and spin_seconds > 0
        self._cpu = _native.CpuDevice(1)
        self._opened_on = threading.get_native_id()
        self._num_sets = io_sets
        self._queue: queue.SimpleQueue[tuple[int, int, tuple[int, int, int], int] | Moves | None] = queue.SimpleQueue()
        self._done = threading.Condition()
        self._results: dict[int, BaseException | None] = {}
        self._busy: dict[int, int] = {}  # io set -> ticket
        self._tickets = 0
        self._sizes: dict[int, tuple[int, int, int]] = {}
        self._lost = False
        self.most_in_flight = 0
        self.binaries: dict[str, bytes] = {}
        self.closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        GpuDouble.made.append(self)

    def memory(self) -> tuple[int, int]:
        return self.free, self.total

    def load_weights(self, path: str, file_offset: int, nbytes: int) -> None:
        self._cpu.load_weights(path, file_offset, nbytes)

    def update_weights(self, path: str, file_offset: int, nbytes: int) -> None:
        self._wait_for_steps()
        self._cpu.update_weights(path, file_offset, nbytes)

    def _wait_for_steps(self) -> None:
        with self._done:
            self._require_working()
            self._done.wait_for(lambda: self._lost or len(self._results) == self._tickets)
            self._require_working()

    def allocate(self, region: str, nbytes: int) -> None:
        assert region not in ("io", "host_io"), "these have a call of their own"
        self._cpu.allocate(region, nbytes)

    def allocate_io(self, nbytes: int, step_sizes_offset: int) -> None:
        self._step_sizes_offset, self._io_bytes = step_sizes_offset, nbytes
        self._cpu.allocate("io", nbytes)
        self._set_bytes = align(nbytes, 4096)
        self._host = bytearray(b"\xee" * self._set_bytes * self._num_sets)

    def view(self, region: str) -> memoryview:
        assert region == "io"
        return memoryview(self._host)

    def read(self, region: str, offset: int, nbytes: int) -> bytes:
        return bytes(self._cpu.view(region)[offset : offset + nbytes])

    def load_binary(self, name: str, data: bytes) -> None:
        if not data.startswith(b"\x7fELF"):
            raise _native.GraphError(f"the code object '{name}' is damaged: it is no ELF file")
        self.binaries[name] = data

    def load_files(
        self,
        binaries: Sequence[tuple[str, str, str, int, int]],
        graphs: Sequence[tuple[str, str, int, int]],
        kv_page_stride: int,
        num_threads: int,
    ) -> tuple[list[int], float, float]:
        for name, label, path, offset, nbytes in binaries:
            try:
                self.load_binary(name, Path(path).read_bytes()[offset : offset + nbytes])
            except _native.GraphError as e:
                raise _native.GraphError(f"{label} cannot be loaded: {e}") from None
        read = [Path(path).read_bytes()[offset : offset + nbytes] for _, path, offset, nbytes in graphs]
        return [self.load_graph(data, kv_page_stride) for data in read], 0.001, 0.002

    def load_graph(self, data: bytes, kv_page_stride: int) -> int:
        if self.graphs_fail:
            raise _native.DeviceError("the device NVIDIA H200 cannot instantiate a graph: out of memory")
        return int(self._cpu.load_graph(data, kv_page_stride))

    def allocate_host_pages(self, num_pages: int, page_bytes: int) -> None:
        self._cpu.allocate_host_pages(num_pages, page_bytes)

    def move_pages(self, moves_out: list[tuple[int, int]], moves_in: list[tuple[int, int]]) -> None:
        with self._done:
            self._require_working()
            if self.moves_late:
                self._queue.put((moves_out, moves_in))
                return
        self._cpu.move_pages(moves_out, moves_in)

    def submit(self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int, io_set: int) -> int:
        with self._done:
            self._require_working()
            if io_set in self._busy:
                raise _native.DeviceError(f"io set {io_set} is in use by step {self._busy[io_set]}")
            self._tickets += 1
            self._busy[io_set] = self._tickets
            self.most_in_flight = max(self.most_in_flight, len(self._busy))
            self._sizes[self._tickets] = (num_tokens, num_seqs, num_logit_rows)
            counts = self._io_set(io_set)[self._step_sizes_offset :][:12].cast("i")
            assert counts.tolist() == [num_tokens, num_seqs, num_logit_rows], "the host has written others"
            self._queue.put((self._tickets, graph, (num_tokens, num_seqs, num_logit_rows), io_set))
            return self._tickets

    def wait(self, ticket: int, seconds: float | None = None) -> bool:
        with self._done:
            if not self._done.wait_for(lambda: ticket in self._results, seconds):
                return False
            error = self._results[ticket]
            self._busy = {io_set: t for io_set, t in self._busy.items() if t > ticket}
            if error is not None:
                raise error
            return True

    def profile(
        self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int, io_set: int
    ) -> list[tuple[str, float]]:
        sizes = (num_tokens, num_seqs, num_logit_rows)
        self._cpu.view("io")[:] = self._io_set(io_set)
        return [("inputs", 1e-6), *self._cpu.profile(graph, *sizes)]

    def seal(self) -> None:
        self._cpu.seal()

    def counters(self) -> dict[str, Any]:
        return {**self._cpu.counters(), "modules_loaded_after_seal": 0, "captures_after_seal": 0}

    def time_steps(self, num_steps: int) -> None:
        self._timed = 0

    def step_times(self) -> list[tuple[int, int, int, float, float | None]]:
        """A graph takes 10 ms, and 0.001 ms pass before the next."""
        with self._done:
            tickets = [t for t in sorted(self._results) if t > self._timed]
            self._timed = max(tickets, default=self._timed)
            return [(t, *self._sizes[t][:2], 0.01, None if t == 1 else 1e-6) for t in tickets]

    def spans(self) -> list[tuple[str, float, float, int]]:
        return [("driver", 1.0, 0.5, self._opened_on), ("context", 1.5, 0.25, self._opened_on)]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._queue.put(None)
            if not self._lost:
                self.gate.set()
                self._thread.join()
            self._cpu.close()

    def _require_working(self) -> None:
        if self._lost:
            raise _native.DeviceLostError(LOST)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if len(work) == 2:
                self._cpu.move_pages(*work)
                continue
            ticket, graph, sizes, io_set = work
            self.gate.wait()
            error: BaseException | None = None
            if self._lost or ticket == self.lose:
                self._lost = True
                error = _native.DeviceLostError(LOST)
            elif ticket in self.fail:
                error = _native.DeviceError("an illegal instruction")
            else:
                host, device = (np.frombuffer(v, np.uint8) for v in (self._io_set(io_set), self._cpu.view("io")))
                device[:] = before = host.copy()
                self._cpu.wait(self._cpu.submit(graph, *sizes))
                host[device != before] = device[device != before]
            with self._done:
                self._results[ticket] = error
                self._done.notify_all()

    def _io_set(self, number: int) -> memoryview:
        return memoryview(self._host)[number * self._set_bytes :][: self._io_bytes]


class ContextDouble:
    """A stand-in for ``_native.GpuContext``, which knows of those that are open."""

    opened: list[tuple[str, int]]

    def __init__(self, backend: str, ordinal: int):
        self._name = (backend, ordinal)
        ContextDouble.opened.append(self._name)

    def close(self) -> None:
        ContextDouble.opened.remove(self._name)


def install(gpus: Sequence[tuple[int, str, str, int, int]] = (H200,), reason: str = "no driver is installed") -> None:
    """Give this process GPUs. For tests, undone by ``monkeypatch`` in ``plug_in``; for scripts, for good."""
    GpuDouble.made, GpuDouble.fail, GpuDouble.lose, GpuDouble.graphs_fail = [], frozenset(), None, False
    GpuDouble.free = GpuDouble.total // 2
    GpuDouble.gate = threading.Event()
    GpuDouble.gate.set()
    ContextDouble.opened = []
    _native.GpuDevice = GpuDouble  # type: ignore[misc,assignment]
    _native.GpuContext = ContextDouble  # type: ignore[misc,assignment]
    _native.gpu_devices = (  # type: ignore[assignment]
        lambda backend: (list(gpus), "") if backend == "cuda" and gpus else ([], reason)
    )


def plug_in(monkeypatch: Any, gpus: Sequence[tuple[int, str, str, int, int]] = (H200,), reason: str = "none") -> None:
    """``install``, until the test is over."""
    monkeypatch.setattr(_native, "GpuDevice", None)
    monkeypatch.setattr(_native, "GpuContext", None)
    monkeypatch.setattr(_native, "gpu_devices", None)
    install(gpus, reason)


def gpu_artifact(cpu: Path, path: Path, *, keep_cpu: bool = True, target: str = "cuda:sm_90a") -> Path:
    """A copy of the artifact ``cpu`` whose graphs are also (or only) those of a GPU target, with one binary."""
    shutil.copytree(cpu, path)
    (path / "kernels").mkdir()
    binary = b"\x7fELF and more"
    (path / "kernels" / "norm.cubin").write_bytes(binary)
    manifest = json.loads((path / MANIFEST).read_text())
    section = {
        **manifest["targets"][0],
        "target": target,
        "kernel_library": DEVICE_LIBRARY,
        "kernel_abi": DEVICE_ABI,
        "binaries": [{"name": "norm", "file": "kernels/norm.cubin"}],
    }
    manifest["targets"] = [*(manifest["targets"] if keep_cpu else ()), section]
    digest = hashlib.sha256(binary).hexdigest()
    manifest["files"]["kernels/norm.cubin"] = {"bytes": len(binary), "sha256": digest}
    raw = (json.dumps(manifest) + "\n").encode()
    (path / MANIFEST).write_bytes(raw)
    (path / DIGEST).write_text(hashlib.sha256(raw).hexdigest() + "\n")
    return path
