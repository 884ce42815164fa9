"""Step costs from what `tokenspeed bench` measured, or from a cost file: which of them a file is shows in its fields.

``bench --json`` gives decodes at several numbers of sequences, prompts of several lengths and the read bandwidth;
``bench --sweep --json`` gives every bucket. Both together are best: decodes of the one, all other steps of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from tokenspeed import json_check
from tokenspeed.bucket import BucketKind
from tokenspeed.errors import UsageError
from tokenspeed.simulate.cost import FORMAT, Costs, Point, Provenance, buckets_from, from_json, optional_number

MOST_BYTES = 64 << 20
DECODE_CONTEXT = 96
"""Positions that each sequence of a decode case reads on average: a prompt of 64 tokens and half of 64 drawn ones."""
SWEEP_CONTEXT = 1024
"""Positions before a chunk of a sweep's step, on average. Its decodes have as many, but read them from a few pages that
all sequences share: out of a cache, so nothing is taken off for them."""

_FIGURE = {"case": str, "tokens_per_second": float}
_SWEPT = {"bucket": dict, "p50": float}


def load_costs(paths: Sequence[str | PathLike[str]]) -> Costs:
    """Costs from cost files and from JSON of `tokenspeed bench`, in any order; of two files with the same kind of
    numbers the first counts. Raises UsageError naming the file that holds none, OSError for one that cannot be read."""
    found = [part for path in paths for part in _read(path)]
    ranked = sorted(found, key=lambda part: part.rank)
    costs = ranked[0].costs
    for part in ranked[1:]:
        costs = costs.over(part.costs)
    return costs


@dataclass(frozen=True)
class _Part:
    rank: int
    costs: Costs


def _read(path: str | PathLike[str]) -> list[_Part]:
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    name = Path(path).name
    try:
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        raw = json_check.parse(data)
        json_check.check(raw, dict)
        parts = list(_parts(raw, name))
    except (ValueError, RecursionError, UsageError) as e:
        text = e.message if isinstance(e, UsageError) else str(e) or "nested too deep"
        raise UsageError(
            f"{path} holds no step costs: {text}",
            hint="give the output of `tokenspeed bench ARTIFACT --json` or `tokenspeed bench ARTIFACT --sweep --json`",
        ) from None
    if not parts:
        raise UsageError(
            f"{path} holds no step costs: it has the fields {', '.join(map(ascii, list(raw)[:8])) or '(none)'}",
            hint="give the output of `tokenspeed bench ARTIFACT --json` or `tokenspeed bench ARTIFACT --sweep --json`",
        )
    return parts


def _parts(raw: dict[str, Any], name: str) -> Iterator[_Part]:
    """What one file holds; a file of results may hold a bench and a sweep beside each other."""
    if raw.get("format") == FORMAT:
        costs = from_json(raw)
        yield _Part(0, replace(costs, provenance=_provenance(raw["provenance"], costs.provenance.source or name)))
        return
    outer = raw
    for field, rank, convert in _CONVERSIONS:
        inner = raw if field in raw else raw.get("sweep" if field == "buckets" else "bench")
        if isinstance(inner, dict) and field in inner:
            told = {**outer, **inner}
            yield _Part(
                rank, convert(inner, _provenance(told, f"{name}, {'sweep' if field == 'buckets' else 'bench'}"))
            )


def _provenance(raw: Mapping[str, Any], source: str) -> Provenance:
    told = {"device": raw.get("device") or raw.get("machine"), **{n: raw.get(n) for n in _TOLD}}
    return Provenance(source=source, **{n: text[:200] for n, text in told.items() if isinstance(text, str)})


_TOLD = ("date", "commit", "model", "target", "artifact")


# ---- bench ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Figure:
    kind: str
    size: int
    seconds: float
    share: float | None


def _figures(raw: Mapping[str, Any]) -> list[_Figure]:
    json_check.check(raw["figures"], [_FIGURE], "figures")
    found = []
    for figure in raw["figures"]:
        kind, _, size = figure["case"].partition(" ")
        if kind not in ("decode", "prefill") or not (size.isascii() and size.isdigit() and len(size) < 9):
            raise ValueError(f"a case is {ascii(figure['case'])[:40]}")
        speed = figure["tokens_per_second"]
        if not speed > 0 or not int(size):
            raise ValueError(f"{kind} {size} has {speed} tokens/s")
        seconds = (optional_number(figure, "step_seconds") if kind == "decode" else None) or int(size) / speed
        found.append(_Figure(kind, int(size), seconds, optional_number(figure, "share_of_read_bandwidth")))
    return sorted(found, key=lambda f: f.size)


def from_bench(raw: Mapping[str, Any], provenance: Provenance) -> Costs:
    """Costs from the object that `tokenspeed bench --json` prints. Raises ValueError.

    A prompt of n tokens is a step of n tokens; a step with fewer tokens than the shortest prompt costs what as many
    decodes do, since both wait for the same weights.
    """
    figures = _figures(raw)
    decodes = [f for f in figures if f.kind == "decode"]
    prompts = [f for f in figures if f.kind == "prefill"]
    points = [Point(BucketKind.DECODE, f.size, f.seconds, f.size * DECODE_CONTEXT) for f in decodes]
    points += [Point(BucketKind.MIXED, f.size, f.seconds, 0, f.size * f.size / 2) for f in prompts]
    points += [
        Point(BucketKind.MIXED, f.size, f.seconds, f.size * DECODE_CONTEXT)
        for f in decodes
        if prompts and f.size < prompts[0].size
    ]
    ceilings = raw.get("ceilings", {})
    json_check.check(ceilings, dict, "ceilings")
    bandwidth = optional_number(ceilings, "read_bytes_per_second")
    kv_bytes = _kv_bytes_per_token(decodes, bandwidth)
    return Costs(
        tuple(points),
        kv_bytes / bandwidth if kv_bytes and bandwidth else None,
        _per_pair(prompts),
        provenance=provenance,
        read_bytes_per_second=bandwidth,
    )


def _kv_bytes_per_token(decodes: Sequence[_Figure], bandwidth: float | None) -> float | None:
    """Bytes of keys and values of a position, from the shares of the bandwidth that two decode cases reach: a token of
    n sequences counts weights / n and the keys and values of DECODE_CONTEXT positions."""
    shared = [f for f in decodes if f.share is not None]
    if bandwidth is None or len(shared) < 2:
        return None
    few, many = shared[0], shared[-1]
    work = [f.share * bandwidth * f.seconds / f.size for f in (few, many) if f.share is not None]
    of_context = (work[1] * many.size - work[0] * few.size) / (many.size - few.size)
    return of_context / DECODE_CONTEXT if of_context > 0 else None


def _per_pair(prompts: Sequence[_Figure]) -> float | None:
    """Seconds per (query, position) pair, from how much slower a token of the longest prompt is than one of the next:
    it attends to half the difference in length more positions. None where it is not slower."""
    if len(prompts) < 2:
        return None
    shorter, longer = prompts[-2:]
    slower = longer.seconds / longer.size - shorter.seconds / shorter.size
    return 2 * slower / (longer.size - shorter.size) if slower > 0 else None


# ---- sweep ----------------------------------------------------------------------------------------------------


def from_sweep(raw: Mapping[str, Any], provenance: Provenance) -> Costs:
    """Costs from the object that `tokenspeed bench --sweep --json` prints: the median of every bucket's full steps,
    over all kinds of sampling. Raises ValueError."""
    json_check.check(raw["buckets"], [_SWEPT], "buckets")
    buckets = buckets_from([entry["bucket"] for entry in raw["buckets"]])
    points = []
    for bucket, entry in zip(buckets, raw["buckets"], strict=True):
        pairs = bucket.num_tokens * SWEEP_CONTEXT if bucket.kind is BucketKind.MIXED else 0
        points.append(Point(bucket.kind, bucket.num_tokens, _full_seconds(entry), 0, pairs))
    return Costs(tuple(points), buckets=tuple(sorted(buckets)), provenance=provenance)


def _full_seconds(entry: Mapping[str, Any]) -> float:
    """Of steps that fill their bucket; of all where there were none."""
    shapes = entry.get("by_shape", {})
    json_check.check(shapes, {...: float}, "by_shape")
    return float(shapes.get("full", entry["p50"]))


def _decodes_of_bench(raw: Mapping[str, Any], provenance: Provenance) -> Costs:
    costs = from_bench(raw, provenance)
    return replace(costs, points=tuple(p for p in costs.points if p.kind is BucketKind.DECODE))


_CONVERSIONS: tuple[tuple[str, int, Callable[[Mapping[str, Any], Provenance], Costs]], ...] = (
    ("figures", 1, _decodes_of_bench),
    ("buckets", 2, from_sweep),
    ("figures", 3, from_bench),
)
"""The field that tells them, who comes first, and how they become costs."""
