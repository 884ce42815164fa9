"""The artifact: everything that `serve` needs, as files with digests; published whole or not at all.

Layout (``artifacts/README.md`` explains every part):

    manifest.json                 what is inside, for which targets, with the digest of every other file
    DIGEST                        SHA-256 of manifest.json: the artifact's identity
    graphs/<target>/<bucket>.tslg LaunchGraphs
    graphs/<target>/ceiling-*.tslg what measures a GPU
    graphs/<target>/prelude.tslg  what runs once, before the first step
    graphs/<target>/values.json   where the values of a step lie: for those who look into one
    kernels/<target>/             GPU code objects (.cubin, .hsaco) that the graphs launch
    weights/<layouts>.safetensors weights in the layouts that the chosen kernels read
    tokenizer/                    tokenizer.json and config.json
    selection.json                why each kernel was selected
    program.json                  the whole-model IR that the graphs were lowered from

An artifact is a directory, or the same files in one uncompressed ``.tar``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed import json_check
from tokenspeed.bucket import Bucket, BucketKind
from tokenspeed.envelope import Envelope
from tokenspeed.errors import ArtifactError, EnvelopeError, TargetError
from tokenspeed.json_check import record
from tokenspeed.step import IO, STATE, IoTensor, PlacedTensor
from tokenspeed.target import Target

FORMAT_VERSION = 3
"""History: 3 (2026-11-30) values.json per target; the tree of numerics switches in the envelope; a prelude per target,
where there is one. 2 (2026-11-29) GPU targets: binaries, ceilings; step_sizes in region io; adjustments of logits:
inputs, token_counts in region state, penalties in the envelope. 1 (2026-11-29) CPU targets: graphs, packed weights,
tokenizer, selection, program."""

NATIVE_LIBRARY = "native"
"""Library of the CPU kernels' symbols; its ABI number is that of the C++ module."""
DEVICE_LIBRARY = "device"
"""What the symbols of GPU graphs belong to: the binaries of the artifact itself."""
DEVICE_ABI = 2
"""What GPU kernels and runtime agree on beside their parameters: the io tensors and their meaning, the layout of KV
pages, how step sizes reach a kernel. History: 2 (2026-11-29) a graph itself takes its inputs from region host_io and
writes its outputs there. 1 (2026-11-29)."""

MANIFEST = "manifest.json"
DIGEST = "DIGEST"
VERIFY_LEVELS = ("structure", "quick", "full")
"""structure: the manifest's own digest, every file present with its size; quick (what serving does): also the
digest of every file but weights, and but what only other targets use; full: also the digest of the weights, and
nothing that the manifest does not list."""

_CHUNK = 1 << 22


