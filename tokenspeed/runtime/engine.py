"""The engine: the only place where scheduler and executor meet.

One thread runs steps; any thread may submit and abort. What a request's sink does with its events (text,
stop strings, replicas) is decided above, in ``async_llm``.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tokenspeed import _native
from tokenspeed.errors import EngineClosedError, QueueFullError, UsageError
from tokenspeed.runtime.executor import DeviceError, StepOutputs
from tokenspeed.runtime.loader import Loaded, LoadOptions
from tokenspeed.runtime.loader import load as load_artifact
from tokenspeed.runtime.request import EngineEvent, EventSink, FinishReason, SamplingParams, TokenLogprobs
from tokenspeed.runtime.sampling import resolve
from tokenspeed.step import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from tokenspeed.runtime.async_llm import Prompt, RequestOutput

MAX_WAITING = 1024
"""Requests that may wait when no other limit is given; one more is refused with QueueFullError."""


@dataclass(frozen=True)
class EngineInfo:
    """What the engine serves and within which limits."""

    model: str
    target: str
    dtype: str
    numerics: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_prefill_tokens: int
    max_top_logprobs: int
    page_size: int
    num_pages: int
    threads: int
    artifact_digest: str


@dataclass
class EngineStats:
    """A snapshot. Counters run from the engine's start; ``device`` holds the device's own counters."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    steps: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    device: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Live:
    """A request that the scheduler holds."""

    sink: EventSink
    params: SamplingParams
    eos_token_ids: frozenset[int]
    prompt_logprobs: list[TokenLogprobs | None] | None


@dataclass(frozen=True)
class _Submission:
    request_id: int
    prompt_ids: Sequence[int]
    params: Any
    live: _Live


