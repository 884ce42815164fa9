"""The device's side of ``tokenspeed prove``: runs the kernels of a pack on its probes and finds which give equal bits.

It needs the base install and no compiler. Every member of a case computes every run of it. A *logical row* must come
out the same in all runs; members whose logical rows are all equal make a class (docs/equivalence.md).
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from tokenspeed import _native
from tokenspeed.errors import ResourceError
from tokenspeed.proof_pack import (
    ERASED,
    FORMAT_VERSION,
    RESULTS_KIND,
    Answer,
    Compared,
    ProofCase,
    ProofPack,
    RowsSeen,
    Run,
    equal_answers,
)
from tokenspeed.runtime.places import Gpu, GpuPlace
from tokenspeed.runtime.tuning import held_open
from tokenspeed.tuning_pack import ConfigJson


@dataclass(frozen=True)
class CaseResult:
    """The classes of a case, largest first, and the members that are in none, each with the reason. ``rows`` counts the
    results that were compared of each member at least; ``digest`` is that of the largest class's logical rows."""

    case: ProofCase
    classes: tuple[tuple[ConfigJson, ...], ...]
    excluded: tuple[tuple[ConfigJson, str], ...]
    rows: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        case = self.case
        return {
            "op": case.op, "dtype": case.dtype, "key": dict(case.key), "shape": case.shape, "rows": self.rows,
            "functions": list(case.functions), "source": case.source, "digest": self.digest,
            "classes": [[dict(member) for member in members] for members in self.classes],
            "excluded": [{"member": dict(member), "reason": reason} for member, reason in self.excluded],
        }  # fmt: skip


@dataclass
class ProofResults:
    """What a run found; it may end before it has come to all cases."""

    pack: ProofPack
    gpu: Gpu
    cases: list[CaseResult] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As ``tokenspeed prove merge`` reads it."""
        manifest = self.pack.manifest
        return {
            "kind": RESULTS_KIND, "format_version": FORMAT_VERSION, "target": manifest.target,
            "pack": self.pack.digest, "compiler": manifest.compiler, "probes": dict(manifest.probes),
            "device": self.gpu.name, "driver": self.gpu.driver, "date": str(date.today()),
            "seconds": round(self.seconds, 1), "cases": [case.to_json() for case in self.cases],
        }  # fmt: skip


def compare(results: ProofResults, report: Callable[[int, int, CaseResult], None] = lambda *_: None) -> None:
    """Run every case of the pack into ``results``, which also hold what was found before an error.

    Args:
        report: called after each case with (cases done, all cases, the case).

    Raises:
        ArtifactError: a damaged pack. ResourceError: too little memory or disk, or the device failed.
    """
    cases, started = results.pack.manifest.cases, time.monotonic()
    with held_open(results.gpu):
        for done, case in enumerate(cases, 1):
            with _Bench.opened(results.pack, case, results.gpu) as bench:
                result = classify(case, [bench.answer(compared) for compared in case.compared])
            results.cases.append(result)
            results.seconds = time.monotonic() - started
            report(done, len(cases), result)


def classify(case: ProofCase, answers: Sequence[Answer]) -> CaseResult:
    """The classes of ``case``."""
    groups = equal_answers(answers)
    digest = hashlib.sha256(b"".join(row for _, row in sorted(groups[0].rows.items()))).hexdigest() if groups else ""
    served = [
        sum(len(run.labels) for run, graph in zip(case.runs, compared.graphs, strict=True) if graph)
        for compared in case.compared
    ]
    excluded = tuple((answer.member, answer.reason) for answer in answers if answer.reason)
    return CaseResult(case, tuple(group.members for group in groups), excluded, min(served), digest)


class _Bench:
    """A device with the regions of one case."""

    def __init__(self, pack: ProofPack, case: ProofCase, device: Any):
        self._pack, self._case, self._device = pack, case, device
        self._binaries: set[str] = set()
        self._fetch, self._erase = self._load(case.fetch), self._load(case.erase)
        self._first = case.results[0].offset

    @classmethod
    @contextmanager
    def opened(cls, pack: ProofPack, case: ProofCase, gpu: Gpu) -> Iterator[_Bench]:
        """A bench that is ready; DeviceErrors of what is done with it become ResourceErrors."""
        with _data_file(pack, case) as file:
            device = GpuPlace(gpu).open()
            try:
                device.load_weights(str(file), 0, case.weights_bytes)
                device.allocate("arena", case.arena_bytes)
                device.allocate_io(case.io_bytes, 0)
                yield cls(pack, case, device)
            except _native.DeviceError as e:
                raise ResourceError(
                    f"GPU {gpu.ordinal} ({gpu.name}) failed at {case}: {e}", hint="what was compared before it is kept"
                ) from None
            finally:
                device.close()

    def answer(self, compared: Compared) -> Answer:
        """What ``compared`` gives in all its runs."""
        seen = RowsSeen()
        for run, name in zip(self._case.runs, compared.graphs, strict=True):
            if not name:
                continue
            try:
                graph = self._load(name)
            except _native.GraphError as e:
                return Answer(compared.member, {}, f"it cannot be loaded: {e}")
            if problem := seen.add(run.name, run.labels, self._results(graph, run)):
                return Answer(compared.member, {}, problem)
        return Answer(compared.member, seen.rows, seen.vacuous())

    def _load(self, name: str) -> int:
        """The handle of a graph, with the binaries that it needs. Raises ArtifactError, _native.GraphError."""
        graph = self._pack.read_graph(name)
        for node in graph.nodes:
            binary = "" if node.launch is None else node.launch.binary
            if binary not in self._binaries:
                self._device.load_binary(binary, self._pack.read_binary(binary, name))
                self._binaries.add(binary)
        return int(self._device.load_graph(graph.encode(), 0))

    def _results(self, graph: int, run: Run) -> list[bytes | None]:
        """Digest of each row of the results; None for one that the graph has not written."""
        device, count = self._device, len(run.labels)
        host = device.view("io")
        host[self._first : self._case.io_bytes] = bytes([ERASED]) * (self._case.io_bytes - self._first)
        for each in (self._erase, graph, self._fetch):
            device.wait(device.submit(each, run.num_tokens, run.num_seqs, count, 0))
        data = bytes(host[: self._case.io_bytes])
        found: list[bytes | None] = []
        for row in range(count):
            parts = [data[r.offset + row * r.row_bytes :][: r.row_bytes] for r in self._case.results]
            erased = any(part == bytes([ERASED]) * len(part) for part in parts)
            found.append(None if erased else hashlib.blake2b(b"".join(parts), digest_size=16).digest())
        return found


@contextmanager
def _data_file(pack: ProofPack, case: ProofCase) -> Iterator[Path]:
    """A file of the case's operands: the device fills its region weights from one."""
    members = {piece.member: pack.read(piece.member) for piece in case.data}
    try:
        with tempfile.NamedTemporaryFile(prefix="tokenspeed-prove-") as file:
            for piece in case.data:
                part = memoryview(members[piece.member])[piece.offset : piece.offset + piece.nbytes]
                for _ in range(piece.repeat):
                    file.write(part)
            file.flush()
            yield Path(file.name)
    except OSError as e:
        raise ResourceError(
            f"cannot write {case.weights_bytes / 1e6:.0f} MB of probes to {tempfile.gettempdir()}: {e.strerror or e}",
            hint="set TMPDIR to a folder with room",
        ) from None
