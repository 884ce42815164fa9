"""Server-sent events, and generations that end when their client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenspeed.runtime.async_llm import Generation
from tokenspeed.runtime.output import RequestOutput
from tokenspeed.runtime.server.errors import dumps, error_body

T = TypeVar("T")
_log = logging.getLogger("tokenspeed.server")
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies: pass events on as they come
)


class ClientWatch:
    """Aborts ``generations`` as soon as the client disconnects, and whatever is left of them on exit."""

    def __init__(self, receive: Receive, generations: Sequence[Generation]):
        self._generations = generations
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        self._abort()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._abort()

    def _abort(self) -> None:
        for generation in self._generations:
            generation.abort()


async def while_connected(receive: Receive, generations: Sequence[Generation], work: Awaitable[T]) -> T:
    """Await ``work``, which reads ``generations``; a client that goes away aborts them."""
    async with ClientWatch(receive, generations):
        return await work


async def merge(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The outputs of all ``generations`` as they come, each with the position of its generation."""
    if len(generations) == 1:
        async for output in generations[0]:
            yield 0, output
        return
    outputs: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue()

    async def forward(position: int, generation: Generation) -> None:
        async for output in generation:
            outputs.put_nowait((position, output))
        outputs.put_nowait(None)

    tasks = [asyncio.create_task(forward(i, g)) for i, g in enumerate(generations)]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await outputs.get()
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


def event(content: object) -> bytes:
    """One server-sent event with JSON data."""
    return b"data: " + dumps(content) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """A streamed answer. A failure after the headers went out becomes an error event: the status is gone by then."""

    def __init__(self, events: AsyncIterator[bytes], generations: Sequence[Generation], request_id: str):
        self.background = None
        self._events = events
        self._generations = generations
        self._event_headers = [*_HEADERS, (b"x-request-id", request_id.encode())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with ClientWatch(receive, self._generations):
            await send({"type": "http.response.start", "status": 200, "headers": self._event_headers})
            try:
                async with aclosing(self._events) as events:  # type: ignore[type-var]
                    async for chunk in events:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:
                _log.exception("a stream failed")
                await send({"type": "http.response.body", "body": event(error_body(error)), "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
