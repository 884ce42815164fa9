"""What benchmarks/overload.py makes of what it found: figures, and verdicts on them."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from overload_client import PRIORITIES, TENANTS, Record, Sample

REFUSAL_CODES = ("queue_full", "key_queue_full")


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Nearest ranks; None: there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    at = {
        name: ordered[min(len(ordered) - 1, int(len(ordered) * share))] for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    return {**at, "max": ordered[-1]}


def entitlements(demand: Mapping[str, float], total: float) -> dict[str, float]:
    """Max-min fair parts of ``total``: each gets what it asks for, or as much as any other that wants more."""
    parts: dict[str, float] = {}
    left = min(total, sum(demand.values()))
    for number, name in enumerate(sorted(demand, key=lambda name: (demand[name], name))):
        parts[name] = min(demand[name], left / (len(demand) - number))
        left -= parts[name]
    return parts


def first_token_bounds(found: Mapping[str, Any], args: argparse.Namespace) -> dict[int, float]:
    """Seconds by priority class. What waits when a request comes and what comes in the next (class + 1) * aging seconds
    may be admitted before it, nothing else (docs/scheduler.md): one queue at the rate of the closed loop, half as much
    again for refusing the rest meanwhile, the ages, and what a first token took when nothing waited."""
    unloaded = percentiles([record.first_token for record in found["closed"]])
    assert unloaded is not None
    queue = 1.5 * args.max_waiting / found["capacity"]
    return {priority: queue + (priority + 1) * args.aging_seconds + unloaded["max"] for priority in PRIORITIES}


def summary(found: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Figures of the overload. Seconds and bytes, but for the names that say otherwise; capacity and what was served a
    second are in requests of mean length."""
    records: list[Record] = found["records"]
    samples: list[Sample] = found["samples"]
    outcomes = Counter(record.outcome for record in records)
    refused = [record for record in records if record.outcome == "refused"]
    started = [record for record in records if record.first_token is not None]
    served_tokens = Counter({name: 0 for name in TENANTS})
    asked = Counter({name: 0 for name in TENANTS})
    asked_tokens = Counter({name: 0 for name in TENANTS})
    mean_tokens = sum(record.num_served_tokens for record in started) / max(1, len(started))
    early = found["began"] + args.seconds / 4
    for record in records:
        if record.sent > early:  # until then all slots and the queue stood open to whoever came first
            served_tokens[record.tenant] += record.num_served_tokens
            asked[record.tenant] += 1
            asked_tokens[record.tenant] += round(record.num_served_tokens or mean_tokens)
    warm = [one.resident_bytes for one in samples if one.at <= early]
    later = [one.resident_bytes for one in samples if one.at > early]
    return {
        "requests": len(records),
        "outcomes": dict(sorted(outcomes.items())),
        "errors": dict(Counter(record.error for record in records if record.error).most_common(5)),
        "capacity_per_second": found["capacity"],
        "offered_per_second": len(records) / args.seconds,
        "served_per_second": tokens_per_second(samples, found["began"], args.seconds) / found["mean_tokens"],
        "served_in_closed_loop": len(found["closed"]),
        "first_token": {
            str(priority): percentiles([r.first_token for r in started if r.priority == priority and r.first_token])
            for priority in PRIORITIES
        },
        "first_token_unloaded": percentiles([record.first_token for record in found["closed"]]),
        "total_of_served": percentiles([record.total for record in records if record.outcome == "served"]),
        "refusal": percentiles([record.total for record in refused]),
        "retry_after": percentiles(
            [int(r.retry_after) for r in refused if r.retry_after and r.retry_after.isdecimal()]
        ),
        "tenants": {
            name: {"asked": asked[name], "served_tokens": served_tokens[name], "entitled_tokens": round(entitled)}
            for name, entitled in entitlements(asked_tokens, sum(served_tokens.values())).items()
        },
        "every_page_used_before": found["every_page_used_before"],
        "resident_warm": max(warm, default=None),
        "resident_after_warm": max(later, default=None),
        "resident_idle_before": found["idle_before"] and found["idle_before"].resident_bytes,
        "resident_idle_after": found["after"] and found["after"].resident_bytes,
        "files_idle": [one and one.num_files for one in (found["idle_before"], found["after"])],
        "most_queued": max((one.num_queued for one in samples), default=None),
        "most_running": max((one.num_running for one in samples), default=None),
        "most_pages_in_use": max((one.num_pages_in_use for one in samples), default=None),
        "preemptions": found["preemptions"],
        "server_info": percentiles([one.seconds for one in samples]),
        "metrics": percentiles(found["scrapes"]),
        "sent_late": percentiles(found["late"]),
        "idle_after": found["idle_after_seconds"],
    }


