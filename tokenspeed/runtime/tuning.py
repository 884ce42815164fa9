"""The device's side of ``tokenspeed tune``: times the candidates of a pack, with the base install and no compiler.

A candidate is one replayed graph of many calls in a row (tuning_pack.chain); its time is that of the graph on the
device, by events. docs/tuning.md says what a figure includes and what it does not.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from tokenspeed import _native
from tokenspeed.pack_file import ConfigJson
from tokenspeed.runtime.pack_device import GraphLoader, held_open, opened, weights_file
from tokenspeed.runtime.places import Gpu
from tokenspeed.step import align
from tokenspeed.tuning_pack import FORMAT_VERSION, RESULTS_KIND, Candidate, Case, Shape, TuningPack, chain

ROUNDS = 5
"""Times that every candidate still in the race takes its turn."""
REPLAYS = 4
"""Timed replays of a turn, behind one that is not."""
_KEEP = (1.5, 1.2, 1.1, 1.05)
"""After each round: how many times the best time a candidate may take to stay in the race; the last holds on."""
_TIMED_STEPS = 64
_KEPT = "what was measured before it"
_SET_ALIGNMENT = 4096
_FILL_BYTES = 2 * 8388593
"""Period of the random bytes: of no simple ratio to any matrix, so that no two copies of one are equal."""
_FILL_SEED = 20


@dataclass(frozen=True)
class Timed:
    """A candidate, the median microseconds of its call, and (largest - smallest) / median of its replays."""

    config: ConfigJson
    us: float
    spread: float

    def to_json(self) -> dict[str, Any]:
        return {"us": round(self.us, 3), "spread": round(self.spread, 3), "config": dict(self.config)}


@dataclass(frozen=True)
class Outcome:
    """One case: the candidates, fastest first; those that are out, with the reason; microseconds of what came before
    each call, which their own do not include (0 for nothing); how often each was replayed at most."""

    shape: Shape
    case: Case
    timed: tuple[Timed, ...] = ()
    excluded: tuple[tuple[ConfigJson, str], ...] = ()
    before_us: float = 0.0
    replays: int = 0

    def to_json(self) -> dict[str, Any]:
        shape, case = self.shape, self.case
        return {
            "family": shape.family, "op": shape.op, **shape.key, "M": case.rows, "dtype": shape.dtype,
            "bytes": case.nbytes, "flops": case.flops, "calls": case.repeats, "replays": self.replays,
            "before_us": round(self.before_us, 3),
            "timed": [timed.to_json() for timed in self.timed],
            "excluded": [{"config": dict(config), "reason": reason} for config, reason in self.excluded],
        }  # fmt: skip


@dataclass
class Results:
    """What a run found; it may end before it has come to all cases."""

    pack: TuningPack
    gpu: Gpu
    outcomes: list[Outcome] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As ``tokenspeed tune merge`` reads it."""
        manifest = self.pack.manifest
        return {
            "kind": RESULTS_KIND, "format_version": FORMAT_VERSION, "target": manifest.target, "pack": self.pack.digest,
            "models": list(manifest.models), "device": self.gpu.name, "driver": self.gpu.driver,
            "date": str(date.today()),
            "peak": {"part": manifest.peak.part, "bytes_per_s": manifest.peak.bytes_per_s,
                     "flops_per_s": manifest.peak.flops_per_s},
            "entries": [outcome.to_json() for outcome in self.outcomes], "skipped": list(self.skipped),
        }  # fmt: skip


