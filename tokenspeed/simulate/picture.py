"""The picture of some runs: how long requests took, and what the fleet held over time; one colour per run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenspeed.simulate.fleet import Sample
from tokenspeed.simulate.report import QUANTILES, Latency, Report
from tokenspeed.simulate.svg import Line, Panel, picture

POINTS = 240
"""Of a line over time."""


def draw(title: str, reports: Sequence[Report]) -> str:
    """The text of an SVG file."""
    ttft = Panel("Time to first token", "seconds", "share of requests", log_x=True, y_max=1.0)
    tpot = Panel("Time per output token", "milliseconds", "share of requests", log_x=True, y_max=1.0)
    load = Panel("Requests", "seconds", "requests", note="solid: running, dashed: waiting")
    pages = Panel("KV pages", "seconds", "share of pages", y_max=1.0, note="solid: in use, dashed: in use or cached")
    for report in reports:
        name, total = report.routing, report.num_pages
        ttft.lines += _cdf(name, report.all.ttft, 1.0)
        tpot.lines += _cdf(name, report.all.tpot, 1e3)
        load.lines.append(Line(name, _means(report, lambda s: s.running)))
        load.lines.append(Line(name, _means(report, lambda s: s.waiting), dashed=True))
        used = _means(report, lambda s: s.used_pages, total)
        held = _means(report, lambda s: s.used_pages + s.cached_pages, total)
        pages.lines += [Line(name, used), Line(name, held, dashed=True)]
    return picture(title, (ttft, tpot, load, pages))


def _means(report: Report, value: Callable[[Sample], int], of: int = 1) -> list[tuple[float, float]]:
    """Means of ``value`` / ``of`` over POINTS equal parts of the time; parts without a sample have no point."""
    samples = report.occupancy
    span = samples[-1].seconds if samples else 0.0
    parts: dict[int, list[Sample]] = {}
    for sample in samples:
        parts.setdefault(int(sample.seconds / span * (POINTS - 1)), []).append(sample)
    return [
        (sum(s.seconds for s in part) / len(part), sum(map(value, part)) / len(part) / of) for part in parts.values()
    ]


def _cdf(name: str, latency: Latency | None, scale: float) -> list[Line]:
    if latency is None:
        return []
    return [Line(name, [(value * scale, q / QUANTILES) for q, value in enumerate(latency.cdf)])]
