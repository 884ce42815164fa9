"""The report as text: a column per routing, then a table of tenants for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tokenspeed.simulate.report import Report, Slo, Summary


def table(reports: Sequence[Report]) -> Iterator[str]:
    """Lines of text; the reports have the same SLO."""
    yield from _line("", [report.routing for report in reports])
    for label, cell in _ROWS:
        cells = [cell(report) for report in reports]
        if label == _GOODPUT:
            label = _goodput_label(reports[0].slo)
        if not (label in _WHEN_ANY and set(cells) == {"0"}):
            yield from _line(label, cells)
    for report in reports:
        if report.tenants:
            yield from _tenants(report)


def _line(label: str, cells: Sequence[str]) -> Iterator[str]:
    yield f"{label:<36}{''.join(f'{text:>16}' for text in cells)}".rstrip()


def _tenants(report: Report) -> Iterator[str]:
    heads = ("requests", "finished", "TTFT p50", "TTFT p99", "TPOT p50", "cached", "goodput")
    yield f"\n{report.routing}: tenants"
    yield f"  {'':<20}{''.join(f'{head:>12}' for head in heads)}"
    latencies = (_ms("ttft", "p50"), _ms("ttft", "p99"), _ms("tpot", "p50"))
    for name, s in report.tenants.items():
        cells = (s.requests, s.finished, *(ms(s) for ms in latencies), f"{s.hit_rate:.1%}", f"{s.goodput:.1%}")
        yield f"  {name[:19]:<20}{''.join(f'{cell:>12}' for cell in cells)}"


def _goodput_label(slo: Slo) -> str:
    bounds = [f"{name} {ms * 1e3:g}" for name, ms in (("TTFT", slo.ttft), ("TPOT", slo.tpot)) if ms is not None]
    return f"goodput ({', '.join(bounds)} ms)" if bounds else "goodput (finished)"


def _ms(kind: str, percentile: str) -> Callable[[Summary], str]:
    def cell(summary: Summary) -> str:
        found = getattr(summary, kind)
        return "-" if found is None else f"{getattr(found, percentile) * 1e3:.1f}"

    return cell


def _row_of(kind: str, percentile: str) -> Callable[[Report], str]:
    cell = _ms(kind, percentile)
    return lambda report: cell(report.all)


_GOODPUT = "goodput"
_ROWS: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("requests", lambda r: str(r.all.requests)),
    ("finished", lambda r: str(r.all.finished)),
    ("refused: the queue was full", lambda r: str(r.all.refused)),
    ("refused: too long", lambda r: str(r.all.too_long)),
    ("expired at their deadline", lambda r: str(r.all.expired)),
    *((f"{name} {p}, ms", _row_of(name.lower(), p)) for name in ("TTFT", "TPOT") for p in ("p50", "p90", "p99")),
    *((f"{label} {p}, ms", _row_of(name, p)) for label, name in (("in the queue", "queue"), ("E2E", "e2e"))
      for p in ("p50", "p99")),
    (_GOODPUT, lambda r: f"{r.all.goodput:.1%}"),
    ("good requests/s", lambda r: f"{r.good_per_second:.2f}"),
    ("output tokens/s", lambda r: f"{r.output_tokens_per_second:.0f}"),
    ("prompt tokens/s", lambda r: f"{r.prompt_tokens_per_second:.0f}"),
    ("prompt tokens found cached", lambda r: f"{r.all.hit_rate:.1%}"),
    ("preemptions", lambda r: str(r.all.preemptions)),
    ("devices busy", lambda r: f"{r.busy:.1%}"),
    ("  the busiest, the idlest", lambda r: "{1:.1%}, {0:.1%}".format(*_extremes(r))),
    ("tokens a step", lambda r: f"{r.tokens_per_step:.1f}"),
    ("padding of buckets", lambda r: f"{r.padding:.1%}"),
    ("virtual time, s", lambda r: f"{r.seconds:.1f}"),
    ("simulated in, s", lambda r: f"{r.wall_seconds:.1f}"),
)  # fmt: skip
_WHEN_ANY = ("refused: the queue was full", "refused: too long", "expired at their deadline")


def _extremes(report: Report) -> tuple[float, float]:
    shares = [replica.busy for replica in report.replicas]
    return min(shares), max(shares)
