"""The tuning pack: kernels and LaunchGraphs to time on a GPU, made by ``tokenspeed tune pack`` on any machine.

A pack file (pack_file.py, docs/tuning.md) whose graphs are of one call, which ``chain`` repeats, and of what comes
before and after calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from tokenspeed.graph import Argument, LaunchGraph, Node, Pointer, Region
from tokenspeed.json_check import record
from tokenspeed.pack_file import (
    STEP_SIZES_BYTES,
    ConfigJson,
    Member,
    PackFile,
    check_graphs,
    parse_manifest,
)

FORMAT_VERSION = 3
"""Of packs and of the results of a run. History: 1 (2026-11-29); 2 (2026-11-29): scratch memory of launches;
3 (2026-11-29): graphs that bring sizes in and results out."""
RESULTS_KIND = "tokenspeed tuning results"
MADE_BY = "tokenspeed tune pack"

SCRATCH_SLOTS = 256
"""Calls of a chain that have scratch memory of their own before it starts anew. It is written before a launch has
waited for those before it, and a device runs at most 128 grids at a time (CUDA C++ Programming Guide, "Compute
Capabilities")."""


@dataclass(frozen=True)
class Rotation:
    """Where the copies of a shape's cold operand lie in region weights: copy i at ``offset + i * stride``, each of
    ``nbytes``. Copies larger than the cache may overlap: each pushes itself out."""

    offset: int
    nbytes: int
    stride: int
    copies: int


@dataclass(frozen=True)
class Candidate:
    """A configuration as tables hold it, and the member with the graph of one call."""

    config: ConfigJson
    graph: str


@dataclass(frozen=True)
class Case:
    """One number of rows of a shape.

    Attributes:
        rows: M.
        repeats: calls of a replay, a multiple of the rotation's copies.
        nbytes, flops: the least that a call moves from and to memory, and its floating-point operations.
        before: the graph of what comes before every call, in a step and in the candidates' graphs, whose own time is
            taken off; empty for nothing.
        candidates: what is compared; all give equal bits.
    """

    rows: int
    repeats: int
    nbytes: int
    flops: int
    before: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Shape:
    """One op of one shape: what a table finds entries by, but for M; the regions it needs, in bytes; its cases.

    ``scratch`` is the part of region arena, if any, of which each call of a chain takes the next copy. ``inputs`` is
    the graph that brings the sizes of the step to region io, with which every chain begins. ``fetch`` is the one that
    copies the result from region arena to region host_io: num_logit_rows rows of ``result_row_bytes``, to
    ``result_offset``.
    """

    family: str
    op: str
    key: Mapping[str, int]
    dtype: str
    weights_bytes: int
    arena_bytes: int
    io_bytes: int
    result_offset: int
    result_row_bytes: int
    inputs: str
    fetch: str
    rotation: Rotation
    scratch: Rotation
    cases: tuple[Case, ...]

    def __str__(self) -> str:
        return f"{self.op} {' '.join(f'{name}={size}' for name, size in self.key.items())} {self.dtype}"


@dataclass(frozen=True)
class Peak:
    """What the data sheet of the architecture's usual part promises: reading memory, bf16 matrix products."""

    part: str
    bytes_per_s: float
    flops_per_s: float

    def bound(self, nbytes: int, flops: int) -> tuple[float, str]:
        """(seconds that a call takes at least, what bounds it: "read" or "matmul")."""
        read, matmul = nbytes / self.bytes_per_s, flops / self.flops_per_s
        return (read, "read") if read >= matmul else (matmul, "matmul")


@dataclass(frozen=True)
class PackManifest:
    """The contents of manifest.json."""

    format_version: ClassVar[int] = FORMAT_VERSION
    target: str
    tokenspeed_version: str
    models: tuple[str, ...]
    peak: Peak
    shapes: tuple[Shape, ...]
    binaries: Mapping[str, str]
    files: Mapping[str, Member]

    @classmethod
    def from_bytes(cls, data: bytes) -> PackManifest:
        """Parse manifest.json. Raises ArtifactError for another format version or a malformed manifest."""

        def parse(raw: Mapping[str, Any]) -> PackManifest:
            shapes = tuple(_shape(shape) for shape in raw["shapes"])
            manifest = cls(**{**raw, "peak": Peak(**raw["peak"]), "models": tuple(raw["models"]), "shapes": shapes})
            _check(manifest)
            return manifest

        return parse_manifest(data, "tuning pack", cls.format_version, MADE_BY, parse)


def _shape(raw: Mapping[str, Any]) -> Shape:
    cases = tuple(
        record(Case, case, candidates=tuple(record(Candidate, c) for c in case["candidates"])) for case in raw["cases"]
    )
    rotation, scratch = (record(Rotation, raw[name]) for name in ("rotation", "scratch"))
    return record(Shape, raw, rotation=rotation, scratch=scratch, cases=cases)


def _check(manifest: PackManifest) -> None:
    """What the device side relies on. Raises ValueError."""
    if not (manifest.peak.bytes_per_s > 0 and manifest.peak.flops_per_s > 0):
        raise ValueError("peak is not positive")
    for shape in manifest.shapes:
        r, most = shape.rotation, max((case.rows for case in shape.cases), default=0)
        if not (r.copies >= 2 and r.stride > 0 and r.nbytes > 0) or (
            r.offset + (r.copies - 1) * r.stride + r.nbytes > shape.weights_bytes
        ):
            raise ValueError(f"the copies of {shape} do not lie in its region weights")
        s = shape.scratch
        if s.copies < 1 or s.stride < s.nbytes or s.offset + s.copies * s.stride > shape.arena_bytes:
            raise ValueError(f"the scratch memory of {shape} does not lie in its region arena")
        if (
            shape.result_offset < STEP_SIZES_BYTES
            or shape.result_offset + most * shape.result_row_bytes > shape.io_bytes
        ):
            raise ValueError(f"the result of {shape} does not lie in its region host_io")
        check_graphs(manifest, (shape.inputs, shape.fetch))
        for case in shape.cases:
            if not case.rows or not case.repeats or case.repeats % r.copies:
                raise ValueError(f"{shape} M={case.rows} repeats {case.repeats} times over {r.copies} copies")
            check_graphs(manifest, (*(c.graph for c in case.candidates), *([case.before] if case.before else [])))


class TuningPack(PackFile[PackManifest]):
    """A tuning pack opened for reading."""

    def __init__(self, path: Path):
        super().__init__(path, PackManifest.from_bytes, MADE_BY)


# --- chains of calls ------------------------------------------------------------------------------


def chain(inputs: LaunchGraph, call: LaunchGraph, shape: Shape, repeats: int) -> LaunchGraph:
    """``inputs``, then ``repeats`` of one call, each node after the one before it, as in a step: call i reads copy
    ``i % copies`` of the cold operand, and likewise takes scratch memory. The first node of the first call starts when
    ``inputs`` has ended: it may read the sizes of the step before it waits."""
    nodes = list(inputs.nodes)
    for i in range(repeats):
        for node in call.nodes:
            args = tuple(
                _shifted(_shifted(arg, Region.WEIGHTS, shape.rotation, i), Region.ARENA, shape.scratch, i)
                for arg in node.args
            )
            before = (len(nodes) - 1,) if nodes else ()
            launch = node.launch
            if launch is not None and len(nodes) == len(inputs.nodes):
                launch = replace(launch, programmatic=False)
            nodes.append(Node(f"{node.name}/{i}", node.symbol, args, before, launch))
    return LaunchGraph(tuple(nodes))


def _shifted(arg: Argument, region: Region, rotation: Rotation, call: int) -> Argument:
    if not isinstance(arg, Pointer) or arg.region is not region:
        return arg
    if arg.offset < rotation.offset or arg.end > rotation.offset + rotation.nbytes:
        return arg
    return Pointer(region, arg.offset + call % rotation.copies * rotation.stride, arg.extent, arg.access)
