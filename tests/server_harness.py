"""A real server in a thread, on a free port of the loopback interface."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import httpx
import uvloop

from tokenspeed.runtime.async_llm import EngineLike
from tokenspeed.runtime.server.http import HttpServer
from tokenspeed.runtime.server.settings import ServerSettings, bind


class Running:
    """A server that runs in a thread. ``call`` runs a function on its event loop."""

    def __init__(self, engine: EngineLike | None, settings: dict[str, Any]):
        self.loading: Future[EngineLike] = Future()
        if engine is not None:
            self.loading.set_result(engine)
        own = ServerSettings(**{"port": 0, "announce": False, "drain_timeout": 5.0, **settings})
        self.listener = bind(own)
        self.failure: BaseException | None = None
        self._started = threading.Event()
        self._settings = own
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._started.wait(10)
        self.client = httpx.Client(base_url=self.server.url, timeout=20)

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self.server = HttpServer(self._settings, self.listener, self.loading.result)
            self._started.set()
            await self.server.run()

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        except BaseException as e:
            self.failure = e

    def call(self, function: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        self.call(self.server.stop)

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextmanager
def running(engine: EngineLike | None, **settings: Any) -> Iterator[Running]:
    server = Running(engine, settings)
    try:
        yield server
    finally:
        server.client.close()
        if server._thread.is_alive():
            if not server.loading.done():
                server.loading.set_exception(RuntimeError("the test is over"))
            server.stop()
        server.join()
