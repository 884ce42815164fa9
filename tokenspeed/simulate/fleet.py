"""A trace through a fleet: feeds the C++ simulator (csrc/simulate) request by request and takes its records back.

Python holds one request at a time, and the simulator the blocks of those that have not ended: a trace of millions of
requests is never in memory.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tokenspeed import _native
from tokenspeed.bucket import BucketKind, StepLimits
from tokenspeed.errors import ResourceError, UsageError
from tokenspeed.simulate.cost import CostModel
from tokenspeed.simulate.trace import TraceError, TraceRequest

ROUTINGS = ("round-robin", "random", "least-loaded", "prefix-aware")
FED_AT_ONCE = 512
ROUNDS_AT_ONCE = 500
"""Of 20 ms: between two calls Ctrl-C is heard and progress is told."""
NEVER = (1 << 63) - 1
NONE = -1
STATUS = ("open", "finished", "refused", "too long", "expired")
FINISHED = STATUS.index("finished")


@dataclass(frozen=True)
class Deployment:
    """One replica: the limits of its steps, its KV pages, and the scheduler's policy.

    Attributes:
        limits: the largest step.
        max_model_len: most tokens of a request.
        page_size: positions of a KV page.
        num_pages: KV pages on the device.
        num_host_pages: of the host tier; 0: none.
        page_move_seconds: what moving a page between device and host adds to a step.
        max_waiting: requests in its queue; see Fleet.waits_when_full.
        steps_in_flight: planned before the oldest has ended: 2 is what a GPU's engine does.
        prefix_index: whether cached prefixes are used.
        aging_seconds: waiting that long makes up for one priority class; 0: never.
    """

    limits: StepLimits
    max_model_len: int
    page_size: int
    num_pages: int
    num_host_pages: int = 0
    page_move_seconds: float = 0.0
    max_waiting: int = 1024
    steps_in_flight: int = 2
    prefix_index: bool = True
    aging_seconds: float = 10.0

    def config(self) -> Any:
        """As the scheduler takes it. Raises UsageError for what it refuses."""
        config = _native.SchedulerConfig(
            max_num_seqs=self.limits.max_num_seqs,
            max_prefill_tokens=self.limits.max_prefill_tokens,
            max_logit_rows=self.limits.max_logit_rows,
            max_model_len=self.max_model_len,
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_waiting=self.max_waiting,
            max_in_flight=self.steps_in_flight,
            prefix_index=self.prefix_index,
            num_host_pages=self.num_host_pages,
            aging_ns=round(self.aging_seconds * 1e9),
        )
        return config


@dataclass(frozen=True)
class Fleet:
    """The replicas and the router before them.

    Attributes:
        num_replicas: all alike.
        routing: one of ROUTINGS.
        seed: of random routing.
        load_tokens: of prefix-aware routing: a request that has not ended weighs as much as so many tokens of a prompt
            that a replica would have to compute.
        waits_when_full: a request that finds its replica's queue full comes again until there is room; else it is
            refused.
        keeps_delays: requests with a delay wait for the end of the one before in their session; else all arrive at
            their timestamps.
        speed: the trace runs so many times as fast; delays do not change.
        block_tokens: tokens of the trace's blocks.
        interval_ms: how often the router hears which requests have ended.
        num_threads: they change nothing but the time that it takes.
    """

    num_replicas: int = 1
    routing: str = "round-robin"
    seed: int = 0
    load_tokens: int = 1024
    waits_when_full: bool = True
    keeps_delays: bool = True
    speed: float = 1.0
    block_tokens: int = 512
    interval_ms: float = 20.0
    num_threads: int = 1


@dataclass(frozen=True)
class Sample:
    """The fleet at one time (s): requests that run and wait, KV pages in use, and cached for whoever comes next."""

    seconds: float
    running: int
    waiting: int
    used_pages: int
    cached_pages: int


@dataclass(frozen=True)
class Outcome:
    """What became of a trace. Columns have an entry per request, in order; times are nanoseconds, -1: never.

    ``totals`` has sums per replica (csrc/simulate/replica.h), ``tenants`` the names that ``tenant`` counts.
    """

    deployment: Deployment
    fleet: Fleet
    model: CostModel
    arrival: array[int]
    admitted: array[int]
    first_token: array[int]
    end: array[int]
    num_input: array[int]
    num_output: array[int]
    num_cached: array[int]
    num_preemptions: array[int]
    tenant: array[int]
    replica: array[int]
    status: array[int]
    tenants: tuple[str, ...]
    timeline: tuple[Sample, ...]
    totals: tuple[dict[str, Any], ...]
    wall_seconds: float


Progress = Callable[[int, int, float], None]
"""Is told the requests that ended and that were read, and the virtual time in seconds."""


def simulate(
    trace: Iterable[TraceRequest],
    deployment: Deployment,
    model: CostModel,
    fleet: Fleet,
    progress: Progress = lambda ended, read, seconds: None,
) -> Outcome:
    """Run ``trace`` to its end. Raises UsageError for an empty trace and for settings that the simulator refuses;
    whatever reading the trace raises."""
    began = time.perf_counter()
    simulator = _simulator(deployment, model, fleet)
    tenants: dict[str, int] = {}
    sessions: dict[str, int] = {}
    origin: float | None = None
    at = 0

    def run(until: int) -> None:
        while not simulator.run(until, ROUNDS_AT_ONCE):
            progress(simulator.num_ended, simulator.num_added, simulator.now_ns / 1e9)
        progress(simulator.num_ended, simulator.num_added, simulator.now_ns / 1e9)

    for number, request in enumerate(trace):
        origin = request.timestamp if origin is None else origin
        at = round((request.timestamp - origin) * 1e6 / fleet.speed)
        if at > NEVER // 4:
            raise TraceError(f"request {number + 1} arrives after {at / 1e9:g} s", hint="raise --speed")
        simulator.add(
            at,
            request.input_length,
            request.output_length,
            request.hash_ids + request.output_hash_ids,
            len(request.hash_ids),
            request.priority,
            tenants.setdefault(request.tenant, len(tenants)),
            NONE if request.deadline is None else round(request.deadline * 1e6),
            sessions.setdefault(request.session, len(sessions)) if request.session else NONE,
            NONE if request.delay is None else round(request.delay * 1e6),
        )
        if number % FED_AT_ONCE == FED_AT_ONCE - 1:
            run(at)
    if origin is None:
        raise UsageError(
            "the trace has no requests", hint="make one with `tokenspeed simulate --generate chat -o FILE`"
        )
    run(NEVER)
    return _outcome(simulator, deployment, fleet, model, tuple(tenants), time.perf_counter() - began)


def _simulator(deployment: Deployment, model: CostModel, fleet: Fleet) -> Any:
    buckets = [
        (b.kind is BucketKind.DECODE, b.num_tokens, b.num_seqs, b.num_logit_rows, seconds)
        for b, seconds in zip(model.buckets, model.seconds, strict=True)
    ]
    try:
        costs = _native.StepCosts(buckets, model.per_context_token, model.per_pair, deployment.page_move_seconds)
        return _native.Simulator(
            deployment.config(),
            costs,
            num_replicas=fleet.num_replicas,
            routing=fleet.routing,
            seed=fleet.seed,
            load_tokens=fleet.load_tokens,
            block_tokens=fleet.block_tokens,
            waits_when_full=fleet.waits_when_full,
            keeps_delays=fleet.keeps_delays,
            interval_ns=round(fleet.interval_ms * 1e6),
            num_threads=fleet.num_threads,
        )
    except MemoryError:
        raise ResourceError(
            f"{fleet.num_replicas} replicas of {deployment.num_pages} KV pages need more memory than there is",
            hint="simulate fewer replicas or fewer pages",
        ) from None
    except (ValueError, TypeError) as e:  # TypeError: a number too large for C++
        text = str(e) if isinstance(e, ValueError) else "a number is too large"
        raise UsageError(f"the simulator refuses these settings: {text}") from None


_TIMES = ("arrival", "admitted", "first_token", "end")
_COUNTS = ("num_input", "num_output", "num_cached", "num_preemptions", "tenant", "replica")


def _outcome(
    simulator: Any, deployment: Deployment, fleet: Fleet, model: CostModel, tenants: tuple[str, ...], seconds: float
) -> Outcome:
    raw = simulator.records()
    columns = {
        name: array(code) for code, names in (("q", _TIMES), ("i", _COUNTS), ("B", ("status",))) for name in names
    }
    for name, column in columns.items():
        column.frombytes(raw.pop(name))
    timeline = tuple(Sample(ns / 1e9, *counts) for ns, *counts in simulator.timeline())
    return Outcome(
        deployment, fleet, model, **columns, tenants=tenants, timeline=timeline, totals=tuple(simulator.totals()),
        wall_seconds=seconds,
    )  # fmt: skip
