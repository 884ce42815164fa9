"""The tuning pack: kernels and LaunchGraphs to time on a GPU, made by ``tokenspeed tune pack`` on any machine.

One ZIP file (docs/tuning.md), so that it travels as one:

    manifest.json           what is to be timed, for which target, with the digest of every other member
    DIGEST                  SHA-256 of manifest.json: the pack's identity
    graphs/<digest>.tslg    LaunchGraphs: of one call, which ``chain`` repeats; of what comes before and after calls
    kernels/<name>.<suffix> GPU code objects (cubin, hsaco)

A pack is untrusted input: every member is checked against the manifest before it is used.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

from tokenspeed.errors import ArtifactError, ProgramError, ResourceError, TargetError
from tokenspeed.graph import Argument, LaunchGraph, Node, Pointer, Region
from tokenspeed.json_check import record
from tokenspeed.target import Target

FORMAT_VERSION = 3
"""Of packs and of the results of a run. History: 1 (2026-11-29); 2 (2026-11-29): scratch memory of launches;
3 (2026-11-29): graphs that bring sizes in and results out."""
MANIFEST, DIGEST = "manifest.json", "DIGEST"
STEP_SIZES_BYTES = 32
"""The sizes of the step, int32[8], are all that a pack's graphs read from region io, at its beginning."""

SCRATCH_SLOTS = 256
"""Calls of a chain that have scratch memory of their own before it starts anew. It is written before a launch has
waited for those before it, and a device runs at most 128 grids at a time (CUDA C++ Programming Guide, "Compute
Capabilities")."""

