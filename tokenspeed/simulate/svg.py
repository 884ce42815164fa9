"""Line charts as SVG text, without any package: panels side by side, axes with round ticks, one legend for all."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 520, 300
"""Of one panel, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44
LEGEND = 30
COLOURS = ("#1f6fb4", "#d1662a", "#2b8a57", "#8a4fb0", "#a8872a", "#5c6670")
DASHED = "5 3"


@dataclass(frozen=True)
class Line:
    """Points (x, y) in order of x. ``series`` chooses the colour, and is what the legend calls it."""

    series: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass
class Panel:
    """One chart. A logarithmic x axis shows the points above 0 alone. ``note`` stands beside the title."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line] = field(default_factory=list)
    log_x: bool = False
    y_max: float | None = None
    note: str = ""


def picture(title: str, panels: Sequence[Panel], columns: int = 2) -> str:
    """The panels as one SVG file. Series have the same colour in all of them."""
    series = list(dict.fromkeys(line.series for panel in panels for line in panel.lines))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(series)}
    rows = -(-len(panels) // columns)
    width, height = columns * WIDTH, LEGEND + rows * HEIGHT + 26
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="20" font-size="15" font-weight="bold">{html.escape(title)}</text>',
        *_legend(colours),
    ]
    for i, panel in enumerate(panels):
        x, y = i % columns * WIDTH, LEGEND + 26 + i // columns * HEIGHT
        body += [f'<g transform="translate({x} {y})">', *_panel(panel, colours), "</g>"]
    return "\n".join([*body, "</svg>"]) + "\n"


def _legend(colours: dict[str, str]) -> list[str]:
    drawn, x = [], 12.0
    for name, colour in colours.items():
        drawn.append(f'<rect x="{x:.0f}" y="33" width="18" height="4" fill="{colour}"/>')
        drawn.append(f'<text x="{x + 24:.0f}" y="40">{html.escape(name)}</text>')
        x += 48 + 7 * len(name)
    return drawn


def _panel(panel: Panel, colours: dict[str, str]) -> list[str]:
    shown = [
        (line, [p for p in line.points if all(map(math.isfinite, p)) and (p[0] > 0 or not panel.log_x)])
        for line in panel.lines
    ]
    xs = [x for _, points in shown for x, _ in points]
    ys = [y for _, points in shown for _, y in points]
    heading = f'<text x="{LEFT}" y="20" font-weight="bold">{html.escape(panel.title)}</text>'
    note = f'<text x="{WIDTH - RIGHT}" y="20" text-anchor="end" fill="#666666">{html.escape(panel.note)}</text>'
    if not xs:
        return [heading, note, f'<text x="{WIDTH // 2}" y="{HEIGHT // 2}" text-anchor="middle">nothing to show</text>']
    x_axis = _Axis.log(min(xs), max(xs)) if panel.log_x else _Axis.linear(min(0.0, *xs), max(xs))
    y_axis = _Axis.linear(0.0, panel.y_max if panel.y_max is not None else max(ys))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(x: float, y: float) -> str:
        across = LEFT + x_axis.share(x) * (right - LEFT)
        return f"{across:.1f},{bottom - y_axis.share(y) * (bottom - TOP):.1f}"

    drawn = [heading, note]
    for tick in x_axis.ticks:
        x = LEFT + x_axis.share(tick) * (right - LEFT)
        drawn.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#e4e4e4"/>')
        drawn.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{_label(tick)}</text>')
    for tick in y_axis.ticks:
        y = bottom - y_axis.share(tick) * (bottom - TOP)
        drawn.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#e4e4e4"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_label(tick)}</text>')
    drawn.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" stroke="#444444" fill="none"/>')
    middle = (LEFT + right) // 2
    drawn.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{html.escape(panel.x_label)}</text>')
    middle = (TOP + bottom) // 2
    drawn.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{html.escape(panel.y_label)}</text>'
    )
    for line, points in shown:
        if points:
            dashes = f' stroke-dasharray="{DASHED}"' if line.dashed else ""
            path = " ".join(at(x, min(y, y_axis.high)) for x, y in points)
            drawn.append(
                f'<polyline points="{path}" fill="none" stroke="{colours[line.series]}" stroke-width="1.6"{dashes}/>'
            )
    return drawn


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    @classmethod
    def linear(cls, low: float, high: float) -> _Axis:
        """Ticks at 1, 2 or 5 times a power of ten, four to nine of them."""
        high = high if high > low else low + 1.0
        step = 10.0 ** math.floor(math.log10((high - low) / 4))
        step *= max(m for m in (1, 2, 5) if m * step <= (high - low) / 4)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return cls(low, high, tuple(i * step for i in range(first, last + 1)))

    @classmethod
    def log(cls, low: float, high: float) -> _Axis:
        """Whole decades around the values, at each of them a tick, or at every few if there are many."""
        first = math.floor(math.log10(low) + 1e-9)
        last = max(first + 1, math.ceil(math.log10(high) - 1e-9))
        every = -(-(last - first) // 8)
        return cls(10.0**first, 10.0**last, tuple(10.0**i for i in range(first, last + 1, every)), True)

    def share(self, value: float) -> float:
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _label(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}"
