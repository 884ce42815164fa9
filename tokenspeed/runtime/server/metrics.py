"""Prometheus metrics under vLLM's names with the prefix ``tokenspeed:``.

Counters and histograms follow every output; gauges and the engine's own counters are read when scraped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tokenspeed.errors import EngineClosedError, QueueFullError, RequestError
from tokenspeed.runtime.async_llm import EngineLike, Generation
from tokenspeed.runtime.output import RequestOutput
from tokenspeed.runtime.request import FinishReason
from tokenspeed.runtime.server.engine_metrics import EngineCollector
from tokenspeed.runtime.server.errors import ApiKeyError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REFUSALS = ("queue_full", "key_queue_full", "unavailable", "unauthorized", "invalid")
"""Why an HTTP request was refused: see ``refusal_of``."""
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
_LENGTH_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


def refusal_of(error: Exception) -> str | None:
    """Which of REFUSALS an error is; None for what is not the client's, nor the load's."""
    if isinstance(error, QueueFullError):
        return "key_queue_full" if error.of_tenant else "queue_full"
    if isinstance(error, EngineClosedError):
        return "unavailable"
    if isinstance(error, ApiKeyError):
        return "unauthorized"
    return "invalid" if isinstance(error, RequestError) else None


@dataclass(slots=True)
class _Progress:
    """One replica so far: tokens drawn, and when the first and the last came (seconds)."""

    num_tokens: int = 0
    first: float = 0.0
    last: float = 0.0


class ServerMetrics:
    """Metrics of one server: the observer of its ``AsyncLLM``, with a registry of its own.

    Attributes:
        num_prompt_tokens: of all admitted requests.
        num_generation_tokens: drawn and delivered.
    """

    def __init__(self, model: str, engine: EngineLike):
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(model, engine))
        self._model = model
        self._replicas: dict[Generation, list[_Progress]] = {}
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens drawn.")
        self._finished = Counter(
            "tokenspeed:request_success",
            "Finished replicas by how they ended.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        for reason in FinishReason:  # every series exists from the start: rates need a zero to begin at
            self._finished.labels(model, reason.value)
        self._refused = Counter(
            "tokenspeed:requests_refused",
            "HTTP requests refused, by why.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        for refusal in REFUSALS:
            self._refused.labels(model, refusal)
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "From submission until a replica that drew a token ran.", _FIRST_TOKEN_BUCKETS
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to a replica's first token.", _FIRST_TOKEN_BUCKETS
        )
        self._between_tokens = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a replica.", _TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time between the tokens of a finished replica.", _TOKEN_BUCKETS
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From submission to the end of a replica.", _REQUEST_BUCKETS
        )
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt length.", _LENGTH_BUCKETS)
        self._output_length = self._histogram("request_generation_tokens", "Output length.", _LENGTH_BUCKETS)

    def submitted(self, generation: Generation) -> None:
        num_tokens = len(generation.prompt_ids)
        self._replicas[generation] = [_Progress() for _ in range(generation.params.n)]
        self.num_prompt_tokens += num_tokens
        self._prompt_tokens.inc(num_tokens)
        self._prompt_length.observe(num_tokens)

    def output(self, generation: Generation, output: RequestOutput, *, done: bool) -> None:
        progress = self._replicas[generation][output.index]
        if output.queue_seconds is not None:
            self._queue_time.observe(output.queue_seconds)
        if output.token_ids:
            self._drawn(generation, progress, len(output.token_ids), output.time)
        if output.finish_reason is not None:
            self._finished.labels(self._model, output.finish_reason.value).inc()
            self._latency.observe(output.time - generation.started)
            self._output_length.observe(progress.num_tokens)
            if progress.num_tokens > 1:
                self._per_token.observe((progress.last - progress.first) / (progress.num_tokens - 1))
        if done:
            del self._replicas[generation]

    def refused(self, error: Exception) -> None:
        """An HTTP request was answered with ``error``."""
        if (reason := refusal_of(error)) is not None:
            self._refused.labels(self._model, reason).inc()

    def render(self) -> bytes:
        """The exposition text, with the engine's gauges read now."""
        return generate_latest(self._registry)

    def _drawn(self, generation: Generation, progress: _Progress, num_tokens: int, now: float) -> None:
        self.num_generation_tokens += num_tokens
        self._generation_tokens.inc(num_tokens)
        if progress.num_tokens:
            self._between_tokens.observe(now - progress.last)
        else:
            self._first_token.observe(now - generation.started)
            progress.first = now
        progress.num_tokens += num_tokens
        progress.last = now

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"tokenspeed:{name}", text, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"tokenspeed:{name}", text, ["model_name"], registry=self._registry, buckets=buckets).labels(
            self._model
        )
