"""Who waits to run for the first time, how many may, and how long a client that is refused should stay away."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import NoReturn

from tokenspeed.errors import QueueFullError, RequestError
from tokenspeed.runtime.request import MAX_PRIORITY

WINDOW_SECONDS = 30.0
"""How far back the drain rate of the queue looks."""
MOST_LEAVES = 256
"""Of the queue, remembered: a refusal costs a look at each."""
MAX_RETRY_SECONDS = 60


@dataclass(slots=True, eq=False)
class Place:
    """Of one request in the queue. ``left`` once it ran or ended."""

    tenant: str
    priority: int
    left: bool = False


class WaitingRoom:
    """Counts requests from submission until they run for the first time or end. Any thread may call it.

    Times are seconds of one clock that never falls.

    Args:
        most: requests that may wait at once; one more is refused.
        most_per_tenant: the same of each tenant; None: no bound but the other.
    """

    def __init__(self, most: int, most_per_tenant: int | None = None):
        self._most = most
        self._most_per_tenant = most_per_tenant
        self._lock = threading.Lock()
        self._by_tenant: Counter[str] = Counter()
        self._by_priority = [0] * (MAX_PRIORITY + 1)
        self._num_waiting = 0
        self._busy_since = 0.0  # when the queue was empty last
        self._leaves: deque[tuple[float, str]] = deque(maxlen=MOST_LEAVES)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def by_priority(self) -> tuple[int, ...]:
        """Waiting requests of each class, from 0."""
        return tuple(self._by_priority)

    def check_size(self, number: int) -> None:
        """Raises RequestError for so many requests that they could never wait at the same time."""
        most = min(self._most, self._most_per_tenant or self._most)
        if number > most:
            raise RequestError(
                f"prompts times n is {number}, and at most {most} completions may wait at once",
                param="prompt",
                hint="send fewer in one request",
            )

    def enter(self, tenant: str, priority: int, now: float) -> Place:
        """A request joins the queue. Raises QueueFullError, which says when to come back."""
        with self._lock:
            if self._num_waiting >= self._most:
                self._refuse("requests wait already", self._num_waiting, None, now)
            if self._most_per_tenant is not None and self._by_tenant[tenant] >= self._most_per_tenant:
                self._refuse("requests of this key or user wait already", self._by_tenant[tenant], tenant, now)
            if not self._num_waiting:
                self._busy_since = now
            self._num_waiting += 1
            self._by_tenant[tenant] += 1
            self._by_priority[priority] += 1
        return Place(tenant, priority)

    def leave(self, place: Place, now: float) -> None:
        """It runs, or has ended. Again changes nothing."""
        with self._lock:
            if place.left:
                return
            place.left = True
            self._num_waiting -= 1
            self._by_priority[place.priority] -= 1
            self._by_tenant[place.tenant] -= 1
            if not self._by_tenant[place.tenant]:
                del self._by_tenant[place.tenant]  # tenants come and go: no list of all of them is kept
            self._leaves.append((now, place.tenant))

    def _refuse(self, what: str, waiting: int, tenant: str | None, now: float) -> NoReturn:
        seconds = self._seconds_to_drain(waiting, tenant, now)
        raise QueueFullError(
            f"{waiting} {what}, which is the limit",
            hint=f"retry in {seconds} s",
            retry_after=seconds,
            of_tenant=tenant is not None,
        )

    def _seconds_to_drain(self, waiting: int, tenant: str | None, now: float) -> int:
        """Until all that wait now will have left, at the rate of late: whole seconds, from 1 to MAX_RETRY_SECONDS.

        When none has left of late it is as long as that has been so: clients come back ever later.
        """
        since = max(self._busy_since, now - WINDOW_SECONDS)
        if len(self._leaves) == MOST_LEAVES:
            since = max(since, self._leaves[0][0])
        left = sum(1 for at, of in self._leaves if at >= since and tenant in (None, of))
        seconds = (now - since) * (waiting / left if left else 1)
        return min(max(1, math.ceil(seconds)), MAX_RETRY_SECONDS)
