"""A trace of the scheduler's decisions: a file of JSON lines, one per step, that `tokenspeed explain-step` renders.

The engine's thread only appends to a queue; another one makes text of it and writes. The queue is bounded: what finds
it full is counted, and the file says how many lines are missing and where.

Line 1 describes the engine (``HEADER``), each further line a step (``STEP``), the last one the end (``END``). Times are
seconds; ``at`` counts from the header's ``started``, which is seconds since 1970.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed import __version__
from tokenspeed.errors import ResourceError
from tokenspeed.runtime.sampling import tenant_number

if TYPE_CHECKING:
    from tokenspeed import _native
    from tokenspeed.runtime.waiting import Place

FORMAT = "tokenspeed scheduler trace"
FORMAT_VERSION = 1
MOST_QUEUED = 1 << 16
"""Steps and other news that may wait to be written; more are dropped, and counted."""
WRITE_SECONDS = 0.05
"""How often the queue is emptied."""

HEADER = {
    "format": str, "version": int, "tokenspeed": str, "started": float, "model": str, "target": str, "artifact": str,
    "limits": dict,
}  # fmt: skip
ADMITTED = {"request": int, "cached_tokens": int, "restored_tokens": int, "waited_ns": int, "resumed": bool}
SUBMITTED = {"request": int, "prompt_tokens": int, "max_tokens": int, "priority": int, "tenant": int}
ENDED = {"request": int, "reason": str}
STEP = {
    "step": int, "at": float, "plan_seconds": float, "submit_seconds": float, "run_seconds": float,
    "commit_seconds": float, "decodes": int, "chunks": int, "decode_tokens": int, "prefill_tokens": int, "waiting": int,
    "running": int, "free_pages": int, "cached_pages": int, "evicted_pages": int, "moved_out": int, "moved_in": int,
    "held": str, "admitted": [ADMITTED], "preempted": [int], "drew": [int], "submitted": [SUBMITTED], "ended": [ENDED],
    "error?": str, "dropped?": int,
}  # fmt: skip
END = {"end": bool, "steps": int, "dropped": int, "submitted": [SUBMITTED], "ended": [ENDED]}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step began to be planned, was planned, submitted, done on the device and committed: ``time.perf_counter``
    in seconds."""

    began: float
    planned: float
    submitted: float
    done: float
    committed: float


@dataclass(slots=True)
class _Step:
    decision: Mapping[str, Any]
    times: StepTimes
    drawn: Any  # of _native.Drawn
    error: str | None


@dataclass(slots=True)
class _News:
    """What happened between two steps, until the next line carries it."""

    submitted: list[dict[str, Any]] = field(default_factory=list)
    ended: list[dict[str, Any]] = field(default_factory=list)


