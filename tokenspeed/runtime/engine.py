"""The engine: the only place where scheduler and executor meet.

One thread runs steps; any thread may submit and abort. What a request's sink does with its events (text,
stop strings, replicas) is decided above, in ``async_llm``.
"""

from __future__ import annotations

import atexit
import logging
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenspeed import _native
from tokenspeed.errors import EngineClosedError, EngineFailedError, UsageError, WeightsError
from tokenspeed.runtime import trace
from tokenspeed.runtime.engine_info import EngineStats, info_of
from tokenspeed.runtime.executor import DeviceError, InFlight, MoveError, StepOutputs
from tokenspeed.runtime.guard import HostTimes, after_ready, compilers
from tokenspeed.runtime.kv_events import KvEventPublisher
from tokenspeed.runtime.loader import Loaded, LoadOptions
from tokenspeed.runtime.loader import load as load_artifact
from tokenspeed.runtime.request import (
    EngineEvent,
    EventSink,
    FinishReason,
    RequestOptions,
    SamplingParams,
    TokenLogprobs,
)
from tokenspeed.runtime.running_step import RunningStep, logprobs_of
from tokenspeed.runtime.sampling import check_options, resolve
from tokenspeed.runtime.scheduler_trace import SchedulerTrace, StepTimes, limits_of
from tokenspeed.runtime.scheduling import request_params, scheduler_config, settled_seed
from tokenspeed.runtime.waiting import Place, WaitingRoom
from tokenspeed.runtime.weight_update import (
    UNKNOWN_VERSION,
    WeightCounters,
    WeightUpdate,
    When,
    check_file,
    check_version,
    parse_when,
)

if TYPE_CHECKING:
    from tokenspeed.runtime.async_llm import Prompt, RequestOutput

MAX_WAITING = 1024
"""Requests that may wait when no other limit is given; one more is refused with QueueFullError."""
AGING_SECONDS = 10.0
"""A request that waits this long is as urgent as one of the next higher priority that comes now."""
DEFAULT_OPTIONS = RequestOptions()

MOVE_FAILURES = 3
"""So many steps in a row whose pages could not move between device and host, and the host tier is given up."""
HANG_SECONDS = 30.0
"""Closing gives the steps in flight this long; then the device hangs, and is left behind for the process to end."""

_log = logging.getLogger("tokenspeed.engine")


@dataclass(slots=True)
class _Live:
    """A request that the scheduler holds."""

    sink: EventSink
    params: SamplingParams
    prompt_logprobs: list[TokenLogprobs | None] | None
    asks_logprobs: bool
    has_timeout: bool
    place: Place
    cached_tokens: int | None = None  # until told
    queue_seconds: float | None = None


