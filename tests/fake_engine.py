"""An engine without a model, for tests of everything above the engine.

It keeps the Engine API's promises (one thread, events in order, one last event per request) and draws tokens
either from a script or from (seed, position) alone, so that replicas differ and repeat.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.errors import EngineClosedError, WeightsError
from tokenspeed.runtime.request import (
    EngineEvent,
    EventSink,
    FinishReason,
    RequestOptions,
    SamplingParams,
    TokenLogprobs,
)
from tokenspeed.runtime.tokenizer import Tokenizer
from tokenspeed.runtime.waiting import Place, WaitingRoom


@dataclass(frozen=True)
class FakeInfo:
    model: str = "fake-1b"
    target: str = "cpu:fake"
    dtype: str = "float32"
    vocab_size: int = 512
    max_model_len: int = 256
    max_top_logprobs: int = 20
    penalties: bool = True
    artifact_digest: str = "0123456789abcdef0123"
    weights_version: str = "0123456789abcdef0123"
    attestation: Mapping[str, str] = field(default_factory=dict)


@dataclass
class FakeStats:
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    steps: int
    preemptions: int = 0
    num_cached_pages: int = 30
    num_host_pages: int = 50
    num_host_pages_used: int = 20
    oldest_wait_seconds: float = 0.0
    waiting_by_priority: tuple[int, ...] = (0,) * 10
    scheduler: dict[str, int] = field(default_factory=lambda: {"prompt_tokens": 80, "cached_tokens": 60, "expired": 2})
    dropped: dict[str, int] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=lambda: {"allocations_after_seal": 0})
    after_ready: dict[str, int] = field(default_factory=lambda: {"allocations": 0, "compilations": 0})
    host: dict[str, Any] = field(default_factory=lambda: {"plan": {"count": 2, "seconds": 0.5}})
    weight_updates: int = 0
    weight_update_seconds: float = 0.0


@dataclass
class _Live:
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    sink: EventSink
    place: Place
    deadline: float = math.inf
    num_drawn: int = 0


class FakeEngine:
    """See the module. ``script`` are the tokens of every request (then the eos token); ``step_seconds`` paces steps.

    ``hold`` stops drawing until it is cleared; ``fail_after`` ends each request with an error after so many tokens;
    ``cached_tokens`` of each prompt count as found in the prefix index.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        script: Sequence[int] | None = None,
        step_seconds: float = 0.0,
        max_running: int = 64,
        max_waiting: int = 64,
        max_waiting_per_tenant: int | None = None,
        fail_after: int | None = None,
        cached_tokens: int = 0,
        info: FakeInfo | None = None,
    ):
        self.tokenizer = tokenizer
        self.info = info or FakeInfo(vocab_size=tokenizer.vocab_size)
        self.about: dict[str, Any] = {"envelope": {"max_model_len": self.info.max_model_len}}
        self.alive = True
        self.hold = threading.Event()
        self.aborted: list[int] = []
        self.submitted: list[tuple[list[int], SamplingParams, int]] = []
        self.scheduling: list[RequestOptions] = []
        self.watchers: list[Callable[[str], None]] = []
        self._script = script
        self._step_seconds = step_seconds
        self._max_running = max_running
        self.waiting_room = WaitingRoom(max_waiting, max_waiting_per_tenant)
        self._fail_after = fail_after
        self._cached_tokens = cached_tokens
        self._live: dict[int, _Live] = {}
        self._inbox: deque[tuple[int, _Live] | int] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._steps = 0
        self._next_id = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: EventSink,
        *,
        seed: int,
        options: RequestOptions,
    ) -> int:
        with self._wake:
            if self._closing:
                raise EngineClosedError("the engine is shutting down and takes no new requests")
            now = time.monotonic()
            place = self.waiting_room.enter(options.tenant, options.priority, now)
            request_id, self._next_id = self._next_id, self._next_id + 1
            self.submitted.append((list(prompt_ids), params, seed))
            self.scheduling.append(options)
            deadline = math.inf if options.timeout is None else now + options.timeout
            self._inbox.append((request_id, _Live(list(prompt_ids), params, seed, sink, place, deadline)))
            self._wake.notify_all()
        return request_id

    def abort(self, request_id: int) -> None:
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify_all()

    def stats(self) -> FakeStats:
        running = min(len(self._live), self._max_running)
        waiting = len(self._live) - running + len(self._inbox)
        by_priority = self.waiting_room.by_priority
        return FakeStats(running, waiting, 100, 100 - running, self._steps, waiting_by_priority=by_priority)

    def update_weights(
        self, path: str | os.PathLike[str], *, version: str | None = None, when: str = "drain"
    ) -> dict[str, Any]:
        raise WeightsError(f"the weights {path} are not for this engine, which has none", param="path")

    def watch(self, watcher: Callable[[str], None]) -> None:
        self.watchers.append(watcher)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        with self._wake:
            if drain:
                self._wake.wait_for(lambda: not (self._live or self._inbox), timeout)
            self._closing = True
            self.alive = False
            self._wake.notify_all()
        self._thread.join()
        return True

    def wait_until_idle(self, timeout: float = 5.0) -> bool:
        with self._wake:
            return self._wake.wait_for(lambda: not (self._live or self._inbox), timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._live or self._inbox or self._closing)
                if self._closing:
                    break
                self._take_inbox()
            if self._step_seconds or self.hold.is_set():
                time.sleep(self._step_seconds or 0.002)
            now = time.monotonic()
            for request_id, live in list(self._live.items()):
                if live.deadline <= now:
                    self._end(request_id, FinishReason.TIMEOUT)
            for live in list(self._live.values())[: self._max_running]:
                self.waiting_room.leave(live.place, now)
            if not self.hold.is_set():
                self._steps += 1
                for request_id in list(self._live)[: self._max_running]:
                    self._draw(request_id)
        for request_id in list(self._live):
            self._end(request_id, FinishReason.ABORT)

    def _take_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if not isinstance(item, int):
                self._live[item[0]] = item[1]
            elif item in self._live:
                self.aborted.append(item)
                self._end(item, FinishReason.ABORT)

    def _draw(self, request_id: int) -> None:
        live = self._live[request_id]
        if live.num_drawn == self._fail_after:
            self._end(request_id, FinishReason.ERROR, "the device failed: it is made of paper")
            return
        token = self._token(live)
        prompt_logprobs = self._prompt_logprobs(live) if live.num_drawn == 0 else None
        live.num_drawn += 1
        stops = set(live.params.stop_token_ids)
        if not live.params.ignore_eos:
            stops |= set(self.tokenizer.eos_token_ids)
        reason = None
        if token in stops:
            reason = FinishReason.STOP
        elif live.num_drawn == live.params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            del self._live[request_id]
        logprobs = () if live.params.logprobs is None else (self._logprobs(token, live.params.logprobs),)
        stop_token = token if reason is FinishReason.STOP else None
        event = EngineEvent(request_id, (token,), logprobs, prompt_logprobs, reason, stop_token_id=stop_token)
        if live.num_drawn == 1:
            event.cached_tokens, event.queue_seconds = self._cached_tokens, 0.03
        live.sink(event)

    def _token(self, live: _Live) -> int:
        if self._script is not None:
            if live.num_drawn < len(self._script):
                return self._script[live.num_drawn]
            return self.tokenizer.eos_token_ids[0]
        position = len(live.prompt_ids) + live.num_drawn
        key = hashlib.sha256(f"{live.seed if live.params.temperature else 0},{position}".encode()).digest()
        printable = [t for t in range(self.info.vocab_size) if t not in self.tokenizer.special_ids]
        return printable[int.from_bytes(key[:4]) % len(printable)]

    def _logprobs(self, token: int, top: int) -> TokenLogprobs:
        others = [t for t in range(self.info.vocab_size) if t != token]
        ranked = [token, *others][:top]
        return TokenLogprobs(token, -0.5, 1, tuple((t, -0.5 if t == token else -1.0 - t) for t in ranked))

    def _prompt_logprobs(self, live: _Live) -> list[TokenLogprobs | None] | None:
        top = live.params.prompt_logprobs
        if top is None:
            return None
        ranked = tuple((t, -0.25 * (t + 1)) for t in range(top))
        skipped = max(1, live.params.logprob_start_len)
        scored = (TokenLogprobs(t, -math.inf if t == 1 else -3.0, 9, ranked) for t in live.prompt_ids[skipped:])
        return [*[None] * min(skipped, len(live.prompt_ids)), *scored]

    def _end(self, request_id: int, reason: FinishReason, error: str | None = None) -> None:
        live = self._live.pop(request_id)
        self.waiting_room.leave(live.place, time.monotonic())
        live.sink(EngineEvent(request_id, finish_reason=reason, error=error))