@dataclass(frozen=True)
class FileEntry:
    """One file of the artifact: size in bytes and lower-case hexadecimal SHA-256."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class BucketEntry:
    """One padded shape and the file of its LaunchGraph."""

    bucket: Bucket
    graph: str


@dataclass(frozen=True)
class BinaryEntry:
    """One GPU code object: the name by which graphs launch from it, and its file."""

    name: str
    file: str


@dataclass(frozen=True)
class CeilingEntry:
    """A LaunchGraph that measures a GPU: ``kind`` (read, matmul), its file, the ``work`` of each of its nodes (bytes
    read, floating-point operations), and the tokens of the step in which it runs."""

    kind: str
    graph: str
    work: int
    num_tokens: int


@dataclass(frozen=True)
class PreludeEntry:
    """A LaunchGraph that runs once, before the first step, and the ``tables`` that it fills: in region state, behind
    what every artifact has there, each at a multiple of ALIGNMENT."""

    graph: str
    tables: tuple[PlacedTensor, ...]


@dataclass(frozen=True)
class StepCost:
    """What a step must do at least, for ceilings: bytes of weights read once a step, floating-point operations
    (a multiply-add is two) of the projections per token, and of the LM head per logit row."""

    weight_bytes: int
    flops_per_token: int
    flops_per_logit_row: int


@dataclass(frozen=True)
class TargetSection:
    """What the loader needs for one target. Sizes in bytes; ``kv_page_bytes`` covers all layers of one page."""

    target: str
    kernel_library: str
    kernel_abi: int
    weights: str
    weights_offset: int
    weights_bytes: int
    arena_bytes: int
    kv_page_bytes: int
    io_bytes: int
    io: tuple[PlacedTensor, ...]
    state_bytes: int
    state: tuple[PlacedTensor, ...]
    binaries: tuple[BinaryEntry, ...]
    buckets: tuple[BucketEntry, ...]
    cost: StepCost
    values: str
    ceilings: tuple[CeilingEntry, ...] = ()
    prelude: PreludeEntry | None = None

    @property
    def graphs(self) -> tuple[str, ...]:
        """Files of all its LaunchGraphs."""
        prelude = () if self.prelude is None else (self.prelude.graph,)
        return (*(entry.graph for entry in self.buckets), *(entry.graph for entry in self.ceilings), *prelude)


@dataclass(frozen=True)
class ModelSection:
    """Facts of the model that a server or a scheduler asks for, and where they came from."""

    name: str
    architecture: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    checkpoint_kind: str
    checkpoint_sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json."""

    format_version: int
    tokenspeed_version: str
    model: ModelSection
    envelope: Envelope
    targets: tuple[TargetSection, ...]
    files: Mapping[str, FileEntry] = field(default_factory=dict)

    def section(self, target: Target) -> TargetSection:
        for section in self.targets:
            if section.target == str(target):
                return section
        raise ArtifactError(
            f"the artifact holds no target {target}: it was built for {', '.join(s.target for s in self.targets)}",
            hint=f"rebuild it with `tokenspeed build --target {target}`",
        )

    def to_bytes(self) -> bytes:
        data = {
            "format_version": self.format_version,
            "tokenspeed_version": self.tokenspeed_version,
            "model": asdict(self.model),
            "envelope": self.envelope.to_json(),
            "targets": [asdict(t) for t in self.targets],
            "files": {name: asdict(self.files[name]) for name in sorted(self.files)},
        }
        return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse manifest.json. Raises ArtifactError for another format version or a malformed manifest."""
        try:
            raw = json_check.parse(data)
            version = raw["format_version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ArtifactError(
                "manifest.json is not a manifest: it is no JSON object with a format_version",
                hint="copy the artifact again, or rebuild it",
            ) from None
        if version != FORMAT_VERSION:
            raise ArtifactError(
                f"the artifact has format version {version}; this TokenSpeed reads version {FORMAT_VERSION}",
                hint="rebuild the artifact with this version of `tokenspeed build`",
            )
        try:
            json_check.check(raw, {"tokenspeed_version": str, "targets": list})
            return cls(
                format_version=version,
                tokenspeed_version=raw["tokenspeed_version"],
                model=record(ModelSection, raw["model"]),
                envelope=Envelope.from_json(raw["envelope"]),
                targets=tuple(_target_section(t) for t in raw["targets"]),
                files={name: record(FileEntry, entry) for name, entry in raw["files"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, EnvelopeError, TargetError) as e:
            raise ArtifactError(f"manifest.json is malformed: {e}", hint="rebuild the artifact") from None


def _target_section(raw: dict[str, Any]) -> TargetSection:
    section = record(
        TargetSection,
        raw,
        io=_placed(raw["io"], raw["io_bytes"], IO),
        state=_placed(raw["state"], raw["state_bytes"], STATE),
        binaries=tuple(record(BinaryEntry, e) for e in raw["binaries"]),
        buckets=tuple(
            BucketEntry(record(Bucket, e["bucket"], kind=BucketKind(e["bucket"]["kind"])), str(e["graph"]))
            for e in raw["buckets"]
        ),
        cost=record(StepCost, raw["cost"]),
        ceilings=tuple(record(CeilingEntry, e) for e in raw["ceilings"]),
        prelude=None if raw.get("prelude") is None else _prelude(raw["prelude"], raw["state_bytes"]),
    )
    if str(Target.parse(section.target)) != section.target:
        raise ValueError(f"target is {section.target!r}")
    for name in ("weights_bytes", "arena_bytes", "kv_page_bytes", "io_bytes", "state_bytes"):
        if not getattr(section, name):
            raise ValueError(f"{name} is 0")
    return section


def _prelude(raw: Any, state_bytes: int) -> PreludeEntry:
    tables = tuple(record(PlacedTensor, t, shape=tuple(t["shape"])) for t in raw["tables"])
    _check_inside(tables, state_bytes)
    return record(PreludeEntry, raw, tables=tables)


def _placed(raw: Any, region_bytes: int, needed: Sequence[IoTensor]) -> tuple[PlacedTensor, ...]:
    """Tensors of a region, exactly those ``needed``, each inside the region."""
    placed = tuple(record(PlacedTensor, t, shape=tuple(t["shape"])) for t in raw)
    if [(t.name, t.dtype) for t in placed] != [(t.name, t.dtype) for t in needed]:
        raise ValueError(f"the tensors of a region are {', '.join(t.name for t in placed) or 'none'}")
    _check_inside(placed, region_bytes)
    return placed


def _check_inside(placed: Sequence[PlacedTensor], region_bytes: int) -> None:
    for t in placed:
        if not all(type(n) is int and n > 0 for n in t.shape) or t.offset + t.nbytes > region_bytes:
            raise ValueError(f"the tensor {t.name} does not lie inside its region")


@dataclass(frozen=True)
class Location:
    """Where the bytes of one artifact file lie: a path, an offset into it, a size."""

    path: Path
    offset: int
    bytes: int


class Artifact:
    """An artifact opened for reading: a directory or an uncompressed tar file."""

    def __init__(self, path: Path, locations: Mapping[str, Location]):
        self.path = path
        self._locations = locations
        raw = self.read(MANIFEST)
        recorded = self.read(DIGEST).decode("ascii", "replace")
        self.digest = hashlib.sha256(raw).hexdigest()
        if recorded != f"{self.digest}\n":
            raise ArtifactError(
                f"{path}: manifest.json is damaged: its SHA-256 is {self.digest[:16]}...,"
                f" DIGEST says {recorded[:16]}...",
                hint="copy the artifact again from where it was built, or rebuild it",
            )
        self.manifest = Manifest.from_bytes(raw)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Artifact:
        """Open the artifact at ``path``. Raises ArtifactError if there is none, or if its manifest is damaged."""
        path = Path(path)
        if (path / MANIFEST).is_file():  # before walking what may be a home directory
            return cls(path, dict(_folder_locations(path)))
        if path.is_file():
            return cls(path, tar_locations(path))
        if path.is_dir():
            raise ArtifactError(
                f"{path}: the file {MANIFEST} is missing: this folder is no artifact, or a part of one",
                hint="check the path, or build one with `tokenspeed build CHECKPOINT -o PATH`",
            )
        raise ArtifactError(
            f"no artifact at {path}: need a directory or a .tar file made by `tokenspeed build`",
            hint="check the path, or build one with `tokenspeed build CHECKPOINT -o PATH`",
        )

    def locate(self, name: str) -> Location:
        """Where the file ``name`` lies. Raises ArtifactError if it is missing."""
        try:
            return self._locations[name]
        except KeyError:
            raise ArtifactError(
                f"{self.path}: the file {name} is missing", hint="copy the artifact again, or rebuild it"
            ) from None

    def read(self, name: str) -> bytes:
        """The whole file ``name``."""
        at = self.locate(name)
        try:
            with at.path.open("rb") as f:
                f.seek(at.offset)
                return f.read(at.bytes)
        except OSError as e:
            raise ArtifactError(f"{self.path}: cannot read {name}: {e.strerror}") from None

    def read_json(self, name: str, shape: Any) -> Any:
        """The contents of the JSON file ``name``, its digest checked, and that it is of ``shape`` (json_check.py).

        Raises ArtifactError.
        """
        data, entry = self.read(name), self.manifest.files.get(name)
        if entry is None or hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ArtifactError(
                f"{self.path}: {name} is damaged: its SHA-256 is not the manifest's",
                hint="copy the artifact again from where it was built, or rebuild it",
            )
        try:
            value = json_check.parse(data)
        except (ValueError, RecursionError) as e:
            raise ArtifactError(f"{self.path}: {name} is not JSON: {e}", hint="rebuild the artifact") from None
        try:
            json_check.check(value, shape)
        except ValueError as e:
            raise ArtifactError(f"{self.path}: {name} is malformed: {e}", hint="rebuild the artifact") from None
        return value

    def verify(self, level: str = "full", *, target: str | None = None) -> int:
        """Check the files against the manifest at ``level`` (one of VERIFY_LEVELS); returns the bytes hashed.

        With ``target``, level quick leaves out graphs and kernels that only other targets use.

        Raises ArtifactError naming the first file that is missing, resized, damaged or unlisted.
        """
        hashed = 0
        unused = set() if target is None else self._used_by(target, others=True) - self._used_by(target, others=False)
        for name, entry in sorted(self.manifest.files.items()):
            at = self.locate(name)
            if at.bytes != entry.bytes:
                raise ArtifactError(
                    f"{self.path}: {name} has {at.bytes} bytes; the manifest says {entry.bytes}",
                    hint="the copy was cut short: copy the artifact again, or rebuild it",
                )
            if level == "full" or (level == "quick" and not name.startswith("weights/") and name not in unused):
                digest = hash_location(at)
                hashed += at.bytes
                if digest != entry.sha256:
                    raise ArtifactError(
                        f"{self.path}: {name} is damaged: its SHA-256 is {digest[:16]}..., the manifest says"
                        f" {entry.sha256[:16]}...",
                        hint="copy the artifact again from where it was built, or rebuild it",
                    )
        if level == "full":
            unlisted = sorted(set(self._locations) - set(self.manifest.files) - {MANIFEST, DIGEST})
            if unlisted:
                raise ArtifactError(
                    f"{self.path}: {', '.join(unlisted[:3])} is not listed in the manifest",
                    hint="remove what does not belong to the artifact, or rebuild it",
                )
        return hashed

    def _used_by(self, target: str, *, others: bool) -> set[str]:
        """Graphs and kernels of a target, or of all other ones."""
        sections = [s for s in self.manifest.targets if (s.target != target) is others]
        return {graph for s in sections for graph in s.graphs} | {b.file for s in sections for b in s.binaries}


def _folder_locations(path: Path, prefix: str = "") -> Iterator[tuple[str, Location]]:
    """Every file under ``path`` by its name, with ``prefix``. Links to folders are not followed."""
    with os.scandir(path) as entries:  # a start waits for this: pathlib takes five times as long
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _folder_locations(path / entry.name, f"{prefix}{entry.name}/")
            elif entry.is_file():
                yield prefix + entry.name, Location(path / entry.name, 0, entry.stat().st_size)


def tar_locations(path: Path) -> dict[str, Location]:
    import tarfile  # only for archives: a directory, the usual case, does without the import

    try:
        with tarfile.open(path, "r:") as tar:
            return {m.name: Location(path, m.offset_data, m.size) for m in tar.getmembers() if m.isreg()}
    except (tarfile.TarError, OSError) as e:
        raise ArtifactError(f"{path} is no artifact: need a directory or an uncompressed .tar file ({e})") from None


def hash_location(at: Location) -> str:
    digest, left = hashlib.sha256(), at.bytes
    with at.path.open("rb") as f:
        f.seek(at.offset)
        while left and (chunk := f.read(min(_CHUNK, left))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def choose_target(manifest: Manifest, runnable: Sequence[Target], wanted: Target | None = None) -> TargetSection:
    """The section to run: ``wanted``, or the best that this machine runs.

    Raises ArtifactError saying what the artifact holds and what this machine runs.
    """
    if wanted is not None:
        if wanted not in runnable:
            raise ArtifactError(
                f"this machine cannot run {wanted}: it runs {_names(runnable)}",
                hint="see `tokenspeed doctor` for what it runs, and why not more",
            )
        return manifest.section(wanted)
    built = {section.target: section for section in manifest.targets}
    for target in reversed(runnable):
        if str(target) in built:
            return built[str(target)]
    rebuild = f"rebuild it with `tokenspeed build --target {runnable[-1] if runnable else 'cpu:x86-64-v3'}`"
    no_gpu = any(Target.parse(name).is_gpu for name in built) and not any(target.is_gpu for target in runnable)
    raise ArtifactError(
        f"the artifact was built for {', '.join(built)}; this machine runs {_names(runnable)}",
        hint=f"{rebuild}, or see `tokenspeed doctor` for why it finds no GPU" if no_gpu else rebuild,
    )


def _names(targets: Sequence[Target]) -> str:
    return ", ".join(map(str, targets)) or "no target"
