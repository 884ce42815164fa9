"""The proof pack: kernels, launch graphs and probes by which a GPU shows which kernels give equal bits.

Made by ``tokenspeed prove pack`` on any machine, run by ``tokenspeed prove run`` with the base install. A pack file
(pack_file.py) whose graphs are of one call each, and which holds the probes in data/<digest>.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tokenspeed.json_check import record
from tokenspeed.pack_file import (
    STEP_SIZES_BYTES,
    ConfigJson,
    Member,
    PackFile,
    check_graphs,
    parse_manifest,
)

FORMAT_VERSION = 1
"""Of packs and of the results of a run. History: 1 (2026-11-30)."""
RESULTS_KIND = "tokenspeed proof results"
MADE_BY = "tokenspeed prove pack"


@dataclass(frozen=True)
class Piece:
    """Bytes ``[offset, offset + nbytes)`` of a member, ``repeat`` times: region weights is made of such, in order."""

    member: str
    offset: int
    nbytes: int
    repeat: int


@dataclass(frozen=True)
class Result:
    """A tensor that a call writes: its place in region host_io once it is fetched, and the bytes of each row."""

    name: str
    offset: int
    row_bytes: int


@dataclass(frozen=True)
class Run:
    """One composition of a step: the sizes that the kernels are told, and for every row of the results which logical
    row it is. Equal logical rows must have equal bits, whatever else is in the step."""

    name: str
    num_tokens: int
    num_seqs: int
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Compared:
    """A member of the op and its graph for each run; empty for runs that it does not serve."""

    member: ConfigJson
    graphs: tuple[str, ...]


@dataclass(frozen=True)
class ProofCase:
    """One shape of one op: what is compared, on which data. Sizes in bytes; ``results`` lie in region host_io from
    ``results[0].offset`` on, and in region arena likewise from its beginning. ``inputs``, ``fetch`` and ``erase`` are
    the graphs that bring the sizes of the step in, copy the results to the host, and copy the host's bytes over them.
    """

    op: str
    dtype: str
    key: Mapping[str, int]
    shape: str
    weights_bytes: int
    arena_bytes: int
    io_bytes: int
    data: tuple[Piece, ...]
    results: tuple[Result, ...]
    fetch: str
    erase: str
    functions: tuple[str, ...]
    source: str
    runs: tuple[Run, ...]
    compared: tuple[Compared, ...]

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.shape}"


@dataclass(frozen=True)
class ProofManifest:
    """The contents of manifest.json. ``probes``: what a proof records of its data; ``compiler``: what made the
    binaries."""

    format_version: ClassVar[int] = FORMAT_VERSION
    target: str
    tokenspeed_version: str
    compiler: str
    probes: Mapping[str, Any]
    cases: tuple[ProofCase, ...]
    binaries: Mapping[str, str]
    files: Mapping[str, Member]

    @classmethod
    def from_bytes(cls, data: bytes) -> ProofManifest:
        """Parse manifest.json. Raises ArtifactError for another format version or a malformed manifest."""

        def parse(raw: Mapping[str, Any]) -> ProofManifest:
            manifest = record(cls, raw, cases=tuple(_case(case) for case in raw["cases"]))
            _check(manifest)
            return manifest

        return parse_manifest(data, "proof pack", cls.format_version, MADE_BY, parse)


def _case(raw: Mapping[str, Any]) -> ProofCase:
    return record(
        ProofCase,
        raw,
        data=tuple(record(Piece, piece) for piece in raw["data"]),
        results=tuple(record(Result, result) for result in raw["results"]),
        functions=tuple(raw["functions"]),
        runs=tuple(record(Run, run, labels=tuple(run["labels"])) for run in raw["runs"]),
        compared=tuple(record(Compared, c, graphs=tuple(c["graphs"])) for c in raw["compared"]),
    )


def _check(manifest: ProofManifest) -> None:
    """What the device side relies on. Raises ValueError."""
    for case in manifest.cases:
        rows = max((len(run.labels) for run in case.runs), default=0)
        if not rows or not case.results or not case.compared:
            raise ValueError(f"{case} compares nothing")
        if sum(piece.nbytes * piece.repeat for piece in case.data) != case.weights_bytes:
            raise ValueError(f"the data of {case} are not {case.weights_bytes} bytes")
        for piece in case.data:
            if piece.offset + piece.nbytes > manifest.files[piece.member].nbytes:
                raise ValueError(f"{piece.member} has no {piece.nbytes} bytes at {piece.offset}")
        for result in case.results:
            if result.offset < STEP_SIZES_BYTES or result.offset + rows * result.row_bytes > case.io_bytes:
                raise ValueError(f"result {result.name} of {case} does not lie in its region host_io")
        for run in case.runs:
            if not all(type(label) is int and label >= 0 for label in run.labels):
                raise ValueError(f"run {run.name} of {case} has labels {run.labels!r:.60}")
        graphs = [graph for c in case.compared for graph in c.graphs if graph]
        if any(len(c.graphs) != len(case.runs) for c in case.compared):
            raise ValueError(f"{case} has other graphs than runs")
        check_graphs(manifest, (case.fetch, case.erase, *graphs))


# --- which results are equal ----------------------------------------------------------------------

ERASED = 0xA5
"""What every byte of a result holds before a kernel writes it."""


@dataclass(frozen=True)
class Answer:
    """What a member gave: the digest of each logical row; or why it is in no class."""

    member: ConfigJson
    rows: Mapping[int, bytes]
    reason: str = ""


class RowsSeen:
    """The logical rows that a member has given so far, each in the same bits every time."""

    def __init__(self) -> None:
        self.rows: dict[int, bytes] = {}
        self._run_of: dict[int, str] = {}

    def add(self, run: str, labels: Sequence[int], results: Sequence[bytes | None]) -> str:
        """Take the digests of a run's rows, None for one that was not written. Returns what is wrong with them, or an
        empty text."""
        for place, (label, row) in enumerate(zip(labels, results, strict=True)):
            if row is None:
                return f"run {run!r}: it leaves row {place} as it was"
            if self.rows.setdefault(label, row) != row:
                return f"row {place} of run {run!r} differs from the same row in run {self._run_of[label]!r}"
            self._run_of.setdefault(label, run)
        return ""

    def vacuous(self) -> str:
        """Why nothing follows from the rows being equal: most are alike. Empty if they are not."""
        alike = len(self.rows) - len(set(self.rows.values()))
        if 2 * alike <= len(self.rows):
            return ""
        return f"{alike} of its {len(self.rows)} rows have the bits of another: the probes did not reach it"


@dataclass(frozen=True)
class Group:
    """Members that gave equal bits, and the logical rows that they have together."""

    members: tuple[ConfigJson, ...]
    rows: Mapping[int, bytes]


def equal_answers(answers: Sequence[Answer]) -> list[Group]:
    """Members whose logical rows are equal wherever both have them, largest group first.

    Members that compute other logical rows (of attention: those of decodes, those of chunks) share a group if all rows
    that both have are equal, and there are such.
    """
    groups: list[Group] = []
    for answer in sorted((a for a in answers if not a.reason), key=lambda a: -len(a.rows)):
        for i, group in enumerate(groups):
            common = group.rows.keys() & answer.rows.keys()
            if common and all(group.rows[label] == answer.rows[label] for label in common):
                groups[i] = Group((*group.members, answer.member), {**group.rows, **answer.rows})
                break
        else:
            groups.append(Group((answer.member,), answer.rows))
    return sorted(groups, key=lambda group: -len(group.members))


class ProofPack(PackFile[ProofManifest]):
    """A proof pack opened for reading."""

    def __init__(self, path: Path):
        super().__init__(path, ProofManifest.from_bytes, MADE_BY)
