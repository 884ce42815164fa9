"""What a simulation says: latencies, goodput, hits, preemptions and occupancy, of all requests and by tenant.

TTFT: from arrival to the first token. TPOT: from there to the end, by the tokens after the first (requests of two
tokens or more). E2E: from arrival to the end. Queue: from arrival to the plan that admits it. Percentiles: by nearest
rank over requests that finished.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

from tokenspeed.simulate.fleet import FINISHED, STATUS, Outcome, Sample

QUANTILES = 100
SHOWN_TENANTS = 50


@dataclass(frozen=True)
class Slo:
    """What a good request keeps, in seconds; None: no bound."""

    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True)
class Latency:
    """Seconds. ``cdf[i]`` is the i-th of QUANTILES quantiles: so many hundredths of all are at most this."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    cdf: tuple[float, ...]


@dataclass(frozen=True)
class Summary:
    """A group of requests.

    Attributes:
        requests: all of them; the counts by end add up to it: finished, refused (the queue was full), too_long (could
            never be served), expired (their deadline came first).
        good: finished within the SLO; ``goodput`` is their share of all requests.
        prompt_tokens, cached_tokens: of requests that were admitted; ``hit_rate`` is cached by prompt.
        output_tokens: of requests that finished.
        preemptions: how often one was pushed back and admitted again.
    """

    requests: int
    finished: int
    refused: int
    too_long: int
    expired: int
    good: int
    goodput: float
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    output_tokens: int
    preemptions: int
    ttft: Latency | None
    tpot: Latency | None
    e2e: Latency | None
    queue: Latency | None


@dataclass(frozen=True)
class Replica:
    """One replica: the requests sent to it, the share of the time in which its device ran a step, its hit rate."""

    requests: int
    busy: float
    hit_rate: float


