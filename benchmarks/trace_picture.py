"""A picture of a start: the spans of `tokenspeed serve --trace FILE`, a lane per thread, from exec to the first token.

    python benchmarks/trace_picture.py startup-trace.json startup-trace.png [--title TEXT] [--until MS]

Needs matplotlib (`pip install 'tokenspeed[peers]'`). The same file opens in https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEAST_SHARE = 0.002
"""Spans shorter than this share of the picture are left out, unless nothing longer is in their lane."""
LABEL_SHARE_PER_LETTER = 0.0048
"""Of the picture's width: a span that is narrower than its name has none written into it."""
MARGIN = 1.04
"""Of the time of the first token: where the picture ends."""


@dataclass(frozen=True)
class Span:
    """``start`` and ``end`` in milliseconds after exec; ``depth`` counts the spans of the thread around it."""

    name: str
    start: float
    end: float
    depth: int

    @property
    def kind(self) -> str:
        """What it is coloured by: `load linear_4f2a` is a `load`."""
        return self.name.split()[0].rstrip(",")


@dataclass
class Lane:
    """The spans of one thread, in order of their starts."""

    name: str
    spans: list[Span] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return 1 + max(span.depth for span in self.spans)


@dataclass(frozen=True)
class Picture:
    """What is drawn: lanes in order of their first span, moments (name, ms), and where the time axis ends (ms)."""

    lanes: tuple[Lane, ...]
    marks: tuple[tuple[str, float], ...]
    until: float


def arrange(trace: dict[str, Any], until: float | None = None) -> Picture:
    """The picture of a trace: up to ``until`` ms, by default a little beyond the first token.

    Raises ValueError for a trace without spans.
    """
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    marks = [(e["name"], e["ts"] / 1e3) for e in events if e["ph"] == "i"]
    spans = [(e["tid"], e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in events if e["ph"] == "X"]
    if not spans:
        raise ValueError("the trace has no spans")
    if until is None:
        first_tokens = [at for name, at in marks if name == "first token"]
        until = MARGIN * (first_tokens[0] if first_tokens else max(end for *_, end in spans))
    lanes: dict[int, list[tuple[str, float, float]]] = {}
    for thread, name, start, end in spans:
        if start < until:
            lanes.setdefault(thread, []).append((name, start, min(end, until)))
    built = [Lane(names.get(thread, f"thread {thread}"), _nested(found, until)) for thread, found in lanes.items()]
    built.sort(key=lambda lane: lane.spans[0].start)
    return Picture(tuple(built), tuple(mark for mark in marks if mark[1] < until), until)


def _nested(spans: Iterable[tuple[str, float, float]], until: float) -> list[Span]:
    """Spans of one thread with their depths; those too short to be seen are left out."""
    ordered = sorted(spans, key=lambda span: (span[1], -span[2]))
    seen = [span for span in ordered if span[2] - span[1] >= LEAST_SHARE * until] or ordered[:1]
    nested: list[Span] = []
    around: list[float] = []  # ends of the spans that the next one may lie in
    for name, start, end in seen:
        while around and around[-1] <= start:
            around.pop()
        nested.append(Span(name, start, end, len(around)))
        around.append(end)
    return nested


def draw(picture: Picture, path: Path, title: str) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SystemExit("this needs matplotlib: install it with `pip install 'tokenspeed[peers]'`") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = sum(lane.depth for lane in picture.lanes)
    figure, axis = plt.subplots(figsize=(13, 1.4 + 0.27 * rows + 0.12 * len(picture.lanes)))
    kinds = list(dict.fromkeys(span.kind for lane in picture.lanes for span in lane.spans))
    palette = plt.get_cmap("tab20")
    colours = {kind: palette(i % palette.N) for i, kind in enumerate(kinds)}
    ticks, labels, top = [], [], 0.0
    for lane in picture.lanes:
        ticks.append(top + lane.depth / 2)
        labels.append(lane.name.removeprefix("tokenspeed-"))
        for span in lane.spans:
            width = span.end - span.start
            axis.broken_barh([(span.start, width)], (top + span.depth, 0.92), facecolors=colours[span.kind])
            if width > LABEL_SHARE_PER_LETTER * picture.until * len(span.name):
                middle = top + span.depth + 0.46
                axis.text(span.start + width / 2, middle, span.name, ha="center", va="center", fontsize=6.5)
        top += lane.depth + 0.45
        axis.axhline(top - 0.22, color="0.9", linewidth=0.6, zorder=0)
    for i, (name, at) in enumerate(picture.marks):
        axis.axvline(at, color="black", linewidth=0.8, linestyle=":")
        axis.text(at, -0.2 - 0.7 * (len(picture.marks) - i - 1), f"{name}, {at:.0f} ms ", ha="right", fontsize=7)
    axis.set_xlim(0, picture.until)
    axis.set_ylim(top, -0.1)
    axis.set_yticks(ticks, labels, fontsize=7)
    axis.set_xlabel("milliseconds after exec", fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.set_title(title, fontsize=9, pad=10 + 12 * len(picture.marks))
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("trace", type=Path, help="what --trace wrote")
    arguments.add_argument("picture", type=Path, help="a .png or .svg to write")
    arguments.add_argument("--title", default="tokenspeed serve: from exec to the first streamed token")
    arguments.add_argument("--until", type=float, metavar="MS", help="where the picture ends (default: first token)")
    args = arguments.parse_args(argv)
    draw(arrange(json.loads(args.trace.read_text()), args.until), args.picture, args.title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
