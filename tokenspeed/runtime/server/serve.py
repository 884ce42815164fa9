"""Serving an artifact: bind the port, load on another thread, serve until told to stop.

Nothing heavy is imported here: the artifact starts to load before the web stack is imported, and both go on
at the same time (loading spends most of its time outside the interpreter's lock).
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenspeed.runtime import trace
from tokenspeed.runtime.server.settings import ServerSettings, bind
from tokenspeed.runtime.trace import seconds_since_exec

if TYPE_CHECKING:
    from tokenspeed.runtime.async_llm import EngineLike
    from tokenspeed.runtime.tokenizer import Tokenizer


def serve(engine: EngineLike, tokenizer: Tokenizer | None, settings: ServerSettings) -> int:
    """Serve ``engine`` until SIGTERM or SIGINT, then drain and close it. See ``serve_loading``."""
    return serve_loading(lambda: engine, settings, tokenizer=tokenizer)


def serve_loading(
    load: Callable[[], EngineLike],
    settings: ServerSettings,
    *,
    tokenizer: Tokenizer | None = None,
    first: threading.Event | None = None,
) -> int:
    """Serve what ``load`` returns, which runs on another thread after the port is bound.

    Until it is loaded every request but /health and / gets 503. SIGTERM and SIGINT drain: new requests get 503,
    running ones ``settings.drain_timeout`` seconds, then the engine is closed. A second signal aborts what still
    runs. Returns the exit code, 0.

    Args:
        first: the web stack is imported once ``load`` has set this (or ended): until then the two would compete for the
            interpreter's lock, and what the device needs to begin with its part would come later.

    Raises:
        ResourceError: the port is taken.
        EngineFailedError: the engine failed while serving, as it does when its device is lost.
        TokenSpeedError: whatever ``load`` raises.
    """
    with bind(settings) as listener:
        startup = {"bound": seconds_since_exec()}
        gc.disable()  # what a start allocates stays: looking for garbage costs a tenth of it and finds none
        loading = _Loading(load, startup, first)
        try:
            if first is not None:
                first.wait()
            with trace.span("import web stack"):
                from tokenspeed.runtime.server import http

            server = http.HttpServer(settings, listener, loading.wait, tokenizer, startup)
            http.run(server, handle_signals=True)
        finally:
            gc.enable()
            if (engine := loading.outcome()) is not None:
                engine.close(drain=False)
    return 0


class _Loading(threading.Thread):
    """Runs ``load`` and notes its end in ``startup``; ``wait`` returns its engine or raises its error."""

    def __init__(self, load: Callable[[], EngineLike], startup: dict[str, float], first: threading.Event | None):
        super().__init__(name="tokenspeed-loader", daemon=True)
        self._load = load
        self._startup = startup
        self._first = first
        self._engine: EngineLike | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with trace.span("load"):
                self._engine = self._load()
            self._startup["engine"] = seconds_since_exec()
        except BaseException as e:  # raised again by wait()
            self._error = e
        finally:
            if self._first is not None:
                self._first.set()

    def wait(self) -> EngineLike:
        engine = self.outcome()
        if self._error is not None:
            raise self._error
        assert engine is not None
        return engine

    def outcome(self) -> EngineLike | None:
        """The engine when loading has ended, None if it failed."""
        self.join()
        return self._engine
