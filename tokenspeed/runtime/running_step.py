"""A step in flight, as the engine keeps it, and where the host's time for it went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenspeed.runtime import trace
from tokenspeed.runtime.executor import DeviceError, InFlight
from tokenspeed.runtime.guard import HostTimes, StepParts


@dataclass(slots=True)
class RunningStep:
    """A step in flight, and when (seconds) its parts were done. ``started`` is the error if it could not start."""

    step: Any
    started: InFlight | DeviceError
    began: float
    planned: float
    submitted: float
    decision: dict[str, Any] | None  # if the scheduler is traced

    def finished(self, times: HostTimes, done: float, committed: float) -> None:
        """Note where the host's time went: of a step that was done at ``done`` and is ``committed`` now."""
        step = self.step
        times.add(step.num_seqs, StepParts(self.planned - self.began, self.submitted - self.planned, committed - done))
        if (running := trace.current()) is not None:
            sizes = {"step": step.id, "tokens": step.num_tokens, "seqs": step.num_seqs}
            running.add("plan", self.began, self.planned, **sizes)
            running.add("submit", self.planned, self.submitted, **sizes)
            running.add("commit", done, committed, **sizes)
            running.add("step", self.submitted, done, track=trace.DEVICE_TRACK, **sizes)
