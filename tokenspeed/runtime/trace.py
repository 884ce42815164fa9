"""Where the time goes from exec on: spans of every thread, in the format of Chrome's tracing.

``start`` begins a trace of this process; until then ``span`` and ``mark`` cost a look at a variable. The file opens
in https://ui.perfetto.dev and in chrome://tracing: time 0 is the process's start, to the kernel's clock tick (10 ms).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenspeed.errors import ResourceError

MOST_EVENTS = 200_000
"""Events that a trace holds; later ones are only counted, so that a server may run under a trace for long."""
DEVICE_TRACK = 0
"""Thread id of the track for what the device does: no thread has it."""


class Trace:
    """Events of this process. Any thread may add to it.

    Times are those of ``time.perf_counter`` in seconds, which on Linux is the clock of ``time.monotonic``.
    """

    def __init__(self) -> None:
        self._exec = time.perf_counter() - seconds_since_exec()
        self._events: list[dict[str, Any]] = []
        self._threads: dict[int, str] = {DEVICE_TRACK: "device"}
        self._dropped = 0
        self._once: set[str] = set()

    @property
    def exec_time(self) -> float:
        """When the process started."""
        return self._exec

    def add(self, name: str, start: float, end: float, *, track: int | None = None, **args: Any) -> None:
        """A span of the calling thread, or of the thread with the native id ``track``."""
        self._append("X", name, start, track, {"dur": round((end - start) * 1e6, 1)}, args)

    def mark(self, name: str, *, once: bool = False, **args: Any) -> None:
        """A moment: now. With ``once`` only the first of that name counts."""
        if once:
            if name in self._once:
                return
            self._once.add(name)
        self._append("i", name, time.perf_counter(), None, {"s": "p"}, args)

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, started, time.perf_counter(), **args)

    def _append(
        self, phase: str, name: str, at: float, track: int | None, more: dict[str, Any], args: dict[str, Any]
    ) -> None:
        if len(self._events) >= MOST_EVENTS:
            self._dropped += 1
            return
        if track is None:
            track = threading.get_native_id()
            if track not in self._threads:
                self._threads[track] = threading.current_thread().name
        self._threads.setdefault(track, "driver")  # of a thread that noted nothing itself
        event = {"ph": phase, "name": name, "pid": os.getpid(), "tid": track, "ts": round((at - self._exec) * 1e6, 1)}
        self._events.append({**event, **more, "args": args} if args else {**event, **more})

    def to_json(self) -> dict[str, Any]:
        """The trace as Chrome's JSON object: times in microseconds."""
        pid = os.getpid()
        names = [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": name}}
            for thread, name in sorted(self._threads.items())
        ]
        return {
            "displayTimeUnit": "ms",
            "otherData": {"dropped_events": self._dropped},
            "traceEvents": [*names, *sorted(self._events, key=lambda event: float(event["ts"]))],
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file. Raises ResourceError when it cannot be written."""
        import json

        try:
            Path(path).write_text(json.dumps(self.to_json()) + "\n")
        except OSError as e:
            raise ResourceError(f"cannot write the trace {path}: {e.strerror}", hint="choose another --trace") from None


_current: Trace | None = None


def start() -> Trace:
    """Begin a trace of this process, in place of an earlier one. What ran before is one span from exec to now."""
    global _current
    _current = Trace()
    _current.add("interpreter, command line", _current.exec_time, time.perf_counter())
    return _current


def stop() -> None:
    """End it: ``span`` and ``mark`` do nothing again."""
    global _current
    _current = None


def current() -> Trace | None:
    """The trace that runs, if any."""
    return _current


@contextmanager
def span(name: str, **args: Any) -> Iterator[None]:
    """A span of the calling thread in the current trace, if there is one."""
    if _current is None:
        yield
        return
    with _current.span(name, **args):
        yield


def mark(name: str, *, once: bool = False, **args: Any) -> None:
    """A moment in the current trace, if there is one."""
    if _current is not None:
        _current.mark(name, once=once, **args)


@contextmanager
def writing(path: str | None) -> Iterator[None]:
    """Trace what runs inside, and write the file at its end, however it ends. Nothing for None."""
    if path is None:
        yield
        return
    trace = start()
    try:
        yield
    finally:
        stop()
        trace.write(path)


def seconds_since_exec() -> float:
    """Seconds since this process started (its resolution is the kernel's clock tick, 10 ms)."""
    with open("/proc/self/stat", "rb") as f:
        started_ticks = int(f.read().rsplit(b")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
