"""The engine: what any thread may ask of it.

Its own thread (``engine_thread``) takes that from the inbox, and runs the steps (``stepper``). What a request's sink
does with its events (text, stop strings, replicas) is decided above, in ``async_llm``.
"""

from __future__ import annotations

import atexit
import operator
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tokenspeed import _native
from tokenspeed.errors import EngineClosedError, UsageError
from tokenspeed.runtime import trace
from tokenspeed.runtime.engine_info import EngineInfo, EngineStats, info_of
from tokenspeed.runtime.engine_thread import EngineThread
from tokenspeed.runtime.guard import after_ready, compilers
from tokenspeed.runtime.inbox import Inbox, Submission
from tokenspeed.runtime.kv_events import KvEventPublisher
from tokenspeed.runtime.live_requests import Live, LiveRequests
from tokenspeed.runtime.loader import Loaded, LoadOptions
from tokenspeed.runtime.loader import load as load_artifact
from tokenspeed.runtime.request import EventSink, RequestOptions, SamplingParams, TokenLogprobs
from tokenspeed.runtime.sampling import check_options, resolve
from tokenspeed.runtime.scheduler_trace import SchedulerTrace, limits_of
from tokenspeed.runtime.scheduling import request_params, scheduler_config, settled_seed
from tokenspeed.runtime.stepper import Stepper
from tokenspeed.runtime.waiting import WaitingRoom
from tokenspeed.runtime.weight_update import WeightUpdate, When, check_file, check_version, parse_when

if TYPE_CHECKING:
    from tokenspeed.runtime.async_llm import Prompt, RequestOutput

MAX_WAITING = 1024
"""Requests that may wait when no other limit is given; one more is refused with QueueFullError."""
AGING_SECONDS = 10.0
"""A request that waits this long is as urgent as one of the next higher priority that comes now."""
DEFAULT_OPTIONS = RequestOptions()
HANG_SECONDS = 30.0
"""Closing gives the steps in flight this long; then the device hangs, and is left behind for the process to end."""


