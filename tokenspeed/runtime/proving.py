"""The device's side of ``tokenspeed prove``: runs the kernels of a pack on its probes and finds which give equal bits.

It needs the base install and no compiler. Every member of a case computes every run of it. A *logical row* must come
out the same in all runs; members whose logical rows are all equal make a class (docs/equivalence.md).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import repeat
from typing import Any

from tokenspeed import _native
from tokenspeed.pack_file import ConfigJson
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
from tokenspeed.runtime.pack_device import GraphLoader, held_open, opened, weights_file
from tokenspeed.runtime.places import Gpu

_KEPT = "what was compared before it"


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
            operands = weights_file("prove", "probes", case.weights_bytes, _data(results.pack, case))
            with operands as file, opened(results.gpu, case, file, kept=_KEPT) as device:
                bench = _Bench(results.pack, case, device)
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
        self._graphs = GraphLoader(pack, device)
        self._fetch, self._erase = self._load(case.fetch), self._load(case.erase)
        self._first = case.results[0].offset

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
        """The handle of a graph. Raises ArtifactError, _native.GraphError."""
        return self._graphs.load(name, self._pack.read_graph(name))

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


def _data(pack: ProofPack, case: ProofCase) -> Iterator[memoryview]:
    """The operands of the case, in pieces. Raises ArtifactError."""
    members = {piece.member: pack.read(piece.member) for piece in case.data}
    for piece in case.data:
        part = memoryview(members[piece.member])[piece.offset : piece.offset + piece.nbytes]
        yield from repeat(part, piece.repeat)
