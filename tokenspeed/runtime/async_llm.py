"""Generation over an engine: prompts of any form, replicas, stop strings; for event loops and for plain code.

The engine reports on its own thread; one wakeup of the event loop takes everything that it reported since.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, cast

from tokenspeed.errors import QueueFullError, TokenSpeedError
from tokenspeed.runtime import sampling
from tokenspeed.runtime.chat import Message, normalize_messages
from tokenspeed.runtime.output import Assembler, RequestOutput, TextOptions, join
from tokenspeed.runtime.request import EngineEvent, EventSink, FinishReason, RequestOptions, SamplingParams
from tokenspeed.runtime.sampling import Limits
from tokenspeed.runtime.tokenizer import Tokenizer
from tokenspeed.runtime.waiting import WaitingRoom

__all__ = [
    "AsyncLLM", "Generation", "Prompt", "RequestOutput", "TextOptions", "encode_prompt", "generate_blocking",
    "stream_blocking",
]  # fmt: skip

Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages."""

DEFAULT_SCHEDULING = RequestOptions()

ENCODE_ON_LOOP = 4096
"""Characters of text that are tokenized on the event loop itself; longer text goes to a thread."""


class EngineInfo(Limits, Protocol):
    """What the engine serves; a dataclass, shown whole by the server."""

    @property
    def model(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def artifact_digest(self) -> str: ...
    @property
    def weights_version(self) -> str: ...
    @property
    def attestation(self) -> Mapping[str, str]: ...


class EngineStats(Protocol):
    """Load at this moment; a dataclass, shown whole by the server."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_host_pages: int
    num_host_pages_used: int
    oldest_wait_seconds: float
    waiting_by_priority: tuple[int, ...]
    steps: int
    preemptions: int
    scheduler: dict[str, int]
    dropped: dict[str, int]
    device: dict[str, Any]
    after_ready: dict[str, int]
    host: dict[str, Any]
    weight_updates: int
    weight_update_seconds: float


class EngineLike(Protocol):
    """The part of ``runtime.engine.Engine`` that generation and serving need."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def waiting_room(self) -> WaitingRoom: ...
    @property
    def alive(self) -> bool: ...  # whether it takes requests and its thread runs
    @property
    def about(self) -> Mapping[str, Any]: ...  # facts of the artifact and of loading it, for people
    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: EventSink,
        *,
        seed: int,
        options: RequestOptions,
    ) -> int: ...
    def abort(self, request_id: int) -> None: ...
    def stats(self) -> EngineStats: ...
    def update_weights(
        self, path: str | os.PathLike[str], *, version: str | None = None, when: str = "drain"
    ) -> dict[str, Any]: ...
    def watch(self, watcher: Callable[[str], None]) -> None: ...  # calls it with why the engine failed, should it
    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool: ...


class Observer(Protocol):
    """Told of every request and output, on the event loop; the server's metrics."""

    def submitted(self, generation: Generation) -> None: ...
    def output(self, generation: Generation, output: RequestOutput, *, done: bool) -> None: ...


def prompt_content(tokenizer: Tokenizer, prompt: Prompt) -> str | list[int]:
    """What is left to tokenize: the text (of messages: rendered by the chat template), or token ids as they are.

    Raises RequestError for an empty prompt or messages of the wrong shape.
    """
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[0], Mapping):
        return tokenizer.chat.render(normalize_messages(prompt))
    return list(cast("Sequence[int]", prompt))


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: text, token ids, or chat messages (through the chat template)."""
    content = prompt_content(tokenizer, prompt)
    if isinstance(content, list):
        return content
    return tokenizer.encode(content, add_special_tokens=isinstance(prompt, str))  # a template writes its own BOS


class _Mailbox:
    """Carries events from the engine's thread to one event loop, with one wakeup for many events."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._items: deque[tuple[Generation, Assembler, EngineEvent]] = deque()
        self._scheduled = False

    def sink(self, generation: Generation, assembler: Assembler) -> EventSink:
        def on_event(event: EngineEvent) -> None:
            self._items.append((generation, assembler, event))
            if not self._scheduled:
                self._scheduled = True
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                    self.loop.call_soon_threadsafe(self._deliver)

        return on_event

    def _deliver(self) -> None:
        # The flag falls before the items are taken: an event that comes in between schedules another delivery.
        self._scheduled = False
        now = time.perf_counter()
        while self._items:
            generation, assembler, event = self._items.popleft()
            generation._feed(assembler, event, now)