class Engine:
    """A loaded artifact that answers requests. Made by ``tokenspeed.load``.

    Args:
        loaded: the model in memory.
        max_waiting: requests that may wait before further ones are refused.
        max_step_tokens: tokens that a step may hold, at most the artifact's max_prefill_tokens (the default). Fewer
            make long prompts stall running replies for less time; no request's tokens change by a bit.
        prefix_index: whether what one request has computed is found by the next that begins with the same tokens.
        max_waiting_per_tenant: of the requests that may wait, how many may be of one tenant; None: all.
        aging_seconds: a request that waits this long is as urgent as one of the next higher priority that comes now;
            0: priorities hold for ever.
        scheduler_trace: is told of every step; it stays the caller's to close, after the engine.
        kv_events: is told of every page that comes to the prefix index or leaves it; the caller's as well.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        max_waiting: int = MAX_WAITING,
        max_step_tokens: int | None = None,
        prefix_index: bool = True,
        max_waiting_per_tenant: int | None = None,
        aging_seconds: float = AGING_SECONDS,
        scheduler_trace: SchedulerTrace | None = None,
        kv_events: KvEventPublisher | None = None,
    ):
        if max_waiting_per_tenant is not None and max_waiting_per_tenant < 1:
            raise UsageError(f"max_waiting_per_tenant is {max_waiting_per_tenant}; it must be at least 1")
        self.tokenizer = loaded.tokenizer
        self.loaded = loaded
        self._executor = loaded.executor
        self._config = scheduler_config(
            loaded, max_waiting, max_step_tokens, prefix_index, aging_seconds, record_kv_events=kv_events is not None
        )
        self._scheduler = self.new_scheduler()
        self.waiting_room = WaitingRoom(max_waiting, max_waiting_per_tenant)
        info = info_of(loaded)
        self._kv_events = kv_events
        if kv_events is not None:
            kv_events.begin(self._config.page_size)
        self._trace = scheduler_trace
        if scheduler_trace is not None:
            limits = {**limits_of(self._config), "max_waiting_per_tenant": max_waiting_per_tenant}
            scheduler_trace.begin(info.model, info.target, info.artifact_digest, limits)
        self._requests = LiveRequests(self.waiting_room, info.weights_version, scheduler_trace)
        self._stepper = Stepper(
            self._scheduler, self._executor, self._requests, loaded.num_host_pages, scheduler_trace, kv_events
        )
        self.host_times = self._stepper.host_times
        self.compilers_before = compilers()
        self._next_id = 0
        self._inbox = Inbox()
        self._thread = EngineThread(info, self._inbox, self._scheduler, self._executor, self._requests, self._stepper)
        self.weight_counters = self._thread.weight_counters
        self._thread.start()
        atexit.register(self._close_at_exit)

    @property
    def info(self) -> EngineInfo:
        """What the engine serves now, and within which limits."""
        return self._thread.info

    @property
    def failure(self) -> str | None:
        """Why the engine failed, if it did."""
        return self._inbox.failure

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests: it neither drains nor has failed."""
        return self._thread.is_alive() and not self._inbox.closing

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
        """A scheduler with nothing in it, for this engine's artifact and pages, that writes its steps where the device
        reads them."""
        return _native.Scheduler(self._config, self._executor.sets, self._executor.input_offsets)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: EventSink,
        *,
        seed: int | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> int:
        """Queue one request; its events reach ``sink`` on the engine's thread, the last with a finish_reason.

        Args:
            prompt_ids: token ids, at least one, at most max_model_len - 1.
            seed: key of every draw of this request; None takes params.seed, or a fresh one.
            options: its priority, share and timeout.

        Returns:
            The request's id, for ``abort``.

        Raises:
            RequestError: the prompt or a parameter is illegal, or they do not fit (see ``sampling.resolve``).
            QueueFullError: as many requests wait as may wait, of all or of its tenant.
            EngineClosedError: the engine is draining.
        """
        prompt_ids = list(prompt_ids)  # the caller may change its own before the engine's thread reads it
        params = resolve(prompt_ids, params, self.info)
        check_options(options)
        seed = settled_seed(params, seed)
        native = request_params(params, options, seed, self.tokenizer.eos_token_ids, self.info.vocab_size)
        asks_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None] * max(1, params.logprob_start_len)  # nothing comes before the first token
        with self._inbox.wake:
            if self._inbox.closing:
                raise EngineClosedError("the engine is shutting down and takes no new requests")
            place = self.waiting_room.enter(options.tenant, options.priority, time.monotonic())
            live = Live(sink, params, prompt_logprobs, asks_logprobs, options.timeout is not None, place)
            request_id, self._next_id = self._next_id, self._next_id + 1
            deadline = None if options.timeout is None else time.monotonic() + options.timeout
            self._inbox.put(Submission(request_id, prompt_ids, native, live, deadline))
        trace.mark("first request", once=True)
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request, if it is still alive, with finish_reason 'abort'; its pages are free before the next step."""
        number = operator.index(request_id)
        with self._inbox.wake:
            if not self._inbox.stopped:  # else all end anyway, and nobody would read it
                self._inbox.put(number)

    def update_weights(
        self, path: str | os.PathLike[str], *, version: str | None = None, when: str = When.DRAIN
    ) -> dict[str, Any]:
        """Replace the weights by those of a file, between two steps. Blocks until that is done.

        Nothing that was computed from the old weights is read under the new ones: cached prefixes go, those of the host
        tier too, and their hashes count updates. Requests that are submitted later run under the new weights.

        Args:
            path: a safetensors file with the names, types, shapes and offsets of the artifact's own (docs/weights.md).
            version: name of the new weights, in ``info``, in outputs and in metrics; None makes one up, from the
                artifact's digest and a number.
            when: what happens to requests that are there already: ``weight_update.When``.

        Returns:
            ``version``, ``bytes``, ``seconds`` (for which no step ran), ``wait_seconds`` (before that).

        Raises:
            WeightsError: the file does not fit, or cannot be read. The weights are what they were; where the text says
                that they are unknown, requests fail until another update has gone well.
            UsageError: ``version`` or ``when`` makes no sense, or this is the engine's own thread.
            EngineClosedError: the engine is draining. EngineFailedError: it failed meanwhile.
        """
        if threading.current_thread() is self._thread:
            raise UsageError("update_weights would wait for the thread that it is called on: call it on another one")
        if version is not None:
            check_version(version)
        chosen, file = parse_when(when), check_file(self.loaded.artifact, self.loaded.section, path)
        with self._inbox.wake:
            if self._inbox.closing:
                file.close()
                raise EngineClosedError("the engine is shutting down and takes no new weights")
            self.weight_counters.started += 1
            made_up = f"{self.info.artifact_digest[:12]}+{self.weight_counters.started}"
            update = WeightUpdate(file, made_up if version is None else version, chosen, time.monotonic())
            self._inbox.put(update)
        return update.wait()

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Have ``watcher`` called, on the engine's thread, with why the engine failed, should it do so (or has)."""
        self._inbox.watch(watcher)

    def stats(self) -> EngineStats:
        """A snapshot of load and counters."""
        s = self._scheduler
        return EngineStats(
            num_running=s.num_running,
            num_waiting=self.waiting_room.num_waiting + s.num_preempted,
            num_pages=s.num_pages,
            num_free_pages=s.num_free_pages + s.num_cached_pages,
            steps=self._stepper.num_steps,
            prompt_tokens=self._requests.prompt_tokens,
            generation_tokens=self._requests.generation_tokens,
            preemptions=s.num_preemptions,
            num_cached_pages=s.num_cached_pages,
            num_host_pages=self._stepper.num_host_pages,
            num_host_pages_used=s.num_host_pages_used,
            waiting_by_priority=self.waiting_room.by_priority,
            oldest_wait_seconds=s.oldest_wait(time.monotonic_ns()) * 1e-9,
            scheduler=s.counters(),
            dropped={
                name: sink.dropped
                for name, sink in (("scheduler_trace", self._trace), ("kv_events", self._kv_events))
                if sink is not None
            },
            device=(device := dict(self._executor.device.counters())),
            after_ready=after_ready(device, self.compilers_before),
            host=self.host_times.to_json(),
            weight_updates=self.weight_counters.updates,
            weight_update_seconds=self.weight_counters.seconds,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        scheduling: RequestOptions = DEFAULT_OPTIONS,
    ) -> list[RequestOutput]:
        """Complete one prompt (text, token ids or chat messages) or many; outputs are in the same order. Blocks.

        Inside an event loop use ``AsyncLLM`` instead.
        """
        from tokenspeed.runtime.async_llm import generate_blocking

        return generate_blocking(self, prompts, params or SamplingParams(), scheduling=scheduling)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Stop. With ``drain`` let running and waiting requests finish first, for at most ``timeout`` seconds.

        Returns whether everything had finished; what had not ends with finish_reason 'abort'.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        inbox = self._inbox
        with inbox.wake:
            inbox.closing = True
            finished = inbox.wake.wait_for(
                lambda: not self._thread.has_work(),
                timeout=0 if not drain else None if deadline is None else max(0.0, deadline - time.monotonic()),
            )
            inbox.stopped = True
            inbox.wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(HANG_SECONDS)  # it ends after the steps in flight, unless the device hangs
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


def load(
    path: str | os.PathLike[str],
    *,
    options: LoadOptions | None = None,
    max_waiting: int = MAX_WAITING,
    max_step_tokens: int | None = None,
    prefix_index: bool = True,
    max_waiting_per_tenant: int | None = None,
    aging_seconds: float = AGING_SECONDS,
    scheduler_trace: SchedulerTrace | None = None,
    kv_events: KvEventPublisher | None = None,
) -> Engine:
    """Load the artifact at ``path`` and start an Engine on it. See ``loader.load`` and ``Engine`` for errors."""
    return Engine(
        load_artifact(path, options),
        max_waiting=max_waiting,
        max_step_tokens=max_step_tokens,
        prefix_index=prefix_index,
        max_waiting_per_tenant=max_waiting_per_tenant,
        aging_seconds=aging_seconds,
        scheduler_trace=scheduler_trace,
        kv_events=kv_events,
    )