class Engine:
    """A loaded artifact that answers requests. Made by ``tokenspeed.load``.

    Args:
        loaded: the model in memory.
        max_waiting: requests that may wait before further ones are refused.
        max_step_tokens: tokens that a step may hold, at most the artifact's max_prefill_tokens (the default). Fewer
            make long prompts stall running replies for less time; no request's tokens change by a bit.

    Raises:
        UsageError: max_step_tokens or max_waiting is out of range.
    """

    def __init__(self, loaded: Loaded, *, max_waiting: int = MAX_WAITING, max_step_tokens: int | None = None):
        envelope = loaded.artifact.manifest.envelope
        step_tokens = envelope.max_prefill_tokens if max_step_tokens is None else max_step_tokens
        if not 1 <= step_tokens <= envelope.max_prefill_tokens:
            raise UsageError(
                f"max_step_tokens is {step_tokens}; it must lie between 1 and {envelope.max_prefill_tokens}, the"
                " artifact's max_prefill_tokens"
            )
        if max_waiting < 1:
            raise UsageError(f"max_waiting is {max_waiting}; it must be at least 1")
        self.tokenizer = loaded.tokenizer
        self.loaded = loaded
        self.info = _info(loaded)
        self._executor = loaded.executor
        self._config = _native.SchedulerConfig(
            max_num_seqs=min(envelope.max_num_seqs, step_tokens),
            max_prefill_tokens=step_tokens,
            max_logit_rows=min(envelope.max_logit_rows, step_tokens),
            max_model_len=envelope.max_model_len,
            page_size=envelope.page_size,
            num_pages=loaded.num_pages,
            # The limit is kept in submit(); preempted requests wait too, and none of them may be refused for it.
            max_waiting=max_waiting + envelope.max_num_seqs,
        )
        self._scheduler = self.new_scheduler()
        self._max_waiting = max_waiting
        self._live: dict[int, _Live] = {}
        self._inbox: deque[_Submission | int] = deque()  # submissions, and ids to abort, in order of arrival
        self._wake = threading.Condition()
        self._next_id = 0
        self._closing = False
        self._stopped = False
        self._steps = self._prompt_tokens = self._generation_tokens = 0
        self._thread = threading.Thread(target=self._run, name="tokenspeed-engine", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests: it neither drains nor has failed."""
        return self._thread.is_alive() and not self._closing

    @property
    def about(self) -> dict[str, Any]:
        """Facts of the artifact and of loading it, for people: its envelope, model, and where the time went."""
        manifest = self.loaded.artifact.manifest
        return {
            "envelope": manifest.envelope.to_json(),
            "checkpoint": asdict(manifest.model),
            "load_seconds": self.loaded.seconds,
        }

    def new_scheduler(self) -> Any:
        """A scheduler with nothing in it, for this engine's artifact and pages."""
        return _native.Scheduler(self._config)

    # -- from any thread ---------------------------------------------------------------------------------

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, sink: EventSink, *, seed: int | None = None
    ) -> int:
        """Queue one request; its events reach ``sink`` on the engine's thread, the last with a finish_reason.

        Args:
            prompt_ids: token ids, at least one, at most max_model_len - 1.
            seed: key of every draw of this request; None takes params.seed, or a fresh one.

        Returns:
            The request's id, for ``abort``.

        Raises:
            RequestError: the prompt or a parameter is illegal, or they do not fit (see ``sampling.resolve``).
            QueueFullError: as many requests wait as may wait.
            EngineClosedError: the engine is draining.
        """
        params = resolve(prompt_ids, params, self.info)
        assert params.max_tokens is not None  # resolved
        if seed is None:
            seed = params.seed if params.seed is not None else secrets.randbits(64)
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(self.tokenizer.eos_token_ids)
        )
        native = _native.RequestParams(
            max_new_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(0, params.top_k),
            min_p=params.min_p,
            seed=seed & (1 << 64) - 1,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            stop_token_ids=sorted(stop_ids),
        )
        live = _Live(sink, params, stop_ids, None if params.prompt_logprobs is None else [None])
        with self._wake:
            if self._closing:
                raise EngineClosedError("the engine is shutting down and takes no new requests")
            waiting = self._scheduler.num_waiting + len(self._inbox)
            if waiting >= self._max_waiting:
                raise QueueFullError(f"{waiting} requests wait already, which is the limit", hint="retry later")
            request_id, self._next_id = self._next_id, self._next_id + 1
            self._inbox.append(_Submission(request_id, prompt_ids, native, live))
            self._wake.notify()
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request, if it is still alive, with finish_reason 'abort'; its pages are free before the next step."""
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify()

    def stats(self) -> EngineStats:
        """A snapshot of load and counters."""
        s = self._scheduler
        return EngineStats(
            num_running=s.num_running,
            num_waiting=s.num_waiting + len(self._inbox),
            num_pages=s.num_pages,
            num_free_pages=s.num_free_pages,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=s.num_preemptions,
            device=dict(self._executor.device.counters()),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt (text, token ids or chat messages) or many; outputs are in the same order. Blocks.

        Inside an event loop use ``AsyncLLM`` instead.
        """
        from tokenspeed.runtime.async_llm import generate_blocking

        return generate_blocking(self, prompts, params or SamplingParams())

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Stop. With ``drain`` let running and waiting requests finish first, for at most ``timeout`` seconds.

        Returns whether everything had finished; what had not ends with finish_reason 'abort'.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._wake:
            self._closing = True
            finished = self._wake.wait_for(
                lambda: not (self._live or self._inbox),
                timeout=0 if not drain else None if deadline is None else max(0.0, deadline - time.monotonic()),
            )
            self._stopped = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._executor.device.close()
        atexit.unregister(self._close_at_exit)
        return finished

    def _close_at_exit(self) -> None:
        # A program that ends without closing: the engine's thread must have left the native module by then.
        self.close(drain=False)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(drain=exc[0] is None)

    # -- on the engine's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        reason, error = FinishReason.ABORT, None
        try:
            while self._wait_for_work():
                self._take_inbox()
                self._step()
        except BaseException as e:  # a bug of ours: every request hears of it, and `alive` turns false
            reason, error = FinishReason.ERROR, f"the engine failed: {e!r}"
            raise
        finally:
            with self._wake:
                self._closing = self._stopped = True
                self._take_inbox_after_stop()
            for request_id in list(self._live):
                self._end(request_id, reason, error)
            with self._wake:
                self._wake.notify_all()

    def _wait_for_work(self) -> bool:
        with self._wake:
            if not (self._live or self._inbox):
                self._wake.notify_all()  # whoever waits in close()
            self._wake.wait_for(lambda: self._live or self._inbox or self._stopped)
            return not self._stopped

    def _take_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, int):
                if item in self._live:
                    self._scheduler.abort(item)
                    self._end(item, FinishReason.ABORT)
                continue
            self._live[item.request_id] = item.live
            try:
                self._scheduler.submit(item.request_id, list(item.prompt_ids), item.params)
            except (ValueError, _native.QueueFull) as e:  # that request's own fault: it ends, others go on
                self._end(item.request_id, FinishReason.ERROR, str(e))
            else:
                self._prompt_tokens += len(item.prompt_ids)

    def _take_inbox_after_stop(self) -> None:
        for item in self._inbox:
            if isinstance(item, _Submission):
                self._live[item.request_id] = item.live
        self._inbox.clear()

    def _step(self) -> None:
        step = self._scheduler.next_step()
        if step is None:
            return
        try:
            outputs = self._executor.wait(self._executor.submit(step), step.num_logit_rows)
        except DeviceError as e:
            for request_id in self._scheduler.fail_step(step.id):
                self._end(request_id, FinishReason.ERROR, f"the device failed: {e}")
            return
        drawn = self._scheduler.commit(step.id, outputs.tokens)
        self._steps += 1
        self._publish(step, outputs, drawn)

    def _publish(self, step: Any, outputs: StepOutputs, drawn: Iterable[tuple[int, int, str | None]]) -> None:
        """Turn a committed step into events: prompt log-probabilities first, then each drawn token."""
        row_of: dict[int, int] = {}
        if any(live.params.logprobs is not None or live.prompt_logprobs is not None for live in self._live.values()):
            for row, (request_id, is_prompt_row, _) in enumerate(step.rows):
                if not is_prompt_row:
                    row_of[request_id] = row
                elif (waiting := self._live.get(request_id)) and waiting.prompt_logprobs is not None:
                    waiting.prompt_logprobs.append(_logprobs(outputs, row, waiting.params.prompt_logprobs or 0))
        for request_id, token, finish in drawn:
            live = self._live.get(request_id)
            if live is None:
                continue
            self._generation_tokens += 1
            logprobs: tuple[TokenLogprobs, ...] = ()
            if live.params.logprobs is not None:
                logprobs = (_logprobs(outputs, row_of[request_id], live.params.logprobs),)
            prompt_logprobs, live.prompt_logprobs = live.prompt_logprobs, None
            reason = None if finish is None else FinishReason(finish)
            if reason is not None:
                del self._live[request_id]
            live.sink(
                EngineEvent(
                    request_id,
                    token_ids=(token,),
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    finish_reason=reason,
                    stop_token_id=token if reason is FinishReason.STOP else None,
                )
            )

    def _end(self, request_id: int, reason: FinishReason, error: str | None = None) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            live.sink(EngineEvent(request_id, finish_reason=reason, error=error))


