"""The picture of some runs: how long requests took, and what the fleet held over time; one colour per run."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.simulate.report import QUANTILES, Latency, Report
from tokenspeed.simulate.svg import Line, Panel, picture


def draw(title: str, reports: Sequence[Report]) -> str:
    """The text of an SVG file."""
    ttft = Panel("Time to first token", "seconds", "share of requests", log_x=True, y_max=1.0)
    tpot = Panel("Time per output token", "milliseconds", "share of requests", log_x=True, y_max=1.0)
    load = Panel("Requests", "seconds", "requests", note="solid: running, dashed: waiting")
    pages = Panel("KV pages", "seconds", "share of pages", y_max=1.0, note="solid: in use, dashed: in use or cached")
    for report in reports:
        name = report.routing
        ttft.lines += _cdf(name, report.all.ttft, 1.0)
        tpot.lines += _cdf(name, report.all.tpot, 1e3)
        load.lines.append(Line(name, [(s.seconds, s.running) for s in report.occupancy]))
        load.lines.append(Line(name, [(s.seconds, s.waiting) for s in report.occupancy], dashed=True))
        used = [(s.seconds, s.used_pages / report.num_pages) for s in report.occupancy]
        held = [(s.seconds, (s.used_pages + s.cached_pages) / report.num_pages) for s in report.occupancy]
        pages.lines += [Line(name, used), Line(name, held, dashed=True)]
    return picture(title, (ttft, tpot, load, pages))


def _cdf(name: str, latency: Latency | None, scale: float) -> list[Line]:
    if latency is None:
        return []
    return [Line(name, [(value * scale, q / QUANTILES) for q, value in enumerate(latency.cdf)])]