@dataclass(frozen=True)
class _Submission:
    request_id: int
    prompt_ids: list[int]
    params: Any
    live: _Live
    deadline: float | None  # seconds of time.monotonic


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
        self.info = info_of(loaded)
        self._executor = loaded.executor
        self._config = scheduler_config(
            loaded, max_waiting, max_step_tokens, prefix_index, aging_seconds, record_kv_events=kv_events is not None
        )
        self._scheduler = self.new_scheduler()
        self.waiting_room = WaitingRoom(max_waiting, max_waiting_per_tenant)
        self._kv_events = kv_events
        if kv_events is not None:
            kv_events.begin(self._config.page_size)
        self._trace = scheduler_trace
        if scheduler_trace is not None:
            limits = {**limits_of(self._config), "max_waiting_per_tenant": max_waiting_per_tenant}
            scheduler_trace.begin(self.info.model, self.info.target, self.info.artifact_digest, limits)
        self._live: dict[int, _Live] = {}
        self._num_asking_logprobs = self._num_with_timeout = 0  # live requests
        self._in_flight: deque[RunningStep] = deque()
        self._committed: deque[tuple[_native.Drawn, dict[int, TokenLogprobs]]] = deque()
        self._failed_moves = 0  # in a row
        self._num_host_pages = loaded.num_host_pages
        self.host_times = HostTimes()
        self.compilers_before = compilers()
        self.failure: str | None = None
        self._watchers: list[Callable[[str], None]] = []
        self._inbox: deque[_Submission | WeightUpdate | int] = deque()  # in order of arrival; ids are to be aborted
        self._update: WeightUpdate | None = None  # that waits until requests have ended
        self._held: deque[_Submission | WeightUpdate] = deque()  # what came behind it
        self.weight_counters = WeightCounters()
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
        """A scheduler with nothing in it, for this engine's artifact and pages, that writes its steps where the device
        reads them."""
        return _native.Scheduler(self._config, self._executor.sets, self._executor.input_offsets)

    # -- from any thread ---------------------------------------------------------------------------------

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
        with self._wake:
            if self._closing:
                raise EngineClosedError("the engine is shutting down and takes no new requests")
            place = self.waiting_room.enter(options.tenant, options.priority, time.monotonic())
            live = _Live(sink, params, prompt_logprobs, asks_logprobs, options.timeout is not None, place)
            request_id, self._next_id = self._next_id, self._next_id + 1
            deadline = None if options.timeout is None else time.monotonic() + options.timeout
            self._inbox.append(_Submission(request_id, prompt_ids, native, live, deadline))
            self._wake.notify()
        trace.mark("first request", once=True)
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request, if it is still alive, with finish_reason 'abort'; its pages are free before the next step."""
        number = operator.index(request_id)
        with self._wake:
            if self._stopped:  # all end anyway, and nobody would read it
                return
            self._inbox.append(number)
            self._wake.notify()

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
        with self._wake:
            if self._closing:
                file.close()
                raise EngineClosedError("the engine is shutting down and takes no new weights")
            self.weight_counters.started += 1
            made_up = f"{self.info.artifact_digest[:12]}+{self.weight_counters.started}"
            update = WeightUpdate(file, made_up if version is None else version, chosen, time.monotonic())
            self._inbox.append(update)
            self._wake.notify()
        return update.wait()

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Have ``watcher`` called, on the engine's thread, with why the engine failed, should it do so (or has)."""
        with self._wake:
            failure = self.failure
            if failure is None:
                self._watchers.append(watcher)
        if failure is not None:
            watcher(failure)

    def stats(self) -> EngineStats:
        """A snapshot of load and counters."""
        s = self._scheduler
        return EngineStats(
            num_running=s.num_running,
            num_waiting=self.waiting_room.num_waiting + s.num_preempted,
            num_pages=s.num_pages,
            num_free_pages=s.num_free_pages + s.num_cached_pages,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=s.num_preemptions,
            num_cached_pages=s.num_cached_pages,
            num_host_pages=self._num_host_pages,
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
        with self._wake:
            self._closing = True
            finished = self._wake.wait_for(
                lambda: not self._has_work(),
                timeout=0 if not drain else None if deadline is None else max(0.0, deadline - time.monotonic()),
            )
            self._stopped = True
            self._wake.notify_all()
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

    # -- on the engine's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        reason, error = FinishReason.ABORT, None
        try:
            while self._wait_for_work():
                self._take_inbox()
                if self._num_with_timeout or self._held:
                    self._expire()
                if self._update is not None and not self._live:
                    self._apply_update(self._update)
                self._step()
        except DeviceError as e:  # of a device that is lost, which it says: no step will run any more
            reason, error = FinishReason.ERROR, str(e)
        except BaseException as e:  # a bug of ours
            reason, error = FinishReason.ERROR, f"the engine failed: {e!r}"
            raise
        finally:
            with self._wake:
                self._closing = self._stopped = True
                self._take_inbox_after_stop()
            self._tell(self._publish_committed)
            for request_id in list(self._live):
                self._tell(self._end, request_id, reason, error)
            self._fail(error)
            with self._wake:
                self._wake.notify_all()

    @staticmethod
    def _tell(function: Callable[..., None], *args: Any) -> None:
        """Call it; where a sink raises, which may be why the engine ends, all others are told still."""
        try:
            function(*args)
        except Exception:
            _log.exception("a sink of events raised")

    def _fail(self, error: str | None) -> None:
        """The engine's thread is about to end; with an error, whoever watches is told."""
        with self._wake:
            self.failure = error
            watchers, self._watchers = self._watchers, []
        if error is not None:
            for watcher in watchers:
                watcher(error)

    def _has_work(self) -> bool:
        return bool(self._live or self._inbox or self._update)

    def _wait_for_work(self) -> bool:
        with self._wake:
            if not self._has_work():
                self._wake.notify_all()  # whoever waits in close()
            self._wake.wait_for(lambda: self._has_work() or self._in_flight or self._stopped)
            return not self._stopped

    def _take_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, int):
                self._take_abort(item)
            elif self._update is not None:
                self._held.append(item)
            elif isinstance(item, WeightUpdate):
                self._begin_update(item)
            else:
                self._take_submission(item)

    def _take_submission(self, item: _Submission) -> None:
        self._keep(item.request_id, item.live)
        try:
            self._scheduler.submit(item.request_id, item.prompt_ids, item.params, time.monotonic_ns())
        except (ValueError, TypeError, _native.QueueFull) as e:  # that request's own fault: it ends, others go on
            self._end(item.request_id, FinishReason.ERROR, str(e))
        else:
            self._prompt_tokens += len(item.prompt_ids)
            if self._trace is not None:
                live = item.live
                self._trace.submitted(item.request_id, len(item.prompt_ids), live.params.max_tokens, live.place)

    def _take_abort(self, request_id: int) -> None:
        if request_id in self._live:
            self._publish_committed()
            self._scheduler.abort(request_id)
            self._end(request_id, FinishReason.ABORT)
        else:
            self._end_held(lambda item: item.request_id == request_id, FinishReason.ABORT)

    def _end_held(self, ends: Callable[[_Submission], bool], reason: FinishReason) -> None:
        """End, of the requests behind an update, those that ``ends`` says."""
        for item in [item for item in self._held if isinstance(item, _Submission) and ends(item)]:
            self._held.remove(item)
            self._keep(item.request_id, item.live)
            self._end(item.request_id, reason)

    def _take_inbox_after_stop(self) -> None:
        for item in (self._update, *self._held, *self._inbox):
            if isinstance(item, _Submission):
                self._keep(item.request_id, item.live)
            elif isinstance(item, WeightUpdate):
                item.finish(EngineClosedError("the engine has stopped before the weights were updated"))
        self._update = None
        self._held.clear()
        self._inbox.clear()

    def _begin_update(self, update: WeightUpdate) -> None:
        """Let what an update waits for end, or see that nothing of what runs will be read again."""
        self._update = update
        if update.when is When.DRAIN:
            return  # the loop goes on until no request is left
        self._finish_all()
        for request_id, state, *_ in self._scheduler.requests():
            if update.when is When.PREEMPT:
                self._scheduler.preempt(request_id, always=True)
            elif state != "waiting":
                self._scheduler.abort(request_id)
                self._end(request_id, FinishReason.ABORT)
        self._apply_update(update)

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish_oldest()
        self._publish_committed()

    def _apply_update(self, update: WeightUpdate) -> None:
        """Replace the weights, while no step runs and no request has keys and values; what came behind goes on."""
        self._finish_all()
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
        self._inbox.extendleft(reversed(self._held))
        self._held.clear()
        update.finish(error)

    def _note_weights(self, version: str) -> None:
        """What is cached is of other weights."""
        self._scheduler.flush_prefixes()
        self._publish_kv_events()
        self.info = replace(self.info, weights_version=version)
        _log.info("the weights are %s", version)

    def _step(self) -> None:
        """Start the next step, tell of the one before, and take the results of the oldest once enough are in flight.

        With two io sets the device has its next step before this thread looks at the last one's results; with one
        it waits for them.
        """
        step = self._start_step()
        self._publish_committed()
        if self._in_flight and (step is None or len(self._in_flight) == self._executor.io_sets):
            self._finish_oldest()
        self._publish_kv_events()

    def _publish_kv_events(self) -> None:
        if self._kv_events is not None and (events := self._scheduler.take_events()):
            self._kv_events.put(events)

    def _start_step(self) -> Any:
        """Plan a step and give it to the device; None when there is nothing to do now."""
        began = time.perf_counter()
        step = self._scheduler.next_step(time.monotonic_ns())
        if step is None:
            return None
        if step.num_admitted:
            self._note_admissions(step)
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
        self._in_flight.append(RunningStep(step, started, began, planned, submitted, decision))
        return step

    def _note_admissions(self, step: Any) -> None:
        now = time.monotonic()
        for request_id, cached_tokens, _, waited_ns, was_preempted in step.admitted:
            if not was_preempted:
                live = self._live[request_id]
                live.cached_tokens, live.queue_seconds = cached_tokens, waited_ns * 1e-9
                self.waiting_room.leave(live.place, now)

    def _expire(self) -> None:
        """End the requests whose time is up."""
        expired = self._scheduler.expire(time.monotonic_ns())
        if expired:
            self._publish_committed()
            for request_id in expired:
                self._end(request_id, FinishReason.TIMEOUT)
        if self._held:
            now = time.monotonic()
            self._end_held(lambda item: item.deadline is not None and item.deadline <= now, FinishReason.TIMEOUT)

    def _finish_oldest(self) -> None:
        running = self._in_flight.popleft()
        step = running.step
        try:
            if not isinstance(running.started, InFlight):
                raise running.started
            outputs = self._executor.wait(running.started, self._scheduler.warm)
        except DeviceError as e:
            if is_lost(e):
                raise
            for request_id in self._scheduler.fail_step(step.id):
                self._end(request_id, FinishReason.ERROR, f"the device failed: {e}")
            if isinstance(e, MoveError):
                self._note_failed_move(e)
            self._trace_step(running, time.perf_counter(), time.perf_counter(), error=str(e))
            return
        done = time.perf_counter()
        drawn = self._scheduler.commit(step.id, outputs.tokens)
        # Read now: the step after the next one writes to the same place.
        logprobs = self._collect_logprobs(step, outputs) if self._num_asking_logprobs else {}
        committed = time.perf_counter()
        self._committed.append((drawn, logprobs))
        self._steps += 1
        running.finished(self.host_times, done, committed)
        self._trace_step(running, done, committed, drawn)
        if self._executor.io_sets == 1:
            self._publish_committed()

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
            self._num_host_pages = 0
            _log.error("the host tier is given up after %d failures in a row; requests go on without", MOVE_FAILURES)

    def _collect_logprobs(self, step: Any, outputs: StepOutputs) -> dict[int, TokenLogprobs]:
        """Of the drawn rows, by request; those of prompt rows go to their request."""
        found: dict[int, TokenLogprobs] = {}
        for row, (request_id, is_prompt_row, _) in enumerate(step.rows):
            live = self._live.get(request_id)
            if live is None:
                continue
            if not is_prompt_row:
                if live.params.logprobs is not None:
                    found[request_id] = logprobs_of(outputs, row, live.params.logprobs)
            elif live.prompt_logprobs is not None:
                live.prompt_logprobs.append(logprobs_of(outputs, row, live.params.prompt_logprobs or 0))
        return found

    def _publish_committed(self) -> None:
        """Turn committed steps into events. The device may run the next step meanwhile."""
        while self._committed:
            began = time.perf_counter()
            drawn, logprobs = self._committed.popleft()
            self._publish(drawn, logprobs)
            self.host_times.publish.add(time.perf_counter() - began)

    def _publish(self, drawn: _native.Drawn, logprobs: dict[int, TokenLogprobs]) -> None:
        live_requests, version = self._live, self.info.weights_version
        for request_id, token, finish in drawn:
            live = live_requests.get(request_id)
            if live is None:
                continue
            self._generation_tokens += 1
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

    def _keep(self, request_id: int, live: _Live) -> None:
        self._live[request_id] = live
        self._num_asking_logprobs += live.asks_logprobs
        self._num_with_timeout += live.has_timeout

    def _forget(self, request_id: int) -> _Live | None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self._num_asking_logprobs -= live.asks_logprobs
            self._num_with_timeout -= live.has_timeout
            self.waiting_room.leave(live.place, time.monotonic())
        return live

    def _end(self, request_id: int, reason: FinishReason, error: str | None = None) -> None:
        live = self._forget(request_id)
        if live is not None:
            live.sink(EngineEvent(request_id, finish_reason=reason, error=error))
            if self._trace is not None:
                self._trace.ended(request_id, reason.value)


def is_lost(error: Exception) -> bool:
    """Whether a device has stopped working for good."""
    return isinstance(error, _native.DeviceLostError)


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
