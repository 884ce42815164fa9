"""What a runtime counts about itself: what it must not do once it is ready, and what each step costs the host."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

AFTER_READY = ("compilations", "module_loads", "captures", "instantiations", "allocations")
"""What a closed runtime never does after ready. Counters of these names stay 0."""
COMPILERS = frozenset({"torch", "triton", "numba", "cupy", "tvm", "jax", "llvmlite", "tensorrt", "pycuda"})
"""Packages that bring a compiler. The runtime imports none; one in its process counts as a compilation."""
SAMPLES = 4096


_DEVICE_NAMES = {
    "compilations": "compilations_after_seal",
    "module_loads": "modules_loaded_after_seal",
    "captures": "captures_after_seal",
    "instantiations": "graphs_loaded_after_seal",
    "allocations": "allocations_after_seal",
}


def after_ready(counters: Mapping[str, Any]) -> dict[str, int]:
    """What a device of either kind did after it was sealed, by the names of AFTER_READY.

    Every loaded graph is an instantiation, also on a CPU, where it is bound to addresses. A CPU device has no modules
    to load and nothing to capture, and counts neither.
    """
    counts = {name: int(counters.get(_DEVICE_NAMES[name], 0)) for name in AFTER_READY}
    counts["instantiations"] = max(counts["instantiations"], int(counters.get("graph_instantiations_after_seal", 0)))
    counts["compilations"] += len(COMPILERS.intersection(sys.modules))
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


class HostTimes:
    """What the host spends on steps: to ``plan`` one (the scheduler), to ``submit`` it (copy its inputs, launch) and to
    ``commit`` it, which is what the device could be kept waiting for, and to ``publish`` its tokens, which is not."""

    def __init__(self) -> None:
        self.plan = PartTimes()
        self.submit = PartTimes()
        self.commit = PartTimes()
        self.publish = PartTimes()
        self.steps: deque[tuple[int, float]] = deque(maxlen=SAMPLES)
        """(sequences, seconds of plan + submit + commit) of the latest steps."""

    def add(self, num_seqs: int, plan: float, submit: float, commit: float) -> None:
        self.plan.add(plan)
        self.submit.add(submit)
        self.commit.add(commit)
        self.steps.append((num_seqs, plan + submit + commit))

    def to_json(self) -> dict[str, dict[str, float]]:
        return {
            "plan": self.plan.to_json(),
            "submit": self.submit.to_json(),
            "commit": self.commit.to_json(),
            "publish": self.publish.to_json(),
        }


def percentiles(samples: list[float]) -> dict[str, float]:
    """p50, p99 (nearest rank) and max; zeros for no samples."""
    if not samples:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    ordered = sorted(samples)
    rank = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99)]
    return {"p50": rank[0], "p99": rank[1], "max": ordered[-1]}
