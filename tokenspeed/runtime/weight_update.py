"""New weights for a running engine: which files are taken, and what waits while they are.

A file of weights has the names, types, shapes and offsets of the artifact's own ``weights/*.safetensors``: only values
may differ, for kernels read them where the build placed them. docs/weights.md has the whole story.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from tokenspeed.artifact import Artifact, TargetSection
from tokenspeed.errors import ArtifactError, UsageError, WeightsError
from tokenspeed.tensor_file import TensorEntry, TensorIndex, open_at_once, read_index

UNKNOWN_VERSION = "unknown"
"""Of weights after an update that ended half-way: no request runs until another has gone well."""
MAX_VERSION_CHARACTERS = 200


class When(StrEnum):
    """What an update does with the requests that were submitted before it.

    DRAIN: all of them end first, under the old weights; those that come later wait, and run under the new ones.
    PREEMPT: those that run are pushed back and go on under the new weights, which compute all their tokens again;
        tokens that were drawn stay. Those that wait go on waiting.
    ABORT: those that run end with finish_reason 'abort'. Those that wait go on waiting.
    """

    DRAIN = "drain"
    PREEMPT = "preempt"
    ABORT = "abort"


@dataclass(frozen=True)
class WeightsFile:
    """A file that fits: its data, ``nbytes`` from ``offset`` on, is region weights. It is kept open, so that a file
    which takes its name meanwhile is not read in its place."""

    path: Path
    offset: int
    nbytes: int
    _file: BinaryIO = field(repr=False)

    @property
    def open_path(self) -> str:
        """A path to the open file, whatever has its name now."""
        return f"/proc/self/fd/{self._file.fileno()}"

    def close(self) -> None:
        self._file.close()


@dataclass(eq=False)
class WeightUpdate:
    """One update on its way through the engine. ``finish`` is called once."""

    file: WeightsFile
    version: str
    when: When
    asked: float  # seconds of time.monotonic
    result: dict[str, Any] = field(default_factory=dict)
    _done: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        self.file.close()
        self._error = error
        self._done.set()

    def succeeded(self, seconds: float, waited: float) -> None:
        """Before ``finish``: what ``wait`` returns."""
        self.result.update(version=self.version, bytes=self.file.nbytes, seconds=seconds, wait_seconds=waited)

    def wait(self) -> dict[str, Any]:
        """Block until it is finished. Raises its error."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self.result


@dataclass
class WeightCounters:
    """Of an engine: updates that went well, and the seconds that these kept steps from running."""

    updates: int = 0
    seconds: float = 0.0
    started: int = 0  # updates that were asked for: part of versions nobody named

    def add(self, seconds: float) -> None:
        self.updates += 1
        self.seconds += seconds


def parse_when(text: str) -> When:
    try:
        return When(text)
    except ValueError:
        raise UsageError(f"when is {text!r}; it must be one of {', '.join(When)}") from None


def check_version(version: str) -> None:
    """Raises UsageError for one that no header of a reply could carry."""
    if not version or len(version) > MAX_VERSION_CHARACTERS or not (version.isascii() and version.isprintable()):
        raise UsageError(
            f"a version of weights is 1 to {MAX_VERSION_CHARACTERS} printable ASCII characters, not {version[:50]!r}"
        )
    if version == UNKNOWN_VERSION:
        raise UsageError(f"{version!r} is no version: it is what weights have after an update that ended half-way")


def check_file(artifact: Artifact, section: TargetSection, path: str | os.PathLike[str]) -> WeightsFile:
    """The weights of the file at ``path``, if it fits the artifact's section.

    Raises:
        WeightsError: it cannot be read, or its header is not that of the artifact's weights; says the first difference.
        ArtifactError: the artifact's own file is gone.
    """
    path = Path(path)
    try:
        file = open(path, "rb", opener=open_at_once)  # noqa: SIM115 (the update closes it)
    except OSError as e:
        raise WeightsError(f"cannot read the weights {path}: {e.strerror}", param="path") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise WeightsError(f"cannot read the weights {path}: it is no ordinary file", param="path")
    found = WeightsFile(path, 0, section.weights_bytes, file)
    try:
        return replace(found, offset=_check_index(artifact, section, found))
    except BaseException:
        found.close()
        raise


def _check_index(artifact: Artifact, section: TargetSection, file: WeightsFile) -> int:
    """Where the data of a file that fits begins. Raises what ``check_file`` does."""
    path = file.path
    try:
        index = read_index(file.open_path)
    except OSError as e:
        raise WeightsError(f"cannot read the weights {path}: {e.strerror}", param="path") from None
    except ValueError as e:
        raise WeightsError(f"the weights {path} are damaged: {e}", param="path", hint=_HINT) from None
    own = _own_index(artifact, section)
    if (difference := _first_difference(own, index)) is not None:
        raise WeightsError(f"the weights {path} are not for this artifact: {difference}", param="path", hint=_HINT)
    if index.data_bytes != section.weights_bytes:
        raise WeightsError(
            f"the weights {path} are not for this artifact: need {section.weights_bytes} bytes behind the header, have"
            f" {index.data_bytes}",
            param="path",
            hint=_HINT,
        )
    return index.data_offset


_HINT = "pack them for this artifact: see docs/weights.md"


def _own_index(artifact: Artifact, section: TargetSection) -> TensorIndex:
    at = artifact.locate(section.weights)
    try:
        return read_index(at.path, offset=at.offset, nbytes=at.bytes)
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise ArtifactError(f"{artifact.path}: cannot read {section.weights}: {reason}") from None


def _first_difference(own: TensorIndex, other: TensorIndex) -> str | None:
    for name, entry in _by_offset(own):
        found = other.entries.get(name)
        if found is None:
            return f"tensor {name} is missing"
        if found != entry:
            return f"tensor {name}: need {_text(entry)}, have {_text(found)}"
    for name, _ in _by_offset(other):
        if name not in own.entries:
            return f"tensor {name} is none of the artifact's"
    return None


def _by_offset(index: TensorIndex) -> Iterator[tuple[str, TensorEntry]]:
    items: Iterable[tuple[str, TensorEntry]] = index.entries.items()
    yield from sorted(items, key=lambda item: (item[1].offset, item[0]))


def _text(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)} at {entry.offset}"
