"""Bitwise equivalence classes: which choices of a kernel were shown to give the same bits, and where that is recorded.

A *member* is one choice of how an op is computed, by all that its sums depend on: tile shape, warps, operand order. A
*class* is a set of members of one op that gave equal bits on every probe, on a device of the architecture, alone and in
company (docs/equivalence.md). kernels/tuning/<arch>.classes.json holds the classes of an architecture.

Kernels of solution ``aok`` serve a request with members of one class only. What a class proves, it proves of the source
that was compiled and of the compiler: with another of either it counts for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tokenspeed.errors import ArtifactError
from tokenspeed.json_check import record
from tokenspeed.target import Target

if TYPE_CHECKING:
    from tokenspeed.kernels.registry import Request, Stage

TUNING_FOLDER = Path(__file__).resolve().parent / "tuning"
FORMAT_VERSION = 1
"""Of the files. History: 1 (2026-11-30)."""

MemberJson: TypeAlias = Mapping[str, int | float | bool | str]
Key: TypeAlias = tuple[str, str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True)
class ProvenClass:
    """One class, and the proof of it.

    Attributes:
        op, dtype: what its members compute.
        key: the sizes that it is for, by name; other sizes do not enter the order of a sum.
        members: what gave equal bits.
        outside: members that were compared too, each with why it is not in the class.
        shapes: the shapes on which they were compared.
        probes: the kinds of data, with their seed (tokenspeed/compile/probes.py).
        rows: results compared, of every member.
        functions: the kernels' entry points, ``module.function``.
        source: digest of the source that these reach.
        compiler: what compiled them.
        device, driver, date: where and when.
    """

    op: str
    dtype: str
    key: Mapping[str, int]
    members: tuple[MemberJson, ...]
    outside: tuple[tuple[MemberJson, str], ...]
    shapes: tuple[str, ...]
    probes: Mapping[str, Any]
    rows: int
    functions: tuple[str, ...]
    source: str
    compiler: str
    device: str
    driver: str
    date: str

    def has(self, member: MemberJson) -> bool:
        return any(member == other for other in self.members)

    @property
    def identity(self) -> Key:
        return class_key(self.op, self.dtype, self.key)

    def to_json(self) -> dict[str, Any]:
        outside = [{"member": dict(member), "reason": reason} for member, reason in self.outside]
        return {**asdict(self), "members": [dict(member) for member in self.members], "outside": outside}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ProvenClass:
        """Raises KeyError, TypeError or ValueError for anything but what ``to_json`` makes."""
        proven = record(
            cls,
            raw,
            members=tuple(dict(member) for member in raw["members"]),
            outside=tuple((dict(entry["member"]), str(entry["reason"])) for entry in raw["outside"]),
            shapes=tuple(raw["shapes"]),
            functions=tuple(raw["functions"]),
        )
        if not proven.members or not all(type(n) is int for n in proven.key.values()):
            raise ValueError(f"the class of {proven.op} {proven.dtype} has no members, or its key no whole numbers")
        return proven


@dataclass(frozen=True)
class Choice:
    """How ``aok`` serves a request: the class, the members used, and those that would be used otherwise but are not in
    the class."""

    proven: ProvenClass
    members: tuple[MemberJson, ...]
    instead_of: tuple[MemberJson, ...]
    stages: tuple[Stage, ...]


class ClassProof(Protocol):
    """How a kernel of solution ``aok`` keeps to a proven class: there is one for every op of a GPU that sums."""

    def choose(self, request: Request) -> Choice:
        """What serves ``request``. Raises LookupError, saying why, where no class allows anything."""


def class_key(op: str, dtype: str, key: Mapping[str, int]) -> Key:
    return op, dtype, tuple(sorted(key.items()))


def classes_path(target: Target, folder: Path | None = None) -> Path:
    return (TUNING_FOLDER if folder is None else folder) / f"{target.arch}.classes.json"


def read_classes(target: Target, folder: Path | None = None) -> dict[Key, ProvenClass]:
    """The classes of a target's architecture; none where nothing was proven. Raises ArtifactError for a bad file."""
    path = classes_path(target, folder)
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_bytes())
        if raw["format_version"] != FORMAT_VERSION:
            raise ValueError(f"it is not of format version {FORMAT_VERSION}")
        found = [ProvenClass.from_json(entry) for entry in raw["classes"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ArtifactError(f"{path} holds no classes: {e}", hint="restore it, or remove it and prove anew") from None
    return {proven.identity: proven for proven in found}


def classes_text(classes: Iterable[ProvenClass]) -> str:
    """The file of ``classes``, one a line, in the order of their keys."""
    lines = ",\n".join(f"  {json.dumps(c.to_json())}" for c in sorted(classes, key=lambda c: c.identity))
    return f'{{"format_version": {FORMAT_VERSION}, "classes": [\n{lines}\n]}}\n'


@cache
def known_classes(arch: str, backend: str) -> Mapping[Key, ProvenClass]:
    """``read_classes`` of this installation, read once."""
    return read_classes(Target(backend, arch))


def find_class(target: Target, op: str, dtype: str, key: Mapping[str, int]) -> ProvenClass:
    """The class of an op. Raises LookupError where none was proven."""
    proven = known_classes(target.arch, target.backend).get(class_key(op, dtype, key))
    if proven is None:
        sizes = "".join(f", {name} {size}" for name, size in sorted(key.items()))
        raise LookupError(
            f"need kernels proven bitwise equal on {target} for {op} in {dtype}{sizes}, have no such proof: run"
            " `tokenspeed prove` on a machine with that device (docs/equivalence.md)"
        )
    return proven