class Generation:
    """One prompt being completed ``n`` times: an async iterator of outputs of its replicas, as they come.

    Leave it early with ``abort`` (or use it as an async context manager): its pages are freed at once.
    All of it lives on one event loop.

    Attributes:
        prompt_ids: the prompt's tokens.
        params: as they run, ``max_tokens`` and ``seed`` resolved.
        scheduling: its priority, share, timeout and cache key.
        started: when it was submitted, by ``time.perf_counter``.
        num_output_tokens: drawn so far, over all replicas.
        cached_tokens: of the prompt, found in the prefix index by replica 0; 0 until its first token.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        prompt_ids: list[int],
        params: SamplingParams,
        options: TextOptions,
        scheduling: RequestOptions,
    ):
        self.prompt_ids = prompt_ids
        self.params = params
        self.scheduling = scheduling
        self.started = time.perf_counter()
        self.num_output_tokens = self.cached_tokens = 0
        self._llm = llm
        self._assemblers = [Assembler(llm.tokenizer, params, options, i) for i in range(params.n)]
        self._request_ids: list[int] = []
        self._unfinished = params.n
        self._outputs: deque[RequestOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if not self._unfinished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    async def result(self) -> list[RequestOutput]:
        """All replicas to their end, each joined into one output, by index."""
        parts: list[list[RequestOutput]] = [[] for _ in self._assemblers]
        async for output in self:
            parts[output.index].append(output)
        return [join(p) for p in parts]

    def abort(self) -> None:
        """End every unfinished replica with finish_reason ABORT. Does nothing on a finished generation."""
        now = time.perf_counter()
        for assembler, request_id in zip(self._assemblers, self._request_ids, strict=False):
            if not assembler.finished:
                self._llm.engine.abort(request_id)
                self._publish(assembler.abort(now))

    def _start(self, mailbox: _Mailbox) -> None:
        seed = self.params.seed
        assert seed is not None
        try:
            for assembler in self._assemblers:
                self._request_ids.append(
                    self._llm.engine.submit(
                        self.prompt_ids,
                        self.params,
                        mailbox.sink(self, assembler),
                        seed=sampling.replica_seed(seed, assembler.index),
                        options=self.scheduling,
                    )
                )
        except Exception:
            for request_id in self._request_ids:  # all replicas or none
                self._llm.engine.abort(request_id)
            for assembler in self._assemblers:
                assembler.finished = True
            raise

    def _feed(self, assembler: Assembler, event: EngineEvent, now: float) -> None:
        output = assembler.feed(event, now)
        if output is None:
            return
        if output.finish_reason is not None and event.finish_reason is None:  # a stop string the engine knows not of
            self._llm.engine.abort(event.request_id)
        self._publish(output)

    def _publish(self, output: RequestOutput | None) -> None:
        if output is None:
            return
        self.num_output_tokens += len(output.token_ids)
        if output.cached_tokens and output.index == 0:
            self.cached_tokens = output.cached_tokens
        if output.finish_reason is not None:
            self._unfinished -= 1
        self._outputs.append(output)
        self._llm._published(self, output, done=not self._unfinished)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncLLM:
    """An engine inside an event loop.

        llm = AsyncLLM(tokenspeed.load("artifacts/smollm2"))
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(output.text, end="")

    Args:
        engine: from ``tokenspeed.load``; it stays the caller's to close.
        tokenizer: the engine's own by default.
        observer: told of every request and output.
    """

    def __init__(self, engine: EngineLike, tokenizer: Tokenizer | None = None, *, observer: Observer | None = None):
        self.engine = engine
        self.tokenizer = tokenizer or engine.tokenizer
        self.active: set[Generation] = set()
        self._observer = observer
        self._mailbox: _Mailbox | None = None
        self._idle: asyncio.Event | None = None

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: TextOptions | None = None,
        scheduling: RequestOptions = DEFAULT_SCHEDULING,
    ) -> AsyncIterator[RequestOutput]:
        """Complete ``prompt``; yields outputs of its replicas as they come.

        Args:
            scheduling: priority, share, timeout and cache key; they change no token.

        Raises:
            RequestError: the prompt or a parameter is illegal.
            QueueFullError: too many requests wait.
            EngineClosedError: the engine is draining.
            TokenSpeedError: the request failed on the device.
        """
        prompt_ids = await self.encode(prompt)
        async with self.submit(prompt_ids, params, options=options, scheduling=scheduling) as generation:
            async for output in generation:
                if output.finish_reason is FinishReason.ERROR:
                    raise TokenSpeedError(f"the request failed: {output.error}")
                yield output

    async def encode(self, prompt: Prompt) -> list[int]:
        """``encode_prompt`` that does not hold up the event loop on long text."""
        content = prompt_content(self.tokenizer, prompt)
        if isinstance(content, list):
            return content
        return await self.encode_text(content, add_special_tokens=isinstance(prompt, str))

    async def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; long text is tokenized on another thread."""
        if len(text) <= ENCODE_ON_LOOP:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        options: TextOptions | None = None,
        scheduling: RequestOptions = DEFAULT_SCHEDULING,
    ) -> Generation:
        """Start completing ``prompt_ids`` on the running event loop. Errors as ``generate``, raised here and now."""
        resolved = sampling.resolve(prompt_ids, params or SamplingParams(), self.engine.info)
        self.engine.waiting_room.check_size(resolved.n)
        if resolved.seed is None:
            resolved = replace(resolved, seed=sampling.fresh_seed())
        generation = Generation(self, list(prompt_ids), resolved, options or TextOptions(), scheduling)
        generation._start(self._mailbox_of_running_loop())
        self.active.add(generation)
        if self._observer is not None:
            self._observer.submitted(generation)
        return generation

    async def wait_idle(self) -> None:
        """Return once no generation is active."""
        while self.active:
            self._idle = asyncio.Event()
            await self._idle.wait()

    def abort_all(self) -> None:
        """Abort every active generation."""
        for generation in list(self.active):
            generation.abort()

    def _mailbox_of_running_loop(self) -> _Mailbox:
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = _Mailbox(loop)
        return self._mailbox

    def _published(self, generation: Generation, output: RequestOutput, *, done: bool) -> None:
        if self._observer is not None:
            self._observer.output(generation, output, done=done)
        if done:
            self.active.discard(generation)
            if not self.active and self._idle is not None:
                self._idle.set()


