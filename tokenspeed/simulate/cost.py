"""What a step costs: seconds by bucket, from an artifact's own measurements or from numbers given by hand.

    seconds(step) = base(its bucket) + per_context_token * (positions that its decodes read)
                                     + per_pair * (query tokens of its chunks x positions that each attends to)

``base`` lies between what a full step of the bucket takes with no context and what one of the next smaller bucket does,
by the step's tokens: kernels read a step's sizes and skip most of what pads it. The two other terms are attention:
decodes wait for keys and values to be read, chunks for products.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tokenspeed import json_check
from tokenspeed.bucket import Bucket, BucketKind, BucketTable, StepLimits, prove_coverage
from tokenspeed.errors import ProgramError, UsageError

FORMAT = "tokenspeed step cost"
FORMAT_VERSION = 1
"""History: 1 (2026-11-29)."""
MOST_SECONDS = 1e4
MOST_BUCKETS = 10_000
MOST_TOKENS = 1 << 24
MOST_ATTENTION = 1e15


@dataclass(frozen=True)
class Provenance:
    """Where numbers come from, each a text, empty where nobody said."""

    source: str = ""
    device: str = ""
    date: str = ""
    commit: str = ""
    model: str = ""
    target: str = ""
    artifact: str = ""

    def __str__(self) -> str:
        told = [self.source, self.model, self.target, self.device, self.date, self.commit and f"commit {self.commit}"]
        return ", ".join(part for part in told if part) or "unknown"


@dataclass(frozen=True, order=True)
class Point:
    """Seconds that a step of ``num_tokens`` tokens took: of that many decodes, or with chunks; and the attention in
    them: positions that its decodes read, pairs of its chunks."""

    kind: BucketKind
    num_tokens: int
    seconds: float
    context_tokens: float = 0
    pairs: float = 0


@dataclass(frozen=True)
class Costs:
    """Numbers as they were measured or given: points at some sizes, and attention in seconds per position read by a
    decode and per (query, position) pair of a chunk; None: not known. ``buckets``: those that were measured, if any."""

    points: tuple[Point, ...]
    per_context_token: float | None = None
    per_pair: float | None = None
    buckets: tuple[Bucket, ...] = ()
    provenance: Provenance = field(default_factory=Provenance)
    read_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple(sorted(self.points)))
        for point in self.points:
            sane = 0 <= point.context_tokens <= MOST_ATTENTION and 0 <= point.pairs <= MOST_ATTENTION
            if not 1 <= point.num_tokens <= MOST_TOKENS or not 0 < point.seconds <= MOST_SECONDS or not sane:
                raise UsageError(
                    f"step costs: need 1 to {MOST_TOKENS} tokens and seconds above 0 and up to {MOST_SECONDS:g}, have "
                    f"{point.kind}:{point.num_tokens} = {point.seconds}"
                )
        sizes = [(p.kind, p.num_tokens) for p in self.points]
        if len(set(sizes)) < len(sizes):
            twice = next(size for size in sizes if sizes.count(size) > 1)
            raise UsageError(f"step costs: need one number for each size, have two for {twice[0]}:{twice[1]}")

    def base(self, point: Point) -> float:
        """Its seconds without attention; a tenth of them at least, should attention be overrated."""
        attention = (self.per_context_token or 0.0) * point.context_tokens + (self.per_pair or 0.0) * point.pairs
        return max(point.seconds - attention, point.seconds / 10)

    def seconds(self, kind: BucketKind, num_tokens: int) -> float:
        """Without attention, at any size: on the line between the points around it; below the smallest, as that one
        (such steps wait for weights); beyond the largest, in proportion."""
        known = [p for p in self.points if p.kind is kind]
        if not known:
            raise UsageError(
                f"the costs have no {kind} step", hint=f"add one, as in --step-cost {kind}:{num_tokens}=5ms"
            )
        at = bisect_left([p.num_tokens for p in known], num_tokens)
        if at == 0:
            return self.base(known[0])
        low = known[at - 1]
        below = self.base(low)
        if at == len(known):
            return below * num_tokens / low.num_tokens
        high = known[at]
        share = (num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens)
        return below + share * (self.base(high) - below)

    def over(self, other: Costs) -> Costs:
        """These numbers, and of ``other`` what they lack: kinds of steps, buckets, attention, bandwidth, provenance."""
        kinds = {p.kind for p in self.points}
        own, others = asdict(self.provenance), asdict(other.provenance)
        source = "; ".join(dict.fromkeys(s for told in (own, others) for s in told["source"].split("; ") if s))
        provenance = Provenance(**{**{n: own[n] or others[n] for n in own}, "source": source})
        return Costs(
            (*self.points, *(p for p in other.points if p.kind not in kinds)),
            self.per_context_token if self.per_context_token is not None else other.per_context_token,
            self.per_pair if self.per_pair is not None else other.per_pair,
            self.buckets or other.buckets,
            provenance,
            self.read_bytes_per_second if self.read_bytes_per_second is not None else other.read_bytes_per_second,
        )


# ---- the model ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostModel:
    """Seconds of a full step of each bucket of a deployment, and of attention. ``seconds[i]`` is of ``buckets[i]``."""

    buckets: tuple[Bucket, ...]
    seconds: tuple[float, ...]
    per_context_token: float
    per_pair: float
    provenance: Provenance = field(default_factory=Provenance)

    def step_seconds(
        self,
        num_tokens: int,
        num_seqs: int,
        num_logit_rows: int,
        *,
        decode_only: bool,
        context_tokens: int = 0,
        pairs: float = 0,
    ) -> float:
        """Seconds of a step of these sizes, looked up as the executor looks up its LaunchGraph.

        ``context_tokens``: positions that decodes read; ``pairs``: of chunks. Raises ProgramError without a bucket.
        """
        bucket = BucketTable(self.buckets).find(num_tokens, num_seqs, num_logit_rows, decode_only=decode_only)
        if bucket is None:
            raise ProgramError(f"no bucket for a step of {num_tokens} tokens, {num_seqs} sequences")
        place = self.buckets.index(bucket)
        base, low = self.seconds[place], self.buckets[place - 1] if place else bucket
        if low.kind is bucket.kind and low != bucket:
            share = max(0.0, (num_tokens - low.num_tokens) / (bucket.num_tokens - low.num_tokens))
            base = self.seconds[place - 1] + share * (base - self.seconds[place - 1])
        return base + self.per_context_token * context_tokens + self.per_pair * pairs


def model(costs: Costs, buckets: Iterable[Bucket], limits: StepLimits) -> CostModel:
    """Costs of ``buckets`` (an artifact's own), by interpolation where no point is. Every step within ``limits`` has a
    bucket: raises UsageError otherwise."""
    used = tuple(sorted(buckets))
    try:
        prove_coverage({_cut(b, limits) for b in used}, limits)
    except ProgramError as e:
        raise UsageError(
            f"the step costs do not cover the scheduler: {e.message}",
            hint="add sizes up to --max-num-seqs (decode) and --max-step-tokens (mixed), or lower those",
        ) from None
    return CostModel(
        used,
        tuple(costs.seconds(b.kind, b.num_tokens) for b in used),
        costs.per_context_token or 0.0,
        costs.per_pair or 0.0,
        costs.provenance,
    )


def _cut(bucket: Bucket, limits: StepLimits) -> Bucket:
    """The part of a bucket that the scheduler can fill."""
    most = limits.max_num_seqs if bucket.kind is BucketKind.DECODE else limits.max_prefill_tokens
    tokens, seqs, rows = bucket.num_tokens, bucket.num_seqs, bucket.num_logit_rows
    return Bucket(
        bucket.kind, min(tokens, most), min(seqs, limits.max_num_seqs, most), min(rows, limits.max_logit_rows, most)
    )


def buckets_of(costs: Costs, limits: StepLimits) -> tuple[Bucket, ...]:
    """The buckets when no artifact says them: those that were measured, or one at each point."""
    return costs.buckets or tuple(
        Bucket(p.kind, p.num_tokens, p.num_tokens, p.num_tokens)
        if p.kind is BucketKind.DECODE
        else Bucket(
            p.kind, p.num_tokens, min(p.num_tokens, limits.max_num_seqs), min(p.num_tokens, limits.max_logit_rows)
        )
        for p in costs.points
    )


# ---- a file of its own ----------------------------------------------------------------------------------------

_POINT = {"kind": str, "num_tokens": int, "seconds": float}
_SHAPE = {"format": str, "format_version": int, "provenance": dict, "points": [_POINT]}
_BUCKET = {"kind": str, "num_tokens": int, "num_seqs": int, "num_logit_rows": int}


def to_json(costs: Costs) -> dict[str, Any]:
    """The costs as a cost file has them (docs/simulator.md)."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "provenance": {name: text for name, text in asdict(costs.provenance).items() if text},
        "per_context_token": costs.per_context_token,
        "per_pair": costs.per_pair,
        "read_bytes_per_second": costs.read_bytes_per_second,
        "points": [{**asdict(p), "kind": str(p.kind)} for p in costs.points],
        "buckets": [{**asdict(b), "kind": str(b.kind)} for b in costs.buckets],
    }


