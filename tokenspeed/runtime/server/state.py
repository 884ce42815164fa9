"""Where one server stands: starting, ready, draining; and what it serves."""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum

from tokenspeed.errors import EngineClosedError
from tokenspeed.runtime.async_llm import AsyncLLM, EngineLike
from tokenspeed.runtime.server.errors import ModelNotFoundError
from tokenspeed.runtime.server.metrics import ServerMetrics
from tokenspeed.runtime.server.settings import ServerSettings
from tokenspeed.runtime.tokenizer import Tokenizer


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class ServerState:
    """The one object that all handlers share. Lives on the event loop.

    Attributes:
        startup: when each part of the start was done, in seconds after exec: ``bound`` (the socket listens),
            ``web`` (the web stack is imported and set up), ``engine`` (the artifact is loaded, on another thread),
            ``ready``.
        updating: held by the update of weights that is on its way, so that those behind it keep no thread waiting.
    """

    def __init__(self, settings: ServerSettings, startup: dict[str, float] | None = None):
        self.settings = settings
        self.started = time.time()
        self.startup = {} if startup is None else startup
        self.llm: AsyncLLM | None = None
        self.metrics: ServerMetrics | None = None
        self.served_names = settings.served_names
        self.updating = asyncio.Lock()
        self._draining = False

    def attach(self, engine: EngineLike, tokenizer: Tokenizer | None = None) -> None:
        """The engine is loaded: from now on the server is ready."""
        self.served_names = self.settings.served_names or (engine.info.model,)
        self.metrics = ServerMetrics(self.served_names[0], engine)
        self.llm = AsyncLLM(engine, tokenizer, observer=self.metrics)

    def drain(self) -> None:
        """Take no new requests; running ones go on."""
        self._draining = True

    def note_refusal(self, error: Exception) -> None:
        """For the metrics, of which there are none before the engine is loaded."""
        if self.metrics is not None:
            self.metrics.refused(error)

    @property
    def phase(self) -> Phase:
        if self._draining:
            return Phase.DRAINING
        return Phase.STARTING if self.llm is None else Phase.READY

    @property
    def healthy(self) -> bool:
        """Whether a request that came now would be served."""
        return self.phase is Phase.READY and self.llm is not None and self.llm.engine.alive

    @property
    def model_name(self) -> str | None:
        """The name that is reported; None while the artifact that has it is loading."""
        return self.served_names[0] if self.served_names else None

    def check_model(self, name: str) -> None:
        """Raises ModelNotFoundError unless ``name`` is what is served here."""
        if name not in self.served_names:
            raise ModelNotFoundError(
                f"the model {name[:100]!r} is not served here",
                param="model",
                hint=f"ask for {' or '.join(map(repr, self.served_names))}"
                if self.served_names
                else "retry when the server is ready",
            )

    def require_llm(self) -> AsyncLLM:
        """Raises EngineClosedError unless requests are taken now."""
        if self.llm is None:
            raise EngineClosedError("the server is starting: the artifact is still loading", hint="retry shortly")
        if self._draining:
            raise EngineClosedError("the server is draining: it takes no new requests", hint="retry elsewhere")
        return self.llm
