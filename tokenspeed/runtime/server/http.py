"""The server process's event loop: uvicorn on a bound socket, readiness, draining, signals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
import uvloop

from tokenspeed.errors import EngineFailedError, TokenSpeedError
from tokenspeed.runtime import trace
from tokenspeed.runtime.async_llm import EngineLike
from tokenspeed.runtime.server.app import create_app
from tokenspeed.runtime.server.settings import ServerSettings, url
from tokenspeed.runtime.server.state import ServerState
from tokenspeed.runtime.tokenizer import Tokenizer
from tokenspeed.runtime.trace import seconds_since_exec

FLUSH_TIMEOUT = 2
"""Seconds that finished answers get to reach slow clients at the very end."""


def run(server: HttpServer, *, handle_signals: bool = False) -> None:
    """Run ``server`` on a new event loop until it has drained. Raises what loading the engine raised."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.run(handle_signals=handle_signals))


class HttpServer:
    """One server on a bound socket, for one run on one event loop.

    Args:
        settings: of the server.
        listener: from ``bind``.
        wait_for_engine: blocks until the engine is loaded, or raises what loading raised.
        tokenizer: the engine's own by default.
        startup: what has happened so far (see ``ServerState.startup``); the server adds to it.
    """

    def __init__(
        self,
        settings: ServerSettings,
        listener: socket.socket,
        wait_for_engine: Callable[[], EngineLike],
        tokenizer: Tokenizer | None = None,
        startup: dict[str, float] | None = None,
    ):
        self.state = ServerState(settings, startup)
        self.url = url(listener)
        self._settings = settings
        self._listener = listener
        self._wait_for_engine = wait_for_engine
        self._tokenizer = tokenizer
        self._signals = 0
        self._stop = asyncio.Event()
        if settings.access_log:
            _enable_access_log()
        config = uvicorn.Config(
            create_app(self.state),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=settings.access_log,
            server_header=False,
            timeout_keep_alive=60,  # clients with pooled connections must not race with a short one
            timeout_graceful_shutdown=FLUSH_TIMEOUT,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
        self.state.startup["web"] = seconds_since_exec()

    async def run(self, *, handle_signals: bool = False) -> None:
        """Serve until ``stop``; returns when drained.

        Raises what loading the engine raised, and EngineFailedError when it failed later; its requests have then
        been told.
        """
        with self._signal_handlers() if handle_signals else contextlib.nullcontext():
            serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
            try:
                await self._run(serving)
            finally:
                self._server.should_exit = True
                await serving

    def stop(self) -> None:
        """Begin to drain; called again, abort what still runs. On the event loop's thread."""
        self._signals += 1
        self.state.drain()
        self._stop.set()
        if self._signals > 1:
            self._server.force_exit = True
            if self.state.llm is not None:
                self.state.llm.abort_all()

    async def _run(self, serving: asyncio.Task[None]) -> None:
        stopping = asyncio.create_task(self._stop.wait())
        engine = await asyncio.to_thread(self._wait_for_engine)
        self.state.attach(engine, self._tokenizer)
        failed = self._failure_of(engine)
        if not self._stop.is_set():
            self._ready(engine)
        ends: set[asyncio.Future[Any]] = {stopping, serving, failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await self._drain()
        if failed.done():
            raise EngineFailedError(failed.result(), hint="start the server again; the requests that ran were ended")

    def _failure_of(self, engine: EngineLike) -> asyncio.Future[str]:
        """Done, with the reason, when the engine fails."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[str] = loop.create_future()

        def note(reason: str) -> None:
            if not failed.done():
                failed.set_result(reason)
                self.state.drain()

        def on_failure(reason: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended already
                loop.call_soon_threadsafe(note, reason)

        engine.watch(on_failure)
        return failed

    def _ready(self, engine: EngineLike) -> None:
        self.state.startup["ready"] = ready = seconds_since_exec()
        trace.mark("ready")
        gc.freeze()  # what was loaded stays: the collector need not walk it again
        gc.enable()
        if self._settings.announce:
            info = engine.info
            print(
                f"ready: {info.model} on {info.target} at {self.url} ({ready:.2f} s after exec)",
                file=sys.stderr,
                flush=True,
            )
        threading.Thread(target=self._warm_up, name="tokenspeed-warm-up", daemon=True).start()

    def _warm_up(self) -> None:
        assert self.state.llm is not None
        with contextlib.suppress(TokenSpeedError):  # said to the first request that needs it
            self.state.llm.tokenizer.chat.prepare()

    async def _drain(self) -> None:
        assert self.state.llm is not None
        try:
            await asyncio.wait_for(self.state.llm.wait_idle(), self._settings.drain_timeout)
        except TimeoutError:
            print(f"drain: aborting {len(self.state.llm.active)} requests that still run", file=sys.stderr)
            self.state.llm.abort_all()

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def _enable_access_log() -> None:
    logger = logging.getLogger("uvicorn.access")
    logger.handlers = [logging.StreamHandler(sys.stderr)]
    logger.propagate = False
    logger.setLevel(logging.INFO)