def from_json(data: Mapping[str, Any]) -> Costs:
    """Read what ``to_json`` wrote. Raises ValueError (without the file's name) or UsageError."""
    json_check.check(data, _SHAPE)
    if data["format_version"] != FORMAT_VERSION:
        raise ValueError(f"it has format version {data['format_version']}; this TokenSpeed reads {FORMAT_VERSION}")
    if len(data["points"]) > MOST_BUCKETS:
        raise ValueError(f"it has more than {MOST_BUCKETS} points")
    points = tuple(_point(p) for p in data["points"])
    provenance = {f: data["provenance"].get(f, "") for f in asdict(Provenance())}
    json_check.check(provenance, dict.fromkeys(provenance, str), "provenance")
    return Costs(
        points,
        _attention(data, "per_context_token"),
        _attention(data, "per_pair"),
        buckets_from(data.get("buckets", [])),
        Provenance(**provenance),
        optional_number(data, "read_bytes_per_second"),
    )


def _point(raw: Mapping[str, Any]) -> Point:
    attention = {name: raw.get(name, 0) for name in ("context_tokens", "pairs")}
    json_check.check(attention, dict.fromkeys(attention, float), "a point")
    return Point(kind_of(raw["kind"]), raw["num_tokens"], raw["seconds"], **attention)


