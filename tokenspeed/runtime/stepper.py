"""One step after another: the only place where scheduler and executor meet."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from tokenspeed import _native
from tokenspeed.runtime.executor import DeviceError, Executor, InFlight, MoveError, is_lost
from tokenspeed.runtime.guard import HostTimes
from tokenspeed.runtime.kv_events import KvEventPublisher
from tokenspeed.runtime.live_requests import LiveRequests
from tokenspeed.runtime.request import FinishReason, TokenLogprobs
from tokenspeed.runtime.running_step import RunningStep
from tokenspeed.runtime.scheduler_trace import SchedulerTrace, StepTimes

MOVE_FAILURES = 3
"""So many steps in a row whose pages could not move between device and host, and the host tier is given up."""

_log = logging.getLogger("tokenspeed.engine")


class Stepper:
    """Runs the scheduler's steps on the executor, and has requests told of what they draw. Belongs to the engine's
    thread; others read its counters.

    Args:
        requests: those that the scheduler holds.
        num_host_pages: pages of the host tier.
        scheduler_trace: is told of every step.
        kv_events: is told of every page that comes to the prefix index or leaves it.

    Attributes:
        in_flight: the steps that the device has, oldest first.
        num_steps: steps that ran, since the start.
        num_host_pages: as above; 0 once the host tier is given up.
        host_times: what steps cost the host.
    """

    def __init__(
        self,
        scheduler: Any,
        executor: Executor,
        requests: LiveRequests,
        num_host_pages: int,
        scheduler_trace: SchedulerTrace | None,
        kv_events: KvEventPublisher | None,
    ):
        self.in_flight: deque[RunningStep] = deque()
        self.num_steps = 0
        self.num_host_pages = num_host_pages
        self.host_times = HostTimes()
        self._scheduler = scheduler
        self._executor = executor
        self._requests = requests
        self._trace = scheduler_trace
        self._kv_events = kv_events
        self._committed: deque[tuple[_native.Drawn, dict[int, TokenLogprobs]]] = deque()
        self._failed_moves = 0  # in a row

    def step(self) -> None:
        """Start the next step, tell of the one before, and take the results of the oldest once enough are in flight.

        With two io sets the device has its next step before this thread looks at the last one's results; with one
        it waits for them.
        """
        step = self._start_step()
        self.publish_committed()
        if self.in_flight and (step is None or len(self.in_flight) == self._executor.io_sets):
            self._finish_oldest()
        self.publish_kv_events()

    def publish_kv_events(self) -> None:
        if self._kv_events is not None and (events := self._scheduler.take_events()):
            self._kv_events.put(events)

    def finish_all(self) -> None:
        while self.in_flight:
            self._finish_oldest()
        self.publish_committed()

    def publish_committed(self) -> None:
        """Turn committed steps into events. The device may run the next step meanwhile."""
        while self._committed:
            began = time.perf_counter()
            drawn, logprobs = self._committed.popleft()
            self._requests.publish(drawn, logprobs)
            self.host_times.publish.add(time.perf_counter() - began)

    def _start_step(self) -> Any:
        """Plan a step and give it to the device; None when there is nothing to do now."""
        began = time.perf_counter()
        step = self._scheduler.next_step(time.monotonic_ns())
        if step is None:
            return None
        if step.num_admitted:
            self._requests.note_admissions(step)
        planned = time.perf_counter()
        try:
            started: InFlight | DeviceError = self._executor.submit(step)
        except DeviceError as e:
            if is_lost(e):
                raise
            started = e  # its requests end when its turn comes: steps end in order
        else:
            if step.num_moves:
                self._failed_moves = 0
        submitted = time.perf_counter()
        decision = None if self._trace is None else step.decision
        self.in_flight.append(RunningStep(step, started, began, planned, submitted, decision))
        return step

    def _finish_oldest(self) -> None:
        running = self.in_flight.popleft()
        step = running.step
        try:
            if not isinstance(running.started, InFlight):
                raise running.started
            outputs = self._executor.wait(running.started, self._scheduler.warm)
        except DeviceError as e:
            if is_lost(e):
                raise
            for request_id in self._scheduler.fail_step(step.id):
                self._requests.end(request_id, FinishReason.ERROR, f"the device failed: {e}")
            if isinstance(e, MoveError):
                self._note_failed_move(e)
            self._trace_step(running, time.perf_counter(), time.perf_counter(), error=str(e))
            return
        done = time.perf_counter()
        drawn = self._scheduler.commit(step.id, outputs.tokens)
        # Read now: the step after the next one writes to the same place.
        logprobs = self._requests.collect_logprobs(step, outputs) if self._requests.num_asking_logprobs else {}
        committed = time.perf_counter()
        self._committed.append((drawn, logprobs))
        self.num_steps += 1
        running.finished(self.host_times, done, committed)
        self._trace_step(running, done, committed, drawn)
        if self._executor.io_sets == 1:
            self.publish_committed()

    def _trace_step(
        self, running: RunningStep, done: float, committed: float, drawn: Any = (), error: str | None = None
    ) -> None:
        if self._trace is not None and running.decision is not None:
            times = StepTimes(running.began, running.planned, running.submitted, done, committed)
            self._trace.step(running.decision, times, drawn, error)

    def _note_failed_move(self, error: MoveError) -> None:
        self._failed_moves += 1
        _log.warning("a step failed: %s", error)
        if self._failed_moves == MOVE_FAILURES:
            self._scheduler.drop_host_tier()
            self.num_host_pages = 0
            _log.error("the host tier is given up after %d failures in a row; requests go on without", MOVE_FAILURES)
