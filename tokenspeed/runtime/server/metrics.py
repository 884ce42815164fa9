"""Prometheus metrics under vLLM's names with the prefix ``tokenspeed:``.

Counters and histograms follow every output; gauges and the engine's own counters are read when scraped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from tokenspeed.runtime.async_llm import EngineLike, Generation
from tokenspeed.runtime.output import RequestOutput
from tokenspeed.runtime.request import FinishReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
_LENGTH_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


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
        self._registry.register(_EngineCollector(model, engine))
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


class _EngineCollector(Collector):
    """The engine's load and counters, read at each scrape."""

    def __init__(self, model: str, engine: EngineLike):
        self._model = model
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        used = 1 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0
        for name, text, value in (
            ("num_requests_running", "Requests in the running set.", stats.num_running),
            ("num_requests_waiting", "Requests that wait for their first step.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV pages that are in use, from 0 to 1.", used),
        ):
            yield self._family(GaugeMetricFamily, name, text, value)
        yield self._family(CounterMetricFamily, "num_preemptions", "Requests pushed back.", stats.preemptions)
        yield self._family(CounterMetricFamily, "steps", "Forward passes.", stats.steps)
        for name, value in stats.after_ready.items():
            yield self._family(
                CounterMetricFamily,
                f"after_ready_{name}",
                f"What a closed runtime never does: {name.replace('_', ' ')} since it was ready.",
                value,
            )
        yield self._host_seconds(stats.host)
        device = GaugeMetricFamily(
            "tokenspeed:device_counter",
            "Counters of the device: those named after_seal stay 0 in a closed runtime.",
            labels=["model_name", "counter"],
        )
        for name, value in stats.device.items():
            if isinstance(value, int | float):
                device.add_metric([self._model, name], value)
        yield device

    def _host_seconds(self, host: Mapping[str, Mapping[str, float]]) -> Metric:
        family = SummaryMetricFamily(
            "tokenspeed:step_host_seconds",
            "Host time of steps by part: all but publish could keep the device waiting.",
            labels=["model_name", "part"],
        )
        for part, times in host.items():
            family.add_metric([self._model, part], count_value=int(times["count"]), sum_value=times["seconds"])
        return family

    def _family(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        family = kind(f"tokenspeed:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
