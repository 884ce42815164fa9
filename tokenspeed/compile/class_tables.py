"""The files of ``tokenspeed prove``: kernels/tuning/<arch>.classes.json, from what was compared on devices.

Builds read them wherever they run (kernels/equivalence.py); docs/equivalence.md says what a class claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed import json_check
from tokenspeed.compile.cpu_proofs import staleness as cpu_staleness
from tokenspeed.compile.run_results import read_run
from tokenspeed.kernels.equivalence import (
    MemberJson,
    ProvenClass,
    class_key,
    classes_path,
    classes_text,
    known_classes,
    read_classes,
)
from tokenspeed.pack_file import write_whole
from tokenspeed.proof_pack import FORMAT_VERSION as RESULTS_VERSION
from tokenspeed.proof_pack import RESULTS_KIND
from tokenspeed.target import Target

_CASE = {"op": str, "dtype": str, "key": {...: int}, "shape": str, "rows": int, "functions": [str], "source": str,
         "digest": str, "classes": [[dict]], "excluded": [{"member": dict, "reason": str}]}  # fmt: skip
_RESULTS = {"compiler": str, "probes": dict, "driver": str, "cases": [_CASE]}


@dataclass(frozen=True)
class Merged:
    """What became of the file of ``target`` at ``path``: classes added and replaced, how many it has now, and a line
    for each op whose members were not all equal."""

    target: str
    path: Path
    added: int
    replaced: int
    total: int
    split: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path), "split": list(self.split)}


def merge(sources: Sequence[Path], folder: Path | None = None) -> tuple[Merged, ...]:
    """Put the classes found in ``sources`` into the files of ``folder`` (default: those of this installation).

    A proof replaces that of the same op, dtype and key; the source named last counts. Nothing is written unless all
    sources are good.

    Raises ArtifactError for a file that is no result, or a class file that cannot be read.
    """
    files: dict[Target, dict[Any, ProvenClass]] = {}
    counts: dict[Target, tuple[set[Any], set[Any], list[str]]] = {}
    for source in sources:
        target, found = read_results(source)
        table = files.setdefault(target, dict(read_classes(target, folder)))
        added, replaced, split = counts.setdefault(target, (set(), set(), []))
        for proven in found:
            (replaced if proven.identity in table and proven.identity not in added else added).add(proven.identity)
            table[proven.identity] = proven
            split += [f"{proven.op} {proven.dtype}: {member}: {reason}" for member, reason in proven.outside]
    merged = []
    for target, table in files.items():
        path, (added, replaced, split) = classes_path(target, folder), counts[target]
        write_whole(path, classes_text(table.values()).encode())
        merged.append(Merged(str(target), path, len(added), len(replaced), len(table), tuple(split)))
    known_classes.cache_clear()
    return tuple(merged)


def merge_classes(target: Target, found: Iterable[ProvenClass], folder: Path | None = None) -> Merged:
    """Put classes that were proven on this machine into the file of their target. Raises ArtifactError."""
    table, counts = dict(read_classes(target, folder)), {True: 0, False: 0}
    for proven in found:
        counts[proven.identity in table] += 1
        table[proven.identity] = proven
    path = classes_path(target, folder)
    write_whole(path, classes_text(table.values()).encode())
    known_classes.cache_clear()
    return Merged(str(target), path, counts[False], counts[True], len(table), ())


def read_results(path: Path) -> tuple[Target, list[ProvenClass]]:
    """(target, the class of every op, dtype and key) of a run. Raises ArtifactError."""
    return read_run(path, "tokenspeed prove run", RESULTS_KIND, RESULTS_VERSION, _classes)


def _classes(raw: Mapping[str, Any], _: Target) -> list[ProvenClass]:
    json_check.check(raw, _RESULTS)
    cases: dict[Any, list[Mapping[str, Any]]] = {}
    for case in raw["cases"]:
        if case["rows"] < 1 or not case["functions"]:
            raise ValueError(f"its case {case['op']} {case['shape']} compared nothing")
        cases.setdefault(class_key(case["op"], case["dtype"], case["key"]), []).append(case)
    found = [proven for group in cases.values() if (proven := proven_class(group, raw)) is not None]
    return [ProvenClass.from_json(proven.to_json()) for proven in found]  # what is written can be read again


def proven_class(cases: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> ProvenClass | None:
    """The class that all shapes of one op, dtype and key allow: members that were together with the most others in
    every one of them. None if no members were."""
    groups = _common([case["classes"] for case in cases])
    if not groups:
        return None
    members = groups[0]
    first = cases[0]
    if any(case["source"] != first["source"] or case["functions"] != first["functions"] for case in cases):
        raise ValueError(f"the cases of {first['op']} {first['dtype']} are of different sources")
    outside: list[tuple[MemberJson, str]] = []
    for case in cases:
        others = [m for group in case["classes"] for m in group if m not in members]
        reasons = [(entry["member"], f"{case['shape']}: {entry['reason']}") for entry in case["excluded"]]
        reasons += [(m, f"{case['shape']}: other bits than those of the class") for m in others]
        outside += [(m, reason) for m, reason in reasons if all(m != known for known, _ in outside)]
    return ProvenClass(
        op=first["op"], dtype=first["dtype"], key=first["key"], members=tuple(members), outside=tuple(outside),
        shapes=tuple(case["shape"] for case in cases), probes=run["probes"], rows=sum(case["rows"] for case in cases),
        functions=tuple(first["functions"]), source=first["source"], compiler=run["compiler"], device=run["device"],
        driver=run["driver"], date=run["date"],
    )  # fmt: skip


def _common(partitions: Iterable[Sequence[Sequence[MemberJson]]]) -> list[list[MemberJson]]:
    """The groups of members that are together in every partition, largest first, each in the order of the first."""
    common: list[list[MemberJson]] | None = None
    for groups in partitions:
        if common is None:
            common = [list(group) for group in groups]
        else:
            parts = ([m for m in mine if m in theirs] for mine in common for theirs in groups)
            common = [part for part in parts if part]
    return sorted(common or [], key=lambda group: -len(group))


def shown(target: Target, folder: Path | None = None) -> list[tuple[ProvenClass, str]]:
    """The classes of a target, each with whether builds may use it."""
    return [(proven, _state(target, proven)) for _, proven in sorted(read_classes(target, folder).items())]


def _state(target: Target, proven: ProvenClass) -> str:
    if not target.is_gpu:
        return cpu_staleness(proven) or "in force"
    from tokenspeed.kernels.triton.proofs import staleness  # Triton: only who shows GPU classes needs it

    return staleness(proven) or "in force"
