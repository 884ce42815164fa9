"""Publishing: an artifact, or another folder that is worth as much, appears at its path whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tokenspeed.artifact import DIGEST, MANIFEST, FileEntry, Location, Manifest, hash_location, tar_locations
from tokenspeed.errors import ArtifactError, ResourceError


@contextmanager
def publishing(path: Path, *, force: bool = False, archive: bool = False) -> Iterator[Path]:
    """Yield a folder to write an artifact into; on success it appears at ``path`` whole, on failure not at all.

    With ``archive`` what appears is one uncompressed tar of the folder, the same bytes every time.

    Raises:
        ArtifactError: ``path`` exists and ``force`` is false, or it is something else than an artifact.
        ResourceError: the disk is full or the folder cannot be written.
    """
    place = destination(path, force)
    temporary = place.parent / f".{place.name}.building-{os.getpid()}"
    packed = place.parent / f".{place.name}.packing-{os.getpid()}"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        if archive:
            _pack(temporary, packed)
        _sync_tree(packed if archive else temporary)
        _replace(packed if archive else temporary, place)
        _sync(place.parent)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"the disk is full while writing {path}: nothing was published",
                hint="free some space, or write the artifact elsewhere with -o",
            ) from e
        raise ResourceError(
            f"cannot write {path}: {e.strerror or e}: nothing was published", hint="choose another path with -o"
        ) from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            packed.unlink()


def destination(path: Path, force: bool) -> Path:
    """``path`` with links resolved, which is free, or an artifact that ``force`` may replace. Raises what
    ``publishing`` would: worth asking before long work."""
    try:
        place = path.resolve()
        exists = place.exists()
        replaceable = exists and _may_replace(place)
    except (OSError, ValueError, RuntimeError) as e:  # not allowed, a NUL in the name, a loop of links
        why = (isinstance(e, OSError) and e.strerror) or e
        raise ResourceError(f"cannot write {path}: {why}", hint="choose another path with -o") from None
    if exists and not force:
        raise ArtifactError(f"{path} exists already", hint="choose another path with -o, or pass --force to replace it")
    if exists and not replaceable:
        raise ArtifactError(
            f"{path} is no artifact: --force replaces only what `tokenspeed build` made",
            hint="choose another path with -o, or remove what is there yourself",
        )
    return place


def _may_replace(path: Path) -> bool:
    """Whether ``path`` is an artifact, damaged or not, or an empty folder: nothing else is ever overwritten."""
    if path.is_dir():
        return {MANIFEST, DIGEST} <= {p.name for p in path.iterdir()} or not any(path.iterdir())
    try:
        return path.is_file() and {MANIFEST, DIGEST} <= tar_locations(path).keys()
    except ArtifactError:
        return False


def seal(folder: Path, manifest: Manifest) -> str:
    """Hash every file under ``folder`` into ``manifest``, write it with its DIGEST; returns the artifact's digest."""
    files = {}
    for p in sorted(q for q in folder.rglob("*") if q.is_file()):
        size = p.stat().st_size
        files[p.relative_to(folder).as_posix()] = FileEntry(size, hash_location(Location(p, 0, size)))
    raw = Manifest(**{**manifest.__dict__, "files": files}).to_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    (folder / MANIFEST).write_bytes(raw)
    (folder / DIGEST).write_text(digest + "\n")
    return digest


def _pack(folder: Path, path: Path) -> None:
    import tarfile

    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for p in sorted(q for q in folder.rglob("*") if q.is_file()):
            info = tarfile.TarInfo(p.relative_to(folder).as_posix())
            info.size, info.mode = p.stat().st_size, 0o644
            with p.open("rb") as f:
                tar.addfile(info, f)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(root: Path) -> None:
    for p in sorted(root.rglob("*")) if root.is_dir() else ():
        _sync(p)
    _sync(root)


def _replace(new: Path, path: Path) -> None:
    """Put ``new`` at ``path``; what was there, if anything, is kept until the new one is in place."""
    if not path.exists():
        new.rename(path)
        return
    old = path.parent / f".{path.name}.replaced-{os.getpid()}"
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:  # Ctrl-C as well
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()
