"""What a runtime counts about itself: what it must not do once it is ready, and what each step costs the host."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

AFTER_READY = ("compilations", "module_loads", "captures", "instantiations", "allocations")
"""What a closed runtime never does after ready. Counters of these names stay 0."""
COMPILERS = frozenset({"torch", "triton", "numba", "cupy", "tvm", "jax", "llvmlite", "tensorrt", "pycuda"})
"""Packages that bring a compiler. The runtime imports none; one that comes into its process after ready counts as a
compilation. What a program had imported before, such as a trainer that embeds an engine, does not."""
SAMPLES = 4096


_DEVICE_NAMES = {
    "compilations": "compilations_after_seal",
    "module_loads": "modules_loaded_after_seal",
    "captures": "captures_after_seal",
    "instantiations": "graphs_loaded_after_seal",
    "allocations": "allocations_after_seal",
}


def compilers() -> frozenset[str]:
    """The packages of COMPILERS that this process has imported."""
    return COMPILERS.intersection(sys.modules)


def after_ready(counters: Mapping[str, Any], before: frozenset[str] = frozenset()) -> dict[str, int]:
    """What a device of either kind did after it was sealed, by the names of AFTER_READY. ``before`` is what
    ``compilers`` gave when it was.

    Every loaded graph is an instantiation, also on a CPU, where it is bound to addresses. A CPU device has no modules
    to load and nothing to capture, and counts neither.
    """
    counts = {name: int(counters.get(_DEVICE_NAMES[name], 0)) for name in AFTER_READY}
    counts["instantiations"] = max(counts["instantiations"], int(counters.get("graph_instantiations_after_seal", 0)))
    counts["compilations"] += len(compilers() - before)
    return counts


class PartTimes:
    """Seconds of one part of a step: how often, how long in all, and the latest ones."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.latest: deque[float] = deque(maxlen=SAMPLES)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.latest.append(seconds)

    def to_json(self) -> dict[str, float]:
        """Count and sum since the start; p50, p99 and the longest of the latest SAMPLES. Seconds."""
        return {"count": self.count, "seconds": self.seconds, **percentiles(list(self.latest))}


class StepParts(NamedTuple):
    """Seconds that one step cost the host, which a device could be kept waiting for: to ``plan`` it (the
    scheduler, which writes its inputs where the device reads them), to ``submit`` it (the driver's calls), to
    ``commit`` it."""

    plan: float
    submit: float
    commit: float


class HostTimes:
    """What the host spends on steps: the parts of ``StepParts``, and to ``publish`` tokens, for which no device
    waits."""

    def __init__(self) -> None:
        self.parts = {name: PartTimes() for name in StepParts._fields}
        self.publish = PartTimes()
        self.steps: deque[tuple[int, StepParts]] = deque(maxlen=SAMPLES)
        """Sequences and parts of the latest steps."""

    def add(self, num_seqs: int, parts: StepParts) -> None:
        for times, seconds in zip(self.parts.values(), parts, strict=True):
            times.add(seconds)
        self.steps.append((num_seqs, parts))

    def to_json(self) -> dict[str, dict[str, float]]:
        return {name: times.to_json() for name, times in {**self.parts, "publish": self.publish}.items()}


def percentiles(samples: list[float]) -> dict[str, float]:
    """p50, p99 (nearest rank) and max; zeros for no samples."""
    if not samples:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    ordered = sorted(samples)
    p50, p99 = (ordered[-(-len(ordered) * percent // 100) - 1] for percent in (50, 99))
    return {"p50": p50, "p99": p99, "max": ordered[-1]}