def tokens_per_second(samples: Sequence[Sample], began: float, seconds: float) -> float:
    """In the second half of the arrivals, when all slots are taken; 0 where too few samples are of it."""
    inside = [one for one in samples if began + seconds / 2 <= one.at <= began + seconds]
    if len(inside) < 2:
        return 0.0
    return (inside[-1].num_tokens - inside[0].num_tokens) / (inside[-1].at - inside[0].at)


def polite(record: Record) -> bool:
    """Whether a refusal says when to come back, and what was full."""
    text = record.retry_after or ""
    return text.isdecimal() and int(text) >= 1 and record.code in REFUSAL_CODES


def judge(found: Mapping[str, Any], figures: Mapping[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Verdicts: name, whether it holds, what was found, and whether it depends on this machine's speed."""
    verdicts: list[dict[str, Any]] = []

    def verdict(name: str, holds: bool, text: str, timed: bool = False) -> None:
        verdicts.append({"name": name, "holds": holds, "found": text, "timed": timed})

    records: list[Record] = found["records"]
    refused = [record for record in records if record.outcome == "refused"]
    outcomes = Counter(record.outcome for record in records)
    offered, rate, capacity = (figures[f"{name}_per_second"] for name in ("offered", "served", "capacity"))
    text = f"{dict(outcomes)} of {len(records)} requests"
    verdict("refused some, served some", bool(refused and outcomes["served"]), text)
    # A capacity measured too low asks too little: what the server did under load is the better measure of that.
    text = f"{offered:.1f} requests/s came, {rate:.1f} were served"
    verdict("overloaded", offered >= 0.8 * args.factor * rate, text, True)
    verdict("everybody answered", not outcomes["failed"], f"{outcomes['failed']} not: {figures['errors']}")
    rude = [record for record in refused if not polite(record)]
    verdict("refused politely", not rude, f"{len(rude)} of {len(refused)} without Retry-After or code")
    slow = figures["refusal"] or {"p99": float("inf")}
    bound = args.refusal_seconds
    verdict("refused quickly", slow["p99"] <= bound, f"p99 {slow['p99']:.3f} s, bound {bound:g} s", True)
    bounds = first_token_bounds(found, args)
    waits = [(figures["first_token"][str(priority)], bounds[priority]) for priority in PRIORITIES]
    verdict(
        "waits bounded",
        all(wait is not None and wait["p99"] <= bound for wait, bound in waits),
        "p99 of first tokens by class "
        + ", ".join(f"{wait['p99']:.2f} s of {bound:.2f} s" if wait else "none" for wait, bound in waits),
        True,
    )
    verdict("goes on serving", rate >= 0.7 * capacity, f"{rate:.1f} requests/s of {capacity:.1f} before", True)
    parts = [(name, one["served_tokens"] / max(1, one["entitled_tokens"])) for name, one in figures["tenants"].items()]
    least = min(parts, key=lambda part: part[1])
    text = ", ".join(f"{name} {share:.2f}" for name, share in parts)
    verdict("fair shares", least[1] >= args.fairness, f"served of what each was entitled to: {text}", True)
    warm, later = figures["resident_warm"], figures["resident_after_warm"]
    allowed = max(args.growth_mb * 1e6, 0.05 * (warm or 0))
    grown = (later or 0) - (warm or 0)
    text = f"grew by {grown / 1e6:.1f} MB to {(later or 0) / 1e6:.0f} MB, bound {allowed / 1e6:.0f} MB"
    verdict("memory flat", None not in (warm, later) and grown <= allowed, text)
    most = figures["most_queued"]
    verdict("queue bounded", most is not None and most <= args.max_waiting, f"{most} of {args.max_waiting} at most")
    after = found["after"] and asdict(found["after"])
    verdict("idle afterwards", found["idle_after_seconds"] is not None, f"in {found['idle_after_seconds']} s: {after}")
    files = figures["files_idle"]
    verdict("connections closed", None not in files and files[1] <= files[0] + 2, f"open files before, after: {files}")
    admitted = sum(1 for record in records if record.status == 200) + 1  # and the last probe
    unknown = sum(1 for record in records if record.status == 0)
    text = f"{found['ended']} ended; {admitted} were admitted, {unknown} left or failed before they knew"
    verdict("each ended once", found["ended"] is not None and admitted <= found["ended"] <= admitted + unknown, text)
    verdict("same answer as before", found["same_answer"], "greedy tokens of a fixed prompt, before and afterwards")
    closed = found["after_ready"]
    verdict("nothing built while serving", closed is not None and not any(closed.values()), str(closed))
    return verdicts
