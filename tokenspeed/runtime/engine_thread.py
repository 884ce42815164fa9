"""The engine's own thread: takes what is asked of it, steps, and ends what has to end."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tokenspeed import _native
from tokenspeed.errors import EngineClosedError, EngineFailedError, WeightsError
from tokenspeed.runtime.engine_info import EngineInfo
from tokenspeed.runtime.executor import DeviceError, Executor, is_lost
from tokenspeed.runtime.inbox import Inbox, Submission
from tokenspeed.runtime.live_requests import LiveRequests
from tokenspeed.runtime.request import FinishReason
from tokenspeed.runtime.stepper import Stepper
from tokenspeed.runtime.weight_update import UNKNOWN_VERSION, WeightCounters, WeightUpdate, When

_log = logging.getLogger("tokenspeed.engine")


class EngineThread(threading.Thread):
    """Runs steps while there are requests, and replaces weights between two of them. It alone changes the scheduler.

    Args:
        info: what the engine serves.
        inbox: what other threads ask.
        scheduler, executor, requests: those of ``stepper``.

    Attributes:
        info: what the engine serves now: weights change.
        weight_counters: of updates. ``started`` is for whoever asks for one, under ``inbox.wake``.
    """

    def __init__(
        self,
        info: EngineInfo,
        inbox: Inbox,
        scheduler: Any,
        executor: Executor,
        requests: LiveRequests,
        stepper: Stepper,
    ):
        super().__init__(name="tokenspeed-engine", daemon=True)
        self.info = info
        self.weight_counters = WeightCounters()
        self._inbox = inbox
        self._scheduler = scheduler
        self._executor = executor
        self._requests = requests
        self._stepper = stepper
        self._update: WeightUpdate | None = None  # that waits until requests have ended
        self._held: deque[Submission | WeightUpdate] = deque()  # what came behind it

    def has_work(self) -> bool:
        """Whether a request or an update of weights is here that has not ended. Any thread may ask, under the inbox's
        ``wake``."""
        return bool(self._requests.by_id or self._inbox.items or self._update)

    def run(self) -> None:
        reason, error = FinishReason.ABORT, None
        try:
            while self._wait_for_work():
                self._take_inbox()
                if self._requests.num_with_timeout or self._held:
                    self._expire()
                if self._update is not None and not self._requests.by_id:
                    self._apply_update(self._update)
                self._stepper.step()
        except DeviceError as e:  # of a device that is lost, which it says: no step will run any more
            reason, error = FinishReason.ERROR, str(e)
        except BaseException as e:  # a bug of ours
            reason, error = FinishReason.ERROR, f"the engine failed: {e!r}"
            raise
        finally:
            with self._inbox.wake:
                self._inbox.closing = self._inbox.stopped = True
                self._take_inbox_after_stop()
            self._tell(self._stepper.publish_committed)
            for request_id in list(self._requests.by_id):
                self._tell(self._requests.end, request_id, reason, error)
            self._inbox.fail(error)
            with self._inbox.wake:
                self._inbox.wake.notify_all()

    def _wait_for_work(self) -> bool:
        inbox = self._inbox
        with inbox.wake:
            if not self.has_work():
                inbox.wake.notify_all()  # whoever waits in close()
            inbox.wake.wait_for(lambda: self.has_work() or self._stepper.in_flight or inbox.stopped)
            return not inbox.stopped

    def _take_inbox(self) -> None:
        items = self._inbox.items
        while items:
            item = items.popleft()
            if isinstance(item, int):
                self._take_abort(item)
            elif self._update is not None:
                self._held.append(item)
            elif isinstance(item, WeightUpdate):
                self._begin_update(item)
            else:
                self._take_submission(item)

    def _take_submission(self, item: Submission) -> None:
        self._requests.keep(item.request_id, item.live)
        try:
            self._scheduler.submit(item.request_id, item.prompt_ids, item.params, time.monotonic_ns())
        except (ValueError, TypeError, _native.QueueFull) as e:  # that request's own fault: it ends, others go on
            self._requests.end(item.request_id, FinishReason.ERROR, str(e))
        else:
            self._requests.note_submission(item.request_id, len(item.prompt_ids))

    def _take_abort(self, request_id: int) -> None:
        if request_id in self._requests.by_id:
            self._stepper.publish_committed()
            self._scheduler.abort(request_id)
            self._requests.end(request_id, FinishReason.ABORT)
        else:
            self._end_held(lambda item: item.request_id == request_id, FinishReason.ABORT)

    def _expire(self) -> None:
        """End the requests whose time is up."""
        expired = self._scheduler.expire(time.monotonic_ns())
        if expired:
            self._stepper.publish_committed()
            for request_id in expired:
                self._requests.end(request_id, FinishReason.TIMEOUT)
        if self._held:
            now = time.monotonic()
            self._end_held(lambda item: item.deadline is not None and item.deadline <= now, FinishReason.TIMEOUT)

    def _end_held(self, ends: Callable[[Submission], bool], reason: FinishReason) -> None:
        """End, of the requests behind an update, those that ``ends`` says."""
        for item in [item for item in self._held if isinstance(item, Submission) and ends(item)]:
            self._held.remove(item)
            self._requests.keep(item.request_id, item.live)
            self._requests.end(item.request_id, reason)

    def _begin_update(self, update: WeightUpdate) -> None:
        """Let what an update waits for end, or see that nothing of what runs will be read again."""
        self._update = update
        if update.when is When.DRAIN:
            return  # the loop goes on until no request is left
        self._stepper.finish_all()
        for request_id, state, *_ in self._scheduler.requests():
            if update.when is When.PREEMPT:
                self._scheduler.preempt(request_id, always=True)
            elif state != "waiting":
                self._scheduler.abort(request_id)
                self._requests.end(request_id, FinishReason.ABORT)
        self._apply_update(update)

    def _apply_update(self, update: WeightUpdate) -> None:
        """Replace the weights, while no step runs and no request has keys and values; what came behind goes on."""
        self._stepper.finish_all()
        error: Exception | None = None
        began, waited = time.perf_counter(), time.monotonic() - update.asked
        try:
            self._executor.device.update_weights(update.file.open_path, update.file.offset, update.file.nbytes)
        except DeviceError as e:
            if is_lost(e):
                self._update = None
                update.finish(EngineFailedError(str(e)))
                raise
            error = WeightsError(f"the weights {update.file.path} could not be taken: {e}", param="path")
            if isinstance(e, _native.WeightsUnknownError):
                self._note_weights(UNKNOWN_VERSION)
        else:
            self._note_weights(update.version)
            seconds = time.perf_counter() - began
            self.weight_counters.add(seconds)
            update.succeeded(seconds, waited)
        self._update = None
        self._inbox.items.extendleft(reversed(self._held))
        self._held.clear()
        update.finish(error)

    def _note_weights(self, version: str) -> None:
        """What is cached is of other weights."""
        self._scheduler.flush_prefixes()
        self._stepper.publish_kv_events()
        self.info = replace(self.info, weights_version=version)
        self._requests.weights_version = version
        _log.info("the weights are %s", version)

    def _take_inbox_after_stop(self) -> None:
        for item in (self._update, *self._held, *self._inbox.items):
            if isinstance(item, Submission):
                self._requests.keep(item.request_id, item.live)
            elif isinstance(item, WeightUpdate):
                item.finish(EngineClosedError("the engine has stopped before the weights were updated"))
        self._update = None
        self._held.clear()
        self._inbox.items.clear()

    @staticmethod
    def _tell(function: Callable[..., None], *args: Any) -> None:
        """Call it; where a sink raises, which may be why the engine ends, all others are told still."""
        try:
            function(*args)
        except Exception:
            _log.exception("a sink of events raised")
