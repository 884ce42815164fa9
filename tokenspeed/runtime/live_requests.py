"""The requests that the scheduler holds, and telling their sinks of what becomes of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tokenspeed import _native
from tokenspeed.runtime import trace
from tokenspeed.runtime.executor import StepOutputs
from tokenspeed.runtime.request import EngineEvent, EventSink, FinishReason, SamplingParams, TokenLogprobs
from tokenspeed.runtime.scheduler_trace import SchedulerTrace
from tokenspeed.runtime.waiting import Place, WaitingRoom
from tokenspeed.step import MAX_TOP_LOGPROBS


@dataclass(slots=True)
class Live:
    """A request that the scheduler holds, or soon will."""

    sink: EventSink
    params: SamplingParams
    prompt_logprobs: list[TokenLogprobs | None] | None
    asks_logprobs: bool
    has_timeout: bool
    place: Place
    cached_tokens: int | None = None  # until told
    queue_seconds: float | None = None


class LiveRequests:
    """Belongs to the engine's thread; others read whether ``by_id`` is empty, and the counters of tokens.

    Args:
        waiting_room: the requests leave it when they first run, or end.
        weights_version: of the weights that run now.
        scheduler_trace: is told of requests that come, and of those that end otherwise than by a step.

    Attributes:
        by_id: the requests, in order of arrival.
        num_asking_logprobs, num_with_timeout: how many of them are such.
        weights_version: what events name. Whoever updates the weights sets it.
        prompt_tokens, generation_tokens: that the scheduler took, and that sinks were told of, since the start.
    """

    def __init__(self, waiting_room: WaitingRoom, weights_version: str, scheduler_trace: SchedulerTrace | None):
        self.by_id: dict[int, Live] = {}
        self.num_asking_logprobs = self.num_with_timeout = 0
        self.weights_version = weights_version
        self.prompt_tokens = self.generation_tokens = 0
        self._waiting_room = waiting_room
        self._trace = scheduler_trace

    def keep(self, request_id: int, live: Live) -> None:
        self.by_id[request_id] = live
        self.num_asking_logprobs += live.asks_logprobs
        self.num_with_timeout += live.has_timeout

    def note_submission(self, request_id: int, prompt_tokens: int) -> None:
        """The scheduler has taken a request that is kept here."""
        self.prompt_tokens += prompt_tokens
        if self._trace is not None:
            live = self.by_id[request_id]
            self._trace.submitted(request_id, prompt_tokens, live.params.max_tokens, live.place)

    def end(self, request_id: int, reason: FinishReason, error: str | None = None) -> None:
        """Tell a request, if it is here still, that it has ended: the scheduler has let go of it."""
        live = self._forget(request_id)
        if live is not None:
            live.sink(EngineEvent(request_id, finish_reason=reason, error=error))
            if self._trace is not None:
                self._trace.ended(request_id, reason.value)

    def _forget(self, request_id: int) -> Live | None:
        live = self.by_id.pop(request_id, None)
        if live is not None:
            self.num_asking_logprobs -= live.asks_logprobs
            self.num_with_timeout -= live.has_timeout
            self._waiting_room.leave(live.place, time.monotonic())
        return live

    def note_admissions(self, step: Any) -> None:
        """Of the requests that run for the first time in ``step``: how long they waited, and what was cached."""
        now = time.monotonic()
        for request_id, cached_tokens, _, waited_ns, was_preempted in step.admitted:
            if not was_preempted:
                live = self.by_id[request_id]
                live.cached_tokens, live.queue_seconds = cached_tokens, waited_ns * 1e-9
                self._waiting_room.leave(live.place, now)

    def collect_logprobs(self, step: Any, outputs: StepOutputs) -> dict[int, TokenLogprobs]:
        """Of the drawn rows, by request; those of prompt rows go to their request."""
        found: dict[int, TokenLogprobs] = {}
        for row, (request_id, is_prompt_row, _) in enumerate(step.rows):
            live = self.by_id.get(request_id)
            if live is None:
                continue
            if not is_prompt_row:
                if live.params.logprobs is not None:
                    found[request_id] = logprobs_of(outputs, row, live.params.logprobs)
            elif live.prompt_logprobs is not None:
                live.prompt_logprobs.append(logprobs_of(outputs, row, live.params.prompt_logprobs or 0))
        return found

    def publish(self, drawn: _native.Drawn, logprobs: dict[int, TokenLogprobs]) -> None:
        """Tell of one step's tokens: the (request, token, finish) of its commit, and what ``collect_logprobs`` gave."""
        live_requests, version = self.by_id, self.weights_version
        for request_id, token, finish in drawn:
            live = live_requests.get(request_id)
            if live is None:
                continue
            self.generation_tokens += 1
            if finish is None and not live.asks_logprobs and live.cached_tokens is None:
                live.sink(EngineEvent(request_id, (token,), weights_version=version))
                continue
            prompt_logprobs, live.prompt_logprobs = live.prompt_logprobs, None
            cached_tokens, live.cached_tokens = live.cached_tokens, None
            reason = None if finish is None else FinishReason(finish)
            if reason is not None:
                self._forget(request_id)
            live.sink(
                EngineEvent(
                    request_id,
                    token_ids=(token,),
                    logprobs=(logprobs[request_id],) if request_id in logprobs else (),
                    prompt_logprobs=prompt_logprobs,
                    finish_reason=reason,
                    stop_token_id=token if reason is FinishReason.STOP else None,
                    cached_tokens=cached_tokens,
                    queue_seconds=None if cached_tokens is None else live.queue_seconds,
                    weights_version=version,
                )
            )
        trace.mark("first token", once=True)


def logprobs_of(outputs: StepOutputs, row: int, top: int) -> TokenLogprobs:
    """Of one logit row: the drawn token and the ``top`` likeliest ones."""
    at = row * MAX_TOP_LOGPROBS
    return TokenLogprobs(
        outputs.tokens[row],
        outputs.logprob[row],
        outputs.rank[row],
        tuple((outputs.top_ids[i], outputs.top_logprobs[i]) for i in range(at, at + top)),
    )