def _logprobs(outputs: StepOutputs, row: int, top: int) -> TokenLogprobs:
    at = row * MAX_TOP_LOGPROBS
    return TokenLogprobs(
        outputs.tokens[row],
        outputs.logprob[row],
        outputs.rank[row],
        tuple((outputs.top_ids[i], outputs.top_logprobs[i]) for i in range(at, at + top)),
    )


def _info(loaded: Loaded) -> EngineInfo:
    manifest = loaded.artifact.manifest
    envelope = manifest.envelope
    return EngineInfo(
        model=envelope.model,
        target=loaded.section.target,
        dtype=envelope.dtype,
        numerics=envelope.numerics,
        vocab_size=manifest.model.vocab_size,
        max_model_len=envelope.max_model_len,
        max_num_seqs=envelope.max_num_seqs,
        max_prefill_tokens=envelope.max_prefill_tokens,
        max_top_logprobs=MAX_TOP_LOGPROBS,
        page_size=envelope.page_size,
        num_pages=loaded.num_pages,
        threads=loaded.threads,
        artifact_digest=loaded.artifact.digest,
    )


def load(
    path: str | os.PathLike[str],
    *,
    options: LoadOptions | None = None,
    max_waiting: int = MAX_WAITING,
    max_step_tokens: int | None = None,
) -> Engine:
    """Load the artifact at ``path`` and start an Engine on it. See ``loader.load`` and ``Engine`` for errors."""
    return Engine(load_artifact(path, options), max_waiting=max_waiting, max_step_tokens=max_step_tokens)