def measure(
    results: Results,
    *,
    seconds: float | None = None,
    report: Callable[[int, int, Outcome], None] = lambda done, total, outcome: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Time every case of the pack into ``results``, which also hold what was found before an error.

    Args:
        seconds: how long to take about; cases share what is left of it equally, and those that it does not reach are
            skipped. None takes what every case needs.
        report: called after each case with (cases done, all cases, the case).

    Raises:
        ArtifactError: a damaged pack. ResourceError: too little memory or disk, or the device failed.
    """
    pack, deadline = results.pack, None if seconds is None else clock() + seconds
    shapes = pack.manifest.shapes
    total, done = sum(len(shape.cases) for shape in shapes), 0
    most = max((shape.weights_bytes for shape in shapes), default=0)
    weights = weights_file("tune", "random weights", most, _filling(most))
    with weights as file, held_open(results.gpu):
        for shape in shapes:
            if deadline is not None and clock() >= deadline:
                results.skipped += [f"{shape} M={case.rows}" for case in shape.cases]
                done += len(shape.cases)
                continue
            with opened(results.gpu, shape, file, kept=_KEPT, timed_steps=_TIMED_STEPS) as device:
                bench = _Bench(pack, shape, device)
                for case in shape.cases:
                    now, done = clock(), done + 1
                    if deadline is not None and now >= deadline:
                        results.skipped.append(f"{shape} M={case.rows}")
                        continue
                    end = None if deadline is None else now + (deadline - now) / (total - done + 1)
                    outcome = bench.outcome(case, lambda end=end: end is not None and clock() >= end)  # type: ignore[misc]
                    results.outcomes.append(outcome)
                    report(done, total, outcome)


# --- what matrices hold ---------------------------------------------------------------------------


def filling() -> bytes:
    """Pseudo-random bytes that are sane numbers in bfloat16 and in float32: 2^-7 to 1/2, of either sign."""
    block = bytearray(random.Random(_FILL_SEED).randbytes(_FILL_BYTES))
    block[1::2] = block[1::2].translate(bytes((byte & 0x80) | (0x3C + byte % 3) for byte in range(256)))
    return bytes(block)


def _filling(nbytes: int) -> Iterator[memoryview]:
    """``nbytes`` of it, over and over, in pieces."""
    block = filling()
    for start in range(0, nbytes, len(block)):
        yield memoryview(block)[: nbytes - start]


# --- one shape on the device ----------------------------------------------------------------------


class _Bench:
    """A device with the regions of one shape, and what its graphs need."""

    def __init__(self, pack: TuningPack, shape: Shape, device: Any):
        self._pack, self._shape, self._device = pack, shape, device
        self._graphs = GraphLoader(pack, device)
        self._inputs = pack.read_graph(shape.inputs)
        self._fetch = self._graphs.load(shape.fetch, pack.read_graph(shape.fetch))

    def outcome(self, case: Case, over: Callable[[], bool]) -> Outcome:
        """Check and time all candidates of ``case``; no new round begins when ``over`` says so."""
        excluded: list[tuple[ConfigJson, str]] = []
        loaded: list[tuple[Candidate, int]] = []
        for candidate in case.candidates:
            try:
                loaded.append((candidate, self._load(candidate.graph, case.repeats)))
            except _native.GraphError as e:
                excluded.append((candidate.config, f"it cannot be loaded: {e}"))
        good, wrong = self._agreeing(case, loaded)
        excluded += wrong
        if not good:
            return Outcome(self._shape, case, (), tuple(excluded))
        before = self._load(case.before, case.repeats) if case.before else None
        times, own, replays = self._race(case.rows, [graph for _, graph in good], before, over)
        timed = [
            Timed(candidate.config, (statistics.median(found) - own) * 1e6 / case.repeats, _spread(found))
            for (candidate, _), found in zip(good, times, strict=True)
        ]
        # Who stayed in the race longer comes first: the others were left behind.
        order = sorted(range(len(timed)), key=lambda i: (-len(times[i]), timed[i].us))
        ranked = tuple(timed[i] for i in order)
        return Outcome(self._shape, case, ranked, tuple(excluded), own * 1e6 / case.repeats, replays)

    def _load(self, name: str, repeats: int) -> int:
        """The handle of the graph of ``repeats`` calls. Raises ArtifactError, _native.GraphError."""
        return self._graphs.load(name, chain(self._inputs, self._pack.read_graph(name), self._shape, repeats))

    def _agreeing(
        self, case: Case, loaded: Sequence[tuple[Candidate, int]]
    ) -> tuple[list[tuple[Candidate, int]], list[tuple[ConfigJson, str]]]:
        """(candidates whose results are those of most, the others with the reason)."""
        if not loaded:
            return [], []
        other = self._load(loaded[0][0].graph, 1)  # one call: of other weights than the last of a chain
        stale = self._result(other, case.rows, other)
        first: bytes | None = None
        classes: dict[bytes, list[tuple[Candidate, int]]] = {}
        wrong: list[tuple[ConfigJson, str]] = []
        for candidate, graph in loaded:
            result = self._result(graph, case.rows, other)
            if result == stale:
                wrong.append((candidate.config, "it leaves the result of the call before it"))
                continue
            first = first or result
            key = b"" if result == first else hashlib.blake2b(result).digest()
            classes.setdefault(key, []).append((candidate, graph))
        best = max(classes.values(), key=len, default=[])  # of equal ones, that of the earliest: of today's choice
        for members in classes.values():
            if members is not best:
                reason = f"its result has other bits than that of {len(best)} others"
                wrong += [(candidate.config, reason) for candidate, _ in members]
        return best, wrong

    def _result(self, graph: int, rows: int, before: int) -> bytes:
        """What ``graph`` computes where ``before`` has just left its own result."""
        device, shape = self._device, self._shape
        for each in (before, graph, self._fetch):
            device.wait(device.submit(each, rows, 0, rows, 1))
        start = align(shape.io_bytes, _SET_ALIGNMENT) + shape.result_offset
        return bytes(device.view("io")[start : start + rows * shape.result_row_bytes])

    def _race(
        self, rows: int, graphs: Sequence[int], before: int | None, over: Callable[[], bool]
    ) -> tuple[list[list[float]], float, int]:
        """(seconds of the replays of each graph, median of those of ``before``, most replays of one graph).

        All take turns, in opposite order from round to round, so that whatever drifts meets all alike.
        """
        times: list[list[float]] = [[] for _ in graphs]
        own: list[float] = []
        racing = list(range(len(graphs)))
        for number in range(ROUNDS):
            if before is not None:
                own += self._turn(before, rows)
            for i in racing if number % 2 == 0 else reversed(racing):
                times[i] += self._turn(graphs[i], rows)
            if over():
                break
            medians = {i: statistics.median(times[i]) for i in racing}
            limit = min(medians.values()) * _KEEP[min(number, len(_KEEP) - 1)]
            runner_up = sorted(medians.values())[:2][-1]
            racing = [i for i in racing if medians[i] <= max(limit, runner_up)]
        return times, statistics.median(own) if own else 0.0, max(map(len, times))

    def _turn(self, graph: int, rows: int) -> list[float]:
        """Seconds of some replays in a row, of which the device always has the next one at hand."""
        device = self._device
        device.step_times()  # those of before
        tickets: list[int] = []
        for i in range(1 + REPLAYS):
            if i >= 2:
                device.wait(tickets[i - 2])
            tickets.append(device.submit(graph, rows, 0, 0, i % 2))
        device.wait(tickets[-1])
        seconds: Mapping[int, float] = {ticket: took for ticket, _, _, took, _ in device.step_times()}
        return [seconds[ticket] for ticket in tickets[1:]]


def _spread(times: Sequence[float]) -> float:
    return (max(times) - min(times)) / statistics.median(times)
