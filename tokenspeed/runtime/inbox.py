"""What the threads that ask and the engine's own share: the inbox, and how far the engine's end has come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenspeed.runtime.live_requests import Live
from tokenspeed.runtime.weight_update import WeightUpdate


@dataclass(frozen=True)
class Submission:
    """A request on its way to the scheduler; ``params`` is what the scheduler takes."""

    request_id: int
    prompt_ids: list[int]
    params: Any
    live: Live
    deadline: float | None  # seconds of time.monotonic


class Inbox:
    """What is asked of the engine's thread.

    Attributes:
        wake: held by whoever changes anything here, and notified then. The engine's thread alone takes items, without.
        items: in order of arrival; ids are of requests to be aborted.
        closing: no requests and no weights are taken any more.
        stopped: the engine's thread has ended, or ends after the steps in flight.
        failure: why the engine failed, if it did.
    """

    def __init__(self) -> None:
        self.wake = threading.Condition()
        self.items: deque[Submission | WeightUpdate | int] = deque()
        self.closing = False
        self.stopped = False
        self.failure: str | None = None
        self._watchers: list[Callable[[str], None]] = []

    def put(self, item: Submission | WeightUpdate | int) -> None:
        """Leave ``item`` for the engine's thread. ``wake`` must be held: what the caller checked must still be so."""
        self.items.append(item)
        self.wake.notify()

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Have ``watcher`` called by ``fail``, or now if that has been."""
        with self.wake:
            failure = self.failure
            if failure is None:
                self._watchers.append(watcher)
        if failure is not None:
            watcher(failure)

    def fail(self, error: str | None) -> None:
        """The engine's thread is about to end; with an error, whoever watches is told."""
        with self.wake:
            self.failure = error
            watchers, self._watchers = self._watchers, []
        if error is not None:
            for watcher in watchers:
                watcher(error)
