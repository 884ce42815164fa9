"""The tables of ``tokenspeed tune``: kernels/tuning/<arch>.json, from results measured on devices.

Builds read them wherever they run (kernels/triton/linear_config.py); kernels/tuning/README.md explains the fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from tokenspeed import json_check
from tokenspeed.compile.run_results import is_date, read_run
from tokenspeed.errors import ArtifactError
from tokenspeed.kernels.triton import linear_config
from tokenspeed.kernels.triton.linear_config import FORMAT_VERSION, Config, to_json, usable
from tokenspeed.pack_file import write_whole
from tokenspeed.target import Target
from tokenspeed.tuning_pack import FORMAT_VERSION as RESULTS_VERSION
from tokenspeed.tuning_pack import RESULTS_KIND, Peak

Entry: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, int, int, int, str, str]
_CHOICE = {"us": float, "config": dict}
_ENTRY = {"op": str, "N": int, "K": int, "M": int, "dtype": str, **_CHOICE, "runner_up": _CHOICE, "device": str,
          "date": str}  # fmt: skip
_SHARE = {"share": float, "bound": str, "share_of": str}


@dataclass(frozen=True)
class Merged:
    """What became of the table of ``target`` at ``path``: entries added, replaced by later ones, and left as they
    were although a result named them, because that was measured earlier."""

    target: str
    path: Path
    added: int
    replaced: int
    kept: int
    total: int

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path)}


def merge(sources: Sequence[Path], folder: Path | None = None) -> tuple[Merged, ...]:
    """Put the results in ``sources`` into the tables of ``folder`` (default: those of this installation).

    A result replaces an entry of the same op, sizes, dtype and kind of device unless that was measured later; of one
    day, the source named last counts. Nothing is written unless all sources are good.

    Raises ArtifactError for a file that is no result, or a table that cannot be read.
    """
    tables: dict[Target, dict[str, dict[Key, Entry]]] = {}
    counts: dict[Target, dict[str, set[Key]]] = {}
    for source in sources:
        target, found = read_results(source)
        if target not in tables:
            tables[target] = _index(read_table(target, folder))
            counts[target] = {"added": set(), "replaced": set(), "kept": set()}
        for family, entry in found:
            table, key = tables[target].setdefault(family, {}), _key(entry)
            old = table.get(key)
            if old is not None and old["date"] > entry["date"]:
                counts[target]["kept"].add(key)
                continue
            if old is None:
                counts[target]["added"].add(key)
            elif key not in counts[target]["added"]:
                counts[target]["replaced"].add(key)
            table[key] = entry
    merged = []
    for target, table_of in tables.items():
        path, numbers = table_path(target, folder), {name: len(keys) for name, keys in counts[target].items()}
        write_whole(path, table_text(table_of).encode())
        merged.append(Merged(str(target), path, total=sum(map(len, table_of.values())), **numbers))
    return tuple(merged)


def table_path(target: Target, folder: Path | None = None) -> Path:
    return (linear_config.TUNING_FOLDER if folder is None else folder) / f"{target.arch}.json"


def read_table(target: Target, folder: Path | None = None) -> dict[str, list[Entry]]:
    """The entries of a target's table by family; none where there is no table. Raises ArtifactError."""
    path = table_path(target, folder)
    if not path.is_file():
        return {}
    try:
        table = json_check.parse(path.read_bytes())
        json_check.check(table, {"format_version": int})
        if table.pop("format_version") != FORMAT_VERSION:
            raise ValueError(f"it is not of format version {FORMAT_VERSION}")
        json_check.check(table, {...: [_ENTRY]})
        for entry in (entry for entries in table.values() for entry in entries):
            if "share" in entry:
                json_check.check(entry, _SHARE)
            _config(entry["config"], target, entry["op"])
            _require(entry, "date", is_date)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ArtifactError(f"{path} is no tuning table: {e}", hint="restore it, or remove it to start anew") from None
    return {str(family): list(entries) for family, entries in table.items()}


def table_text(table: Mapping[str, Mapping[Key, Entry]]) -> str:
    """A table's file: an entry a line, in the order of the keys."""
    parts = [f'"format_version": {FORMAT_VERSION}']
    for family, entries in sorted(table.items()):
        lines = ",\n".join(f"  {json.dumps(entry)}" for _, entry in sorted(entries.items()))
        parts.append(f"{json.dumps(family)}: [\n{lines}\n]")
    return f"{{{', '.join(parts)}}}\n"


def _index(table: Mapping[str, Iterable[Entry]]) -> dict[str, dict[Key, Entry]]:
    return {family: {_key(entry): entry for entry in entries} for family, entries in table.items()}


def _key(entry: Entry) -> Key:
    return entry["op"], entry["N"], entry["K"], entry["M"], entry["dtype"], entry["device"]


# --- results of a run -----------------------------------------------------------------------------


def read_results(path: Path) -> tuple[Target, list[tuple[str, Entry]]]:
    """(target, (family, entry of a table) of every case that has a winner) of a run. Raises ArtifactError."""
    return read_run(path, "tokenspeed tune run", RESULTS_KIND, RESULTS_VERSION, _entries)


def _entries(raw: Mapping[str, Any], target: Target) -> list[tuple[str, Entry]]:
    json_check.check(raw, {"peak": {"part": str, "bytes_per_s": float, "flops_per_s": float}})
    for name in ("bytes_per_s", "flops_per_s"):
        _require(raw["peak"], name, lambda rate: 1 <= rate < 1e30)
    found = [(e["family"], _entry(e, raw, target)) for e in raw["entries"] if e["timed"]]
    for family, _ in found:
        if family != "linear":
            raise ValueError(f"no table has a list {family!r}")
    return found


def _entry(found: Entry, run: Mapping[str, Any], target: Target) -> Entry:
    """The entry of a table for one case of a run."""
    for name in ("N", "K", "M", "bytes", "flops"):
        _require(found, name, lambda value: type(value) is int and value > 0)
    for name in ("op", "dtype"):
        _require(found, name, lambda value: isinstance(value, str))
    choices: list[Entry] = [
        {"us": _microseconds(timed["us"]), "config": _config(timed["config"], target, found["op"])}
        for timed in found["timed"]
    ]
    best = choices[0]
    peak = Peak(**run["peak"])
    seconds, bound = peak.bound(found["bytes"], found["flops"])
    return {
        **{name: found[name] for name in ("op", "N", "K", "M", "dtype")},
        **best,
        "runner_up": choices[min(1, len(choices) - 1)],
        "bound": bound,
        "share": round(seconds * 1e6 / best["us"], 3),
        "share_of": peak.part,
        "device": run["device"],
        "date": run["date"],
    }


def _microseconds(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ValueError(f"a call took {value!r} us")
    return round(float(value), 2) or 0.01


def _config(raw: Mapping[str, Any], target: Target, op: str) -> dict[str, Any]:
    """A configuration that a build can use. Raises ValueError or TypeError."""
    config = Config(**raw)
    kinds = {f.name: f.type for f in fields(Config)}
    for name, value in raw.items():
        if type(value).__name__ != kinds[name] or (isinstance(value, int) and value < 0):
            raise ValueError(f"{name} is {value!r}")
    if not usable(config, target, op):
        raise ValueError(f"{config} does not fit {target}")
    return to_json(config)


def _require(raw: Mapping[str, Any], name: str, good: Callable[[Any], bool]) -> None:
    if not good(raw[name]):
        raise ValueError(f"{name} is {raw[name]!r}")