class _BlockingRun:
    """Requests of a caller without an event loop; events wait in one queue."""

    def __init__(self, engine: EngineLike, options: TextOptions | None, scheduling: RequestOptions):
        self._engine = engine
        self._options = options or TextOptions()
        self._scheduling = scheduling
        self._events: queue.SimpleQueue[tuple[Any, EngineEvent]] = queue.SimpleQueue()
        self._live: dict[Any, tuple[Assembler, int]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._live)

    def submit(self, key: Any, prompt_ids: Sequence[int], params: SamplingParams, index: int) -> None:
        assert params.seed is not None
        assembler = Assembler(self._engine.tokenizer, params, self._options, index)
        seed = sampling.replica_seed(params.seed, index)
        sink = self._events.put
        request_id = self._engine.submit(
            prompt_ids, params, lambda event: sink((key, event)), seed=seed, options=self._scheduling
        )
        self._live[key] = (assembler, request_id)

    def next_output(self) -> tuple[Any, RequestOutput]:
        """The next output of any request, with its key. Raises TokenSpeedError if that request failed."""
        while True:
            key, event = self._events.get()
            if key not in self._live:
                continue  # drawn before the engine learnt of a stop string
            assembler, request_id = self._live[key]
            output = assembler.feed(event, time.perf_counter())
            assert output is not None
            if output.finish_reason is not None:
                del self._live[key]
                if event.finish_reason is None:
                    self._engine.abort(request_id)
            if output.finish_reason is FinishReason.ERROR:
                raise TokenSpeedError(f"the request failed: {output.error}")
            return key, output

    def abort(self) -> None:
        for _, request_id in self._live.values():
            self._engine.abort(request_id)


def _prepare(engine: EngineLike, prompt: Prompt, params: SamplingParams) -> tuple[list[int], SamplingParams]:
    prompt_ids = encode_prompt(engine.tokenizer, prompt)
    resolved = sampling.resolve(prompt_ids, params, engine.info)
    return prompt_ids, resolved if resolved.seed is not None else replace(resolved, seed=sampling.fresh_seed())


def stream_blocking(
    engine: EngineLike,
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    options: TextOptions | None = None,
    scheduling: RequestOptions = DEFAULT_SCHEDULING,
) -> Iterator[RequestOutput]:
    """Complete ``prompt``, yielding outputs of its replicas as they come. Leaving early aborts the rest.

    Raises RequestError, QueueFullError or EngineClosedError as ``AsyncLLM.generate``.
    """
    prompt_ids, resolved = _prepare(engine, prompt, params or SamplingParams())
    run = _BlockingRun(engine, options, scheduling)
    try:
        for index in range(resolved.n):
            run.submit(index, prompt_ids, resolved, index)
        while run.busy:
            yield run.next_output()[1]
    finally:
        run.abort()


def generate_blocking(
    engine: EngineLike,
    prompts: Prompt | Sequence[str] | Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    *,
    options: TextOptions | None = None,
    scheduling: RequestOptions = DEFAULT_SCHEDULING,
) -> list[RequestOutput]:
    """Complete one prompt or many; returns whole outputs: prompts in order, and ``n`` replicas of each in order.

    When the engine's queue is full, the rest is submitted as earlier requests finish.
    Raises RequestError for the first prompt or parameter that is illegal, before anything runs.
    """
    params = params or SamplingParams()
    work = [_prepare(engine, prompt, params) for prompt in _as_list(prompts)]
    waiting = deque((p, i) for p in range(len(work)) for i in range(work[p][1].n))
    parts: dict[tuple[int, int], list[RequestOutput]] = {key: [] for key in waiting}
    run = _BlockingRun(engine, options, scheduling)
    try:
        while waiting or run.busy:
            while waiting:
                prompt, index = waiting[0]
                try:
                    run.submit((prompt, index), *work[prompt], index)
                except QueueFullError:
                    if not run.busy:
                        raise
                    break
                waiting.popleft()
            key, output = run.next_output()
            parts[key].append(output)
    finally:
        run.abort()
    return [join(part) for part in parts.values()]


def _as_list(prompts: Prompt | Sequence[str] | Sequence[Sequence[int]]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping)):
        return [cast("Prompt", prompts)]
    return cast("Sequence[Prompt]", prompts)
