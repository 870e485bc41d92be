"""Line charts as SVG text, for self-contained pages."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 20, 14, 42
COLORS = ("#d9480f", "#1c7ed6", "#868e96")


@dataclass(frozen=True)
class Line:
    """A curve: name, points, and whether to draw dots on the line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = True


@dataclass(frozen=True)
class Mark:
    """A dashed line at an x (or y) value, with its name."""

    name: str
    x: float | None = None
    y: float | None = None


def chart(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    y_range: tuple[float, float],
    log: str = "",
    percent: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    """One chart, `<svg>…</svg>`; colours follow the order of the lines. log: the logarithmic axes, "x", "y" or "xy".

    >>> chart([Line("a", [1, 2], [0, 1])], "x", "y", (0, 1)).startswith("<svg")
    True
    """
    xs = [x for line in lines for x in line.x]
    low, high = min(xs), max(xs)
    place_x = _axis(low, high, LEFT, WIDTH - RIGHT, "x" in log)
    place_y = _axis(*y_range, HEIGHT - BOTTOM, TOP, "y" in log)
    title = f"{y_label} by {x_label}: {', '.join(line.name for line in lines)}"
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for tick in _log_ticks(*y_range) if "y" in log else _ticks(*y_range):
        y, text = place_y(tick), f"{tick:.0%}" if percent else _short(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in _log_ticks(low, high) if "x" in log else _ticks(low, high):
        parts.append(
            f'<text x="{place_x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_short(tick)}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(x_label)}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="11" y="{middle}" text-anchor="middle" transform="rotate(-90 11 {middle})">{html.escape(y_label)}</text>'
    )
    parts += [_mark(mark, place_x, place_y) for mark in marks]
    for line, color in zip(lines, COLORS):
        points = [(place_x(x), place_y(min(max(y, y_range[0]), y_range[1]))) for x, y in zip(line.x, line.y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        if line.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points]
    parts.append("</svg>")
    names = "".join(
        f'<span><i style="background:{color}"></i>{html.escape(line.name)}</span>' for line, color in zip(lines, COLORS)
    )
    names += "".join(
        f'<span><i class="dash"></i>{html.escape(mark.name)}</span>' for mark in marks if mark.y is not None
    )
    return "".join(parts) + f'<div class="legend">{names}</div>'


def _axis(low: float, high: float, start: float, end: float, log: bool):
    """A function that maps values to pixels."""
    if log:
        low, high = math.log10(low), math.log10(high)
    span = (high - low) or 1.0
    return lambda v: start + ((math.log10(v) if log else v) - low) / span * (end - start)


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from low to high.

    >>> _ticks(0, 1)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = (high - low) / wanted or 1.0
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; if fewer than three, also 2 and 5 times them.

    >>> _log_ticks(4, 4096), _log_ticks(30, 600)
    ([10.0, 100.0, 1000.0], [50.0, 100.0, 200.0, 500.0])
    """
    for factors in ((1,), (1, 2, 5)):
        found = [f * 10.0**i for i in range(-9, 16) for f in factors if low <= f * 10.0**i <= high]
        if len(found) >= 3:
            return found
    return [low, high]


def _mark(mark: Mark, place_x, place_y) -> str:
    name = html.escape(mark.name)
    if mark.x is not None:
        x = place_x(mark.x)
        line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        return line + f'<text x="{x + 4:.1f}" y="{(TOP + HEIGHT - BOTTOM) / 2:.1f}">{name}</text>'
    y = place_y(mark.y)  # named in the legend, because lines may cross it here
    return f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _short(value: float) -> str:
    """A short form of a number.

    >>> _short(100000), _short(0.25), _short(2_500_000)
    ('100k', '0.25', '2.5M')
    """
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
