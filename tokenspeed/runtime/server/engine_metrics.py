"""Metrics that are the engine's own figures, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from tokenspeed.runtime.async_llm import EngineLike, EngineStats

Values = Iterable[tuple[str, float]]

_TOKENS = (
    ("prefix_cache_queries", "prompt_tokens", "Prompt tokens of requests that began to run."),
    ("prefix_cache_hits", "cached_tokens", "Of these, tokens that the prefix index had: they were not computed."),
    ("prefix_cache_host_hits", "restored_tokens", "Of these, tokens whose pages came back from the host tier."),
    ("prefill_tokens_computed", "computed_tokens", "Tokens computed in chunks, those of preempted requests again."),
    ("kv_pages_evicted", "evicted_pages", "Cached pages that had to go, or to move to the host tier, for others."),
)
"""Name of the metric, of the scheduler's counter, and what it is."""


class EngineCollector(Collector):
    """The engine's load and counters."""

    def __init__(self, model: str, engine: EngineLike):
        self._model = model
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._load(stats)
        yield from self._pages(stats)
        yield self._one(CounterMetricFamily, "num_preemptions", "Requests pushed back.", stats.preemptions)
        yield self._one(CounterMetricFamily, "steps", "Forward passes.", stats.steps)
        for name, counter, text in _TOKENS:
            yield self._one(CounterMetricFamily, name, text, stats.scheduler.get(counter, 0))
        text = "Lines and events that their file or socket was too slow for."
        yield self._many(CounterMetricFamily, "telemetry_dropped", text, "of", stats.dropped.items())
        yield from self._weights(stats)
        yield from self._closed_runtime(stats)
        if attestation := self._engine.info.attestation:
            yield self._attestation(attestation)

    def _weights(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._one(CounterMetricFamily, "weight_updates", "Updates of the weights.", stats.weight_updates)
        text = "For how long updates of the weights kept steps from running."
        yield self._one(CounterMetricFamily, "weight_update_seconds", text, stats.weight_update_seconds)
        text = "1 for the version of the weights that run now."
        version = (self._engine.info.weights_version, 1)
        yield self._many(GaugeMetricFamily, "weights_version", text, "version", [version])

    def _load(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            ("num_requests_running", "Requests in the running set.", stats.num_running),
            ("num_requests_waiting", "Requests that wait, preempted ones too.", stats.num_waiting),
            (
                "oldest_wait_seconds",
                "How long the oldest request that never ran has waited.",
                stats.oldest_wait_seconds,
            ),
        ):
            yield self._one(GaugeMetricFamily, name, text, value)
        classes = ((str(priority), value) for priority, value in enumerate(stats.waiting_by_priority))
        text = "Requests that wait for their first step, by priority."
        yield self._many(GaugeMetricFamily, "num_requests_waiting_by_priority", text, "priority", classes)

    def _pages(self, stats: EngineStats) -> Iterator[Metric]:
        free, cached = stats.num_free_pages - stats.num_cached_pages, stats.num_cached_pages
        used = stats.num_pages - stats.num_free_pages
        share = used / stats.num_pages if stats.num_pages else 0.0
        text = "Share of the KV pages that requests use, from 0 to 1: cached ones that none uses are as good as free."
        yield self._one(GaugeMetricFamily, "kv_cache_usage_perc", text, share)
        states: Values = (("used", used), ("cached", cached), ("free", free))
        text = "KV pages by state; cached: they hold a prefix, and no request uses them now."
        yield self._many(GaugeMetricFamily, "kv_pages", text, "state", states)
        host: Values = (
            ("used", stats.num_host_pages_used),
            ("free", stats.num_host_pages - stats.num_host_pages_used),
        )
        yield self._many(GaugeMetricFamily, "host_kv_pages", "Pages of the host tier by state.", "state", host)

    def _closed_runtime(self, stats: EngineStats) -> Iterator[Metric]:
        for name, value in stats.after_ready.items():
            text = f"What a closed runtime never does: {name.replace('_', ' ')} since it was ready."
            yield self._one(CounterMetricFamily, f"after_ready_{name}", text, value)
        yield self._host_seconds(stats.host)
        text = "Counters of the device: those named after_seal stay 0 in a closed runtime."
        counters = ((name, value) for name, value in stats.device.items() if isinstance(value, int | float))
        yield self._many(GaugeMetricFamily, "device_counter", text, "counter", counters)

    def _attestation(self, attestation: Mapping[str, str]) -> Metric:
        """1 where the promise of equal bits is proven, 0 where it is served without."""
        text = "Whether an attestation proves the artifact's promise of equal bits; if not, why it is served."
        labels = ["model_name", "digest", "unattested"]
        family = GaugeMetricFamily("tokenspeed:attested", text, labels=labels)
        digest, reason = attestation.get("digest", ""), attestation.get("unattested", "")
        family.add_metric([self._model, digest, reason], float(bool(digest)))
        return family

    def _host_seconds(self, host: Mapping[str, Mapping[str, float]]) -> Metric:
        family = SummaryMetricFamily(
            "tokenspeed:step_host_seconds",
            "Host time of steps by part: all but publish could keep the device waiting.",
            labels=["model_name", "part"],
        )
        for part, times in host.items():
            family.add_metric([self._model, part], count_value=int(times["count"]), sum_value=times["seconds"])
        return family

    def _one(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        family = kind(f"tokenspeed:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _many(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Values,
    ) -> Metric:
        family = kind(f"tokenspeed:{name}", text, labels=["model_name", label])
        for value_of, value in values:
            family.add_metric([self._model, value_of], value)
        return family