class SchedulerTrace:
    """Writes a trace to a file. ``begin``, ``submitted``, ``step`` and ``ended`` belong to the engine and never block.

    Attributes:
        dropped: what found the queue full, or could not be written since the disk was full.

    Raises:
        ResourceError: the file cannot be made.
    """

    def __init__(self, path: str | Path, *, most_queued: int = MOST_QUEUED):
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except OSError as e:
            raise ResourceError(f"cannot write the scheduler's trace to {path}: {e.strerror}") from None
        self._not_queued = self._not_written = 0  # counted by the engine's thread, and by the writer's
        self._path = path
        self._most_queued = most_queued
        self._queue: deque[_Step | tuple[str, dict[str, Any]]] = deque()
        self._news = _News()
        self._steps = 0
        self._dropped_told = 0
        self._failed = False
        self._started = time.perf_counter()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="tokenspeed-trace", daemon=True)

    @property
    def dropped(self) -> int:
        return self._not_queued + self._not_written

    def begin(self, model: str, target: str, artifact: str, limits: Mapping[str, Any]) -> None:
        """What is traced. Before anything else, and once."""
        self._started = time.perf_counter()
        header = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "tokenspeed": __version__,
            "started": round(time.time(), 6),
            "model": model,
            "target": target,
            "artifact": artifact,
            "limits": dict(limits),
        }
        self._write(header)
        self._thread.start()

    def submitted(self, request_id: int, prompt_tokens: int, max_tokens: int | None, place: Place) -> None:
        """A request has come to the scheduler. Its tenant is written as a number, not by name."""
        request = {
            "request": request_id,
            "prompt_tokens": prompt_tokens,
            "max_tokens": max_tokens,
            "priority": place.priority,
            "tenant": tenant_number(place.tenant),
        }
        self._put(("submitted", request))

    def ended(self, request_id: int, reason: str) -> None:
        """A request has ended."""
        self._put(("ended", {"request": request_id, "reason": reason}))

    def step(self, decision: Mapping[str, Any], times: StepTimes, drawn: Any = (), error: str | None = None) -> None:
        """A step is over: ``decision`` of the step, ``drawn`` by its commit, or the error that it failed with."""
        self._put(_Step(decision, times, drawn, error))

    def close(self) -> None:
        """Write what is queued, and the last line. The engine must have stopped."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):  # what it could not write has been said
            self._file.close()

    def __enter__(self) -> SchedulerTrace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _put(self, item: _Step | tuple[str, dict[str, Any]]) -> None:
        if len(self._queue) >= self._most_queued or self._failed:
            self._not_queued += 1
        else:
            self._queue.append(item)

    # -- on the writer's thread --------------------------------------------------------------------------

    def _write_all(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(WRITE_SECONDS)
            while self._queue:
                self._take(self._queue.popleft())
            self._flush()
        end = {"end": True, "steps": self._steps, "dropped": self.dropped}
        self._write({**end, "submitted": self._news.submitted, "ended": self._news.ended})
        self._flush()

    def _take(self, item: _Step | tuple[str, dict[str, Any]]) -> None:
        if isinstance(item, tuple):
            kind, what = item
            (self._news.submitted if kind == "submitted" else self._news.ended).append(what)
            return
        news, self._news = self._news, _News()
        self._steps += 1
        self._write(_line(item, self._started, news, self._dropped_since()))

    def _dropped_since(self) -> int:
        """Of what was dropped, how much no line has told yet."""
        total, told = self.dropped, self._dropped_told
        self._dropped_told = total
        return total - told

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._failed:
            self._not_written += 1
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as e:
            self._fail(e)

    def _flush(self) -> None:
        if self._failed:
            return
        try:
            self._file.flush()
        except OSError as e:
            self._fail(e)

    def _fail(self, error: OSError) -> None:
        # Serving goes on: a trace is worth less than what it is about.
        self._failed = True
        self._not_written += 1
        print(f"the scheduler's trace ends: cannot write to {self._path}: {error.strerror}", file=sys.stderr)


def limits_of(config: _native.SchedulerConfig) -> dict[str, Any]:
    """What a step and the queue may hold, by the names of SchedulerConfig."""
    names = (
        "max_num_seqs", "max_prefill_tokens", "max_logit_rows", "max_model_len", "page_size", "num_pages",
        "num_host_pages", "max_waiting", "max_in_flight", "prefix_index",
    )  # fmt: skip
    return {**{name: getattr(config, name) for name in names}, "aging_seconds": config.aging_ns * 1e-9}


def _line(item: _Step, started: float, news: _News, dropped: int) -> dict[str, Any]:
    times, decision = item.times, item.decision
    drew: Sequence[tuple[int, int, str | None]] = list(item.drawn)
    finished = [{"request": request, "reason": finish} for request, _, finish in drew if finish is not None]
    line = {
        "step": decision["step"],
        "at": _rounded(times.began - started),
        "plan_seconds": _rounded(times.planned - times.began),
        "submit_seconds": _rounded(times.submitted - times.planned),
        "run_seconds": _rounded(times.done - times.submitted),
        "commit_seconds": _rounded(times.committed - times.done),
        **{name: value for name, value in decision.items() if name not in ("step", "now_ns")},
        "drew": [request for request, _, _ in drew],
        "submitted": news.submitted,
        "ended": [*news.ended, *finished],
    }
    if item.error is not None:
        line["error"] = item.error
    if dropped:
        line["dropped"] = dropped
    return line


def _rounded(seconds: float) -> float:
    return round(seconds, 7)