ConfigJson: TypeAlias = Mapping[str, int | float | bool | str]
_MOST_OF_A_MEMBER = 64 << 20  # bytes unpacked; code objects and manifests of real packs have a hundredth


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

    @property
    def region_sizes(self) -> dict[Region, int]:
        return {Region.WEIGHTS: self.weights_bytes, Region.KV: 0, Region.ARENA: self.arena_bytes,
                Region.IO: self.io_bytes, Region.STATE: 0, Region.HOST_IO: self.io_bytes}  # fmt: skip


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
class Member:
    """One file of the pack: size in bytes and lower-case hexadecimal SHA-256."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class PackManifest:
    """The contents of manifest.json. ``binaries``: name by which graphs launch -> member."""

    target: str
    tokenspeed_version: str
    models: tuple[str, ...]
    peak: Peak
    shapes: tuple[Shape, ...]
    binaries: Mapping[str, str]
    files: Mapping[str, Member]

    def with_files(self, files: Mapping[str, Member]) -> PackManifest:
        return replace(self, files=files)

    def to_bytes(self) -> bytes:
        data = {"format_version": FORMAT_VERSION, **asdict(self)}
        data["binaries"], data["files"] = dict(sorted(self.binaries.items())), dict(sorted(data["files"].items()))
        return (json.dumps(data, separators=(",", ":"), ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PackManifest:
        """Parse manifest.json. Raises ArtifactError for another format version or a malformed manifest."""
        try:
            raw = json.loads(data)
            version = raw.pop("format_version")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ArtifactError(f"{MANIFEST} of the pack is no JSON object with a format_version") from None
        if version != FORMAT_VERSION:
            raise ArtifactError(
                f"the pack has format version {version}; this TokenSpeed reads version {FORMAT_VERSION}",
                hint="make it again with this version of `tokenspeed tune pack`",
            )
        try:
            manifest = cls(
                **{
                    **raw,
                    "peak": Peak(**raw["peak"]),
                    "models": tuple(raw["models"]),
                    "shapes": tuple(_shape(shape) for shape in raw["shapes"]),
                    "files": {name: record(Member, member) for name, member in raw["files"].items()},
                }
            )
            _check(manifest)
        except (KeyError, TypeError, ValueError, AttributeError, TargetError) as e:
            raise ArtifactError(f"{MANIFEST} of the pack is malformed: {e}", hint="make the pack again") from None
        return manifest


class AnyManifest(Protocol):
    """What packs of all kinds have."""

    @property
    def binaries(self) -> Mapping[str, str]: ...

    @property
    def files(self) -> Mapping[str, Member]: ...

    def with_files(self, files: Mapping[str, Member]) -> AnyManifest: ...

    def to_bytes(self) -> bytes: ...


Contents = TypeVar("Contents", bound=AnyManifest)


def _shape(raw: Mapping[str, Any]) -> Shape:
    cases = tuple(
        record(Case, case, candidates=tuple(record(Candidate, c) for c in case["candidates"])) for case in raw["cases"]
    )
    rotation, scratch = (record(Rotation, raw[name]) for name in ("rotation", "scratch"))
    return record(Shape, raw, rotation=rotation, scratch=scratch, cases=cases)


def _check(manifest: PackManifest) -> None:
    """What the device side relies on. Raises ValueError."""
    if not Target.parse(manifest.target).is_gpu:
        raise ValueError(f"target {manifest.target} is no GPU")
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
        for graph in (shape.inputs, shape.fetch):
            if graph not in manifest.files:
                raise ValueError(f"the graph {graph} is no member")
        for case in shape.cases:
            if not case.rows or not case.repeats or case.repeats % r.copies:
                raise ValueError(f"{shape} M={case.rows} repeats {case.repeats} times over {r.copies} copies")
            for graph in (*(c.graph for c in case.candidates), *([case.before] if case.before else [])):
                if graph not in manifest.files:
                    raise ValueError(f"the graph {graph} is no member")
    for name, member in manifest.binaries.items():
        if member not in manifest.files:
            raise ValueError(f"the binary {name} is no member")


# --- the file -------------------------------------------------------------------------------------


def write_pack(path: Path, manifest: AnyManifest, members: Mapping[str, bytes]) -> str:
    """Write the pack of ``members``, whose digests go into ``manifest``; returns its identity. Equal contents give
    equal bytes. It appears whole or not at all. Raises ResourceError."""
    files = {name: Member(len(data), hashlib.sha256(data).hexdigest()) for name, data in members.items()}
    raw = manifest.with_files(files).to_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in ((MANIFEST, raw), (DIGEST, f"{digest}\n".encode()), *sorted(members.items())):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(info, data)
    write_whole(path, out.getvalue())
    return digest


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all. Raises ResourceError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as e:
        raise ResourceError(f"cannot write {path}: {e.strerror or e}", hint="choose another path with -o") from None


class PackFile(Generic[Contents]):
    """A pack opened for reading. Every member is checked as it is read; ``read`` may be called again and again."""

    def __init__(self, path: Path, parse: Callable[[bytes], Contents], made_by: str):
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # the end of a device or a pipe may never come
                raise ArtifactError(f"{path} is no file", hint=f"make a pack with `{made_by}`")
            self._zip = zipfile.ZipFile(path)
        except OSError as e:
            raise ArtifactError(f"no pack at {path}: {e.strerror or e}", hint=f"make one with `{made_by}`") from None
        except zipfile.BadZipFile as e:
            raise ArtifactError(
                f"{path} is no pack made by `{made_by}`, or a part of one: {e}", hint="copy it again"
            ) from None
        raw = self._member(MANIFEST, None)
        self.digest = hashlib.sha256(raw).hexdigest()
        if self._member(DIGEST, 65) != f"{self.digest}\n".encode():
            raise self._damaged(MANIFEST)
        self.manifest = parse(raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def read(self, name: str) -> bytes:
        """A member that the manifest lists. Raises ArtifactError if it is missing or damaged."""
        member = self.manifest.files[name]
        data = self._member(name, member.nbytes)
        if hashlib.sha256(data).hexdigest() != member.sha256:
            raise self._damaged(name)
        return data

    def read_graph(self, name: str) -> LaunchGraph:
        """The graph in a member. Raises ArtifactError."""
        try:
            return LaunchGraph.decode(self.read(name))
        except ProgramError as e:
            raise ArtifactError(f"{self.path}: {name}: {e.message}", hint="make the pack again") from None

    def read_binary(self, name: str, graph: str) -> bytes:
        """The code object that ``graph`` launches as ``name``. Raises ArtifactError if it is none of the pack."""
        member = self.manifest.binaries.get(name)
        if member is None:
            raise ArtifactError(
                f"{self.path}: {graph} needs the binary {name!r}, which is none of the pack", hint="make the pack again"
            )
        return self.read(member)

    def verify(self) -> None:
        """Read every member. Raises ArtifactError naming the first that is missing or damaged."""
        for name in sorted(self.manifest.files):
            self.read(name)

    def _member(self, name: str, nbytes: int | None) -> bytes:
        try:
            info = self._zip.getinfo(name)
            if info.file_size > _MOST_OF_A_MEMBER or (nbytes is not None and info.file_size != nbytes):
                raise self._damaged(name)
            with self._zip.open(info) as member:
                return member.read(info.file_size)  # with a number: what a header claims bounds what is unpacked
        except KeyError:
            raise ArtifactError(
                f"{self.path}: {name} is missing: this is no whole pack", hint="copy it again"
            ) from None
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError):
            raise self._damaged(name) from None

    def _damaged(self, name: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: {name} is damaged", hint="copy the pack again from where it was made")


class TuningPack(PackFile[PackManifest]):
    """A tuning pack opened for reading."""

    def __init__(self, path: Path):
        super().__init__(path, PackManifest.from_bytes, "tokenspeed tune pack")


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