@dataclass(frozen=True)
class Report:
    """One run.

    Attributes:
        seconds: virtual time from the first arrival to the last end.
        requests_per_second, good_per_second, output_tokens_per_second, prompt_tokens_per_second: of the whole fleet.
        steps: of all replicas; ``tokens_per_step`` on average, ``padding`` is the share of bucket tokens that no step
            token filled, ``busy`` the share of the time in which devices ran.
        steps_by_bucket: by name of the bucket.
        occupancy: samples over time; ``num_pages`` is what they count towards, of all replicas together.
        wall_seconds: what the simulation itself took.
    """

    routing: str
    num_replicas: int
    num_pages: int
    slo: Slo
    seconds: float
    wall_seconds: float
    requests_per_second: float
    good_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    steps: int
    tokens_per_step: float
    padding: float
    busy: float
    computed_tokens: int
    restored_tokens: int
    steps_by_bucket: dict[str, int]
    all: Summary
    tenants: dict[str, Summary]
    replicas: tuple[Replica, ...]
    occupancy: tuple[Sample, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def report(outcome: Outcome, slo: Slo = Slo()) -> Report:
    """What ``outcome`` comes to. Tenants beyond the SHOWN_TENANTS with most requests are left out."""
    seconds = (max(outcome.end) - min(outcome.arrival)) / 1e9
    everything = _summary(outcome, range(len(outcome.status)), slo)
    totals = outcome.totals
    steps, step_tokens, bucket_tokens, busy_ns, computed, restored = (
        sum(replica[name] for replica in totals)
        for name in ("steps", "step_tokens", "bucket_tokens", "busy_ns", "computed_tokens", "restored_tokens")
    )
    return Report(
        routing=outcome.fleet.routing,
        num_replicas=len(totals),
        num_pages=outcome.deployment.num_pages * len(totals),
        slo=slo,
        seconds=seconds,
        wall_seconds=outcome.wall_seconds,
        requests_per_second=_per(everything.finished, seconds),
        good_per_second=_per(everything.good, seconds),
        output_tokens_per_second=_per(everything.output_tokens, seconds),
        prompt_tokens_per_second=_per(everything.prompt_tokens, seconds),
        steps=steps,
        tokens_per_step=_per(step_tokens, steps),
        padding=1 - step_tokens / bucket_tokens if bucket_tokens else 0.0,
        busy=_per(busy_ns / 1e9, seconds * len(totals)),
        computed_tokens=computed,
        restored_tokens=restored,
        steps_by_bucket=_steps_by_bucket(outcome),
        all=everything,
        tenants=_tenants(outcome, slo),
        replicas=_replicas(outcome, seconds),
        occupancy=outcome.timeline,
    )


def _per(number: float, seconds: float) -> float:
    return number / seconds if seconds else 0.0


def _steps_by_bucket(outcome: Outcome) -> dict[str, int]:
    names = [b.name for b in outcome.model.buckets]  # sorted: decode first, as the simulator numbers them
    counts = (sum(replica["steps_by_bucket"][i] for replica in outcome.totals) for i in range(len(names)))
    return {name: count for name, count in zip(names, counts, strict=True) if count}


def _tenants(outcome: Outcome, slo: Slo) -> dict[str, Summary]:
    if len(outcome.tenants) < 2:
        return {}
    members: list[list[int]] = [[] for _ in outcome.tenants]
    for index, tenant in enumerate(outcome.tenant):
        members[tenant].append(index)
    shown = sorted(range(len(members)), key=lambda t: (-len(members[t]), outcome.tenants[t]))[:SHOWN_TENANTS]
    return {outcome.tenants[t] or "(none)": _summary(outcome, members[t], slo) for t in shown}


def _replicas(outcome: Outcome, seconds: float) -> tuple[Replica, ...]:
    sent = [0] * len(outcome.totals)
    for replica in outcome.replica:
        sent[replica] += 1
    return tuple(
        Replica(
            n, _per(t["busy_ns"] / 1e9, seconds), t["cached_tokens"] / t["prompt_tokens"] if t["prompt_tokens"] else 0
        )
        for n, t in zip(sent, outcome.totals, strict=True)
    )


def _summary(outcome: Outcome, indices: Sequence[int], slo: Slo) -> Summary:
    arrival, first_token, end, num_output = outcome.arrival, outcome.first_token, outcome.end, outcome.num_output
    by_status = [0] * len(STATUS)
    prompt = cached = preemptions = output = good = 0
    ttft: list[int] = []
    tpot: list[float] = []
    e2e: list[int] = []
    queue: list[int] = []
    for i in indices:
        status = outcome.status[i]
        by_status[status] += 1
        if (admitted := outcome.admitted[i]) >= 0:
            prompt += outcome.num_input[i]
            cached += outcome.num_cached[i]
            preemptions += outcome.num_preemptions[i]
        if status != FINISHED:
            continue
        output += num_output[i]
        first = first_token[i] - arrival[i]
        ttft.append(first)
        e2e.append(end[i] - arrival[i])
        queue.append(admitted - arrival[i])
        each = (end[i] - first_token[i]) / (num_output[i] - 1) if num_output[i] > 1 else 0.0
        if num_output[i] > 1:
            tpot.append(each)
        good += (slo.ttft is None or first <= slo.ttft * 1e9) and (slo.tpot is None or each <= slo.tpot * 1e9)
    return Summary(
        requests=len(indices),
        finished=by_status[FINISHED],
        refused=by_status[2],
        too_long=by_status[3],
        expired=by_status[4],
        good=good,
        goodput=good / len(indices),
        prompt_tokens=prompt,
        cached_tokens=cached,
        hit_rate=cached / prompt if prompt else 0.0,
        output_tokens=output,
        preemptions=preemptions,
        ttft=latency(ttft),
        tpot=latency(tpot),
        e2e=latency(e2e),
        queue=latency(queue),
    )


def latency(nanoseconds: Iterable[float]) -> Latency | None:
    """Percentiles of some times, in seconds; None of none."""
    ordered = sorted(nanoseconds)
    if not ordered:
        return None

    def rank(hundredths: int) -> float:
        return ordered[max(0, -(-len(ordered) * hundredths // 100) - 1)] / 1e9

    mean = sum(ordered) / len(ordered) / 1e9
    cdf = tuple(rank(q) for q in range(QUANTILES + 1))
    return Latency(len(ordered), mean, cdf[50], cdf[90], cdf[95], cdf[99], cdf[100], cdf)


_RECORD = ("arrival", "admitted", "first_token", "end")


def write_records(file: IO[str], outcome: Outcome) -> int:
    """One line of CSV a request, in order of the trace: times in seconds, empty for never. Returns how many."""
    writer = csv.writer(file, lineterminator="\n")
    counts = ("num_input", "num_output", "num_cached", "num_preemptions", "replica")
    writer.writerow(("request", "status", "tenant", *_RECORD, *counts))
    times = [getattr(outcome, name) for name in _RECORD]
    numbers = [getattr(outcome, name) for name in counts]
    for i, status in enumerate(outcome.status):
        told = (f"{column[i] / 1e9:.9f}" if column[i] >= 0 else "" for column in times)
        writer.writerow((i, STATUS[status], outcome.tenants[outcome.tenant[i]], *told, *(c[i] for c in numbers)))
    return len(outcome.status)