def buckets_from(raw: Any) -> tuple[Bucket, ...]:
    """Buckets from a JSON list. Raises ValueError."""
    json_check.check(raw, [_BUCKET], "buckets")
    if len(raw) > MOST_BUCKETS:
        raise ValueError(f"it has more than {MOST_BUCKETS} buckets")
    found = []
    for item in raw:
        sizes = [item["num_tokens"], item["num_seqs"], item["num_logit_rows"]]
        if not all(1 <= size <= MOST_TOKENS for size in sizes):
            raise ValueError(f"a bucket has the sizes {sizes}")
        found.append(Bucket(kind_of(item["kind"]), *sizes))
    return tuple(found)


def kind_of(text: str) -> BucketKind:
    """Raises ValueError for what is no kind of bucket."""
    if text not in tuple(BucketKind):
        raise ValueError(f"a kind is {ascii(text)[:40]}; it must be decode or mixed")
    return BucketKind(text)


def optional_number(data: Mapping[str, Any], name: str) -> float | None:
    """A number above 0, or None where it lacks. Raises ValueError."""
    value = data.get(name)
    if value is None:
        return None
    json_check.check(value, float, name)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0, not {value}")
    return float(value)


def _attention(data: Mapping[str, Any], name: str) -> float | None:
    if data.get(name) == 0:
        return 0.0
    value = optional_number(data, name)
    if value is not None and value > 1:
        raise ValueError(f"{name} must be at most 1 second, not {value}")
    return value


def dumps(costs: Costs) -> str:
    return json.dumps(to_json(costs), indent=2) + "\n"


# ---- by hand --------------------------------------------------------------------------------------------------

_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_step_cost(texts: Sequence[str]) -> Costs:
    """``decode:64=5.2ms,mixed:8192=240ms`` as points; ``context=29ns`` per position read by a decode, ``pair=1ns`` per
    (query, position) pair of a chunk. Raises UsageError."""
    points, attention = [], dict[str, float]()
    for text in ",".join(texts).split(","):
        name, equals, value = text.strip().partition("=")
        seconds = _seconds(value) if equals else None
        kind, _, size = name.partition(":")
        if seconds is not None and name in ("context", "pair"):
            attention[name] = seconds
        elif seconds is not None and kind in tuple(BucketKind) and size.isascii() and size.isdigit() and len(size) < 9:
            points.append(Point(BucketKind(kind), int(size), seconds))
        else:
            raise UsageError(
                f"--step-cost: need KIND:TOKENS=TIME, have {text!r}",
                hint="KIND is decode or mixed, TIME a number with s, ms, us or ns: decode:64=5.2ms,mixed:8192=240ms",
            )
    return Costs(tuple(points), attention.get("context"), attention.get("pair"), provenance=Provenance("--step-cost"))


def _seconds(text: str) -> float | None:
    for unit, scale in _UNITS.items():
        number = text.removesuffix(unit)
        if number != text and number[-1:].isdigit():
            try:
                value = float(number) * scale
            except ValueError:
                return None
            return value if 0 <= value <= MOST_SECONDS else None
    return None


def with_attention(costs: Costs, kv_bytes_per_token: float) -> Costs:
    """Where it is not known, what a decode waits for each position that it reads: its keys and values over the
    bandwidth of reading that was measured. Unchanged without one."""
    if costs.per_context_token is not None or costs.read_bytes_per_second is None:
        return costs
    return replace(costs, per_context_token=kv_bytes_per_token / costs.read_bytes_per_second)
