"""Packs: kernels and LaunchGraphs that are compiled on any machine and run on a GPU with the base install.

One ZIP file, so that it travels as one (``tokenspeed tune``: tuning_pack.py, ``tokenspeed prove``: proof_pack.py):

    manifest.json           what is to be run, for which target, with the digest of every other member
    DIGEST                  SHA-256 of manifest.json: the pack's identity
    graphs/<digest>.tslg    LaunchGraphs
    kernels/<name>.<suffix> GPU code objects (cubin, hsaco)

and whatever else its kind needs. A pack is untrusted input: every member is checked against the manifest before it is
used.
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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeAlias, TypeVar

from tokenspeed.errors import ArtifactError, ProgramError, ResourceError, TargetError
from tokenspeed.graph import LaunchGraph, Region
from tokenspeed.json_check import record
from tokenspeed.target import Target

MANIFEST, DIGEST = "manifest.json", "DIGEST"
STEP_SIZES_BYTES = 32
"""The sizes of the step, int32[8], are all that a pack's graphs read from region io, at its beginning."""

ConfigJson: TypeAlias = Mapping[str, int | float | bool | str]
_MOST_OF_A_MEMBER = 64 << 20  # bytes unpacked; code objects and manifests of real packs have a hundredth


@dataclass(frozen=True)
class Member:
    """One file of the pack: size in bytes and lower-case hexadecimal SHA-256."""

    nbytes: int
    sha256: str


class AnyManifest(Protocol):
    """What manifests of all kinds are: dataclasses whose fields, in their order, are the object in manifest.json.

    ``binaries``: name by which graphs launch -> member; ``files``: every member but MANIFEST and DIGEST.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    format_version: ClassVar[int]

    @property
    def target(self) -> str: ...

    @property
    def binaries(self) -> Mapping[str, str]: ...

    @property
    def files(self) -> Mapping[str, Member]: ...


Contents = TypeVar("Contents", bound=AnyManifest)


class Part(Protocol):
    """One shape of a pack, which has a device of its own: bytes of the regions that its graphs need. Errors show its
    text."""

    @property
    def weights_bytes(self) -> int: ...

    @property
    def arena_bytes(self) -> int: ...

    @property
    def io_bytes(self) -> int: ...


def region_sizes(part: Part) -> dict[Region, int]:
    """Bytes of every region of a device that runs ``part``; host_io is as large as io."""
    return {Region.WEIGHTS: part.weights_bytes, Region.KV: 0, Region.ARENA: part.arena_bytes,
            Region.IO: part.io_bytes, Region.STATE: 0, Region.HOST_IO: part.io_bytes}  # fmt: skip


# --- the manifest ---------------------------------------------------------------------------------


def manifest_bytes(manifest: AnyManifest) -> bytes:
    """manifest.json."""
    data = {"format_version": manifest.format_version, **asdict(manifest)}
    data["binaries"], data["files"] = dict(sorted(manifest.binaries.items())), dict(sorted(data["files"].items()))
    return (json.dumps(data, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


def parse_manifest(
    data: bytes, kind: str, version: int, made_by: str, parse: Callable[[Mapping[str, Any]], Contents]
) -> Contents:
    """The manifest that ``parse`` makes of manifest.json, whose members are checked.

    Args:
        parse: takes all fields but the version, ``files`` parsed. What it raises for a manifest that makes no sense
            (KeyError, TypeError, ValueError, AttributeError, TargetError) becomes an ArtifactError.

    Raises ArtifactError for another format version or a malformed manifest.
    """
    hint = f"make the pack again with `{made_by}`"
    try:
        raw = json.loads(data)
        if not isinstance(raw, dict) or "format_version" not in raw:
            raise ValueError("it is no JSON object with a format_version")
        found = raw.pop("format_version")
        if found != version:
            raise ArtifactError(
                f"need a {kind} of format version {version}, have one of version {found!r:.60}",
                hint=f"{hint}: this TokenSpeed reads no format version {found!r:.60}",
            )
        files = {name: record(Member, member) for name, member in raw["files"].items()}
        manifest = parse({**raw, "files": files})
        if not Target.parse(manifest.target).is_gpu:
            raise ValueError(f"target {manifest.target} is no GPU")
        for name, member in manifest.binaries.items():
            if member not in manifest.files:
                raise ValueError(f"the binary {name} is no member")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, TargetError) as e:
        raise ArtifactError(f"{MANIFEST} of the {kind} is malformed: {e}", hint=hint) from None
    return manifest


def check_graphs(manifest: AnyManifest, graphs: Iterable[str]) -> None:
    """Raise ValueError for the first of ``graphs`` that is no member."""
    for graph in graphs:
        if graph not in manifest.files:
            raise ValueError(f"the graph {graph} is no member")


# --- the file -------------------------------------------------------------------------------------


def write_pack(path: Path, manifest: AnyManifest, members: Mapping[str, bytes]) -> str:
    """Write the pack of ``members``, whose digests go into ``manifest``; returns its identity. Equal contents give
    equal bytes. It appears whole or not at all. Raises ResourceError."""
    files = {name: Member(len(data), hashlib.sha256(data).hexdigest()) for name, data in members.items()}
    raw = manifest_bytes(replace(manifest, files=files))
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
        self.path, self.made_by = path, made_by
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # the end of a device or a pipe may never come
                raise ArtifactError(f"{path} is no file", hint=f"make a pack with `{made_by}`")
            self._zip = zipfile.ZipFile(path)
        except OSError as e:
            raise ArtifactError(f"no pack at {path}: {e.strerror or e}", hint=f"make one with `{made_by}`") from None
        except (zipfile.BadZipFile, NotImplementedError) as e:  # the latter: of a version that nobody has yet
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
