"""Charts as SVG text for self-contained pages without scripts: lines with their names beside them, and heat maps.

Colours are the custom properties of the shared style sheet, so a chart fits light and dark pages.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 520, 300
LEFT, TOP, BOTTOM = 56, 14, 44
RIGHT, RIGHT_BESIDE = 18, 132  # RIGHT_BESIDE: with the names of lines
LETTER, BOLD_LETTER = 6.4, 8.4  # widths of letters of labels and names, in pixels
LINE_HEIGHT = 15
MARK_HEIGHTS = (0.42, 0.55, 0.3, 0.68, 0.8)  # of the name of a vertical line, as parts of the height
Points = Sequence[tuple[float, float]]
CHARTS_CSS = """
.chart { margin: 8px 0 0 } .chart svg { width: 100%; max-width: 720px; height: auto; display: block } .chart svg text { font: 12px system-ui, sans-serif; fill: var(--soft); paint-order: stroke; stroke: var(--card); stroke-width: 3px }
.chart svg .name { font-weight: 600 } .chart svg .grid { stroke: var(--line) } .chart svg .mark { stroke: var(--soft); stroke-dasharray: 4 4 } .chart svg .cell { font-weight: 600; stroke: none }
"""


@dataclass(frozen=True)
class Line:
    """A curve: name, points, place of its colour in the palette, and whether to draw dots on it. dashed: for a variant of another line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dots: bool = True
    dashed: bool = False


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
    y_range: tuple[float, float] | None = None,
    log: str = "",
    percent: bool = False,
    marks: Sequence[Mark] = (),
    x_ticks: Sequence[float] | None = None,
) -> str:
    """One line chart, `<figure>…</figure>`, with the name of each line at its end. log: the logarithmic axes, "x", "y" or "xy".

    y_range: by default that of the lines, with room. x_ticks: by default round numbers.

    >>> chart([Line("a", [1, 2], [0, 1])], "x", "y", (0, 1)).startswith('<figure class="chart"><svg')
    True
    """
    xs = [x for line in lines for x in line.x]
    low, high = min(xs), max(xs)
    y_range = y_range or _room([y for line in lines for y in line.y], "y" in log)
    right = WIDTH - RIGHT_BESIDE
    place_x = _axis(low, high, LEFT, right, "x" in log)
    place_y = _axis(*y_range, HEIGHT - BOTTOM, TOP, "y" in log)
    title = f"{y_label} by {x_label}: {', '.join(line.name for line in lines)}"
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for tick in _log_ticks(*y_range) if "y" in log else _ticks(*y_range):
        y, text = place_y(tick), f"{tick:.0%}" if percent else _short(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    ticks = x_ticks or (_log_ticks(low, high) if "x" in log else _ticks(low, high))
    for tick, text in _apart(ticks, place_x):
        parts.append(f'<text x="{place_x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(x_label)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">{html.escape(y_label)}</text>'
    )
    labels: list[tuple[float, float, str, str]] = []  # y, x, text, style
    drawn = [
        [(place_x(x), place_y(min(max(y, y_range[0]), y_range[1]))) for x, y in zip(line.x, line.y)] for line in lines
    ]
    for mark in marks:
        parts.append(_mark(mark, place_x, place_y, right, drawn))
        if mark.y is not None:
            labels.append((place_y(mark.y), right, mark.name, ""))
    for line, points in zip(lines, drawn):
        colour = f"var(--c{line.colour})"
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" style="stroke: {colour}" stroke-width="2"{dashes}/>')
        if line.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" style="fill: {colour}"/>' for x, y in points]
        labels.append((points[-1][1], points[-1][0], line.name, f' class="name" style="fill: {colour}"'))
    parts += _names(labels, right)
    return f'<figure class="chart">{"".join(parts)}</svg></figure>'


def heat_map(
    cells: Sequence[Sequence[float | None]], columns: Sequence[str], rows: Sequence[str], x_label: str, y_label: str
) -> str:
    """Shares 0..1 as a grid: cells[row][column], None where nothing was measured. Strong colour is 1; each cell has its number.

    >>> heat_map([[0.5, None]], ["1k", "2k"], ["10 %"], "length", "depth").count('class="cell"')
    1
    """
    left, width, height = 74, WIDTH - RIGHT, 34
    each = (width - left) / max(1, len(columns))
    bottom = TOP + height * len(rows)
    title = f"{y_label} by {x_label}"
    parts = [f'<svg viewBox="0 0 {WIDTH} {bottom + BOTTOM}" role="img" aria-label="{html.escape(title)}">']
    for i, (name, line) in enumerate(zip(rows, cells)):
        y = TOP + height * i
        parts.append(f'<text x="{left - 8}" y="{y + height / 2 + 4:.1f}" text-anchor="end">{html.escape(name)}</text>')
        for j, value in enumerate(line):
            if value is None or not math.isfinite(value):
                continue
            x, strength = left + each * j, min(1.0, max(0.0, value))
            parts.append(
                f'<rect x="{x + 1:.1f}" y="{y + 1}" width="{each - 2:.1f}" height="{height - 2}" rx="3" style="fill: rgb(var(--cold) / {0.06 + 0.6 * strength:.2f})"/>'
                f'<text class="cell" x="{x + each / 2:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle" style="fill: var(--ink)">{value:.0%}</text>'
            )
    for j, name in enumerate(columns):
        parts.append(
            f'<text x="{left + each * (j + 0.5):.1f}" y="{bottom + 16}" text-anchor="middle">{html.escape(name)}</text>'
        )
    parts.append(f'<text x="{(left + width) / 2}" y="{bottom + 36}" text-anchor="middle">{html.escape(x_label)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">{html.escape(y_label)}</text>'
    )
    return f'<figure class="chart">{"".join(parts)}</svg></figure>'


def _names(labels: list[tuple[float, float, str, str]], right: float) -> list[str]:
    """Names beside the ends of lines, moved apart where they would overlap. Long names are broken into lines."""
    room = int((RIGHT_BESIDE - 12) / BOLD_LETTER)
    blocks = [(y, _broken(name, room), style) for y, _, name, style in sorted(labels)]
    tops: list[float] = []
    for y, lines, _ in blocks:
        top = y - LINE_HEIGHT * len(lines) / 2
        above = tops[-1] + LINE_HEIGHT * len(blocks[len(tops) - 1][1]) + 2 if tops else 0.0
        tops.append(max(top, above))
    lowest = HEIGHT - BOTTOM + 8.0
    for i in reversed(range(len(tops))):  # back up from the lower edge
        tops[i] = min(tops[i], lowest - LINE_HEIGHT * len(blocks[i][1]))
        lowest = tops[i] - 2
    made = []
    for (_, lines, style), top in zip(blocks, tops):
        for k, line in enumerate(lines):
            y = top + LINE_HEIGHT * (k + 0.75)
            made.append(f'<text x="{right + 9}" y="{y:.1f}"{style}>{html.escape(line)}</text>')
    return made


def _broken(name: str, room: int) -> list[str]:
    """A name in lines of at most `room` letters, three at most.

    >>> _broken("titans-mag, writes off", 14)
    ['titans-mag,', 'writes off']
    """
    lines = [""]
    for word in name.split():
        fits = len(lines[-1]) + len(word) + 1 <= room
        if lines[-1] and not fits:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    lines = [line if len(line) <= room else f"{line[: room - 1]}…" for line in lines]
    return lines[:3]


def _apart(ticks: Sequence[float], place: Callable[[float], float]) -> list[tuple[float, str]]:
    """The ticks whose texts do not overlap those before them."""
    kept: list[tuple[float, str]] = []
    edge = -math.inf
    for tick in ticks:
        text = _short(tick)
        half = LETTER * len(text) / 2
        if place(tick) - half >= edge + 6:
            kept.append((tick, text))
            edge = place(tick) + half
    return kept


def _axis(low: float, high: float, start: float, end: float, log: bool):
    """A function that maps values to pixels."""
    if log:
        low, high = math.log10(low), math.log10(high)
    span = (high - low) or 1.0
    return lambda v: start + ((math.log10(v) if log else v) - low) / span * (end - start)


def _room(values: Sequence[float], log: bool) -> tuple[float, float]:
    """The range of the finite values with room above and below."""
    finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
    low, high = min(finite), max(finite)
    if log:
        return low / 1.3, high * 1.3
    margin = 0.08 * ((high - low) or abs(high) or 1.0)
    return low - margin, high + margin


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


def _mark(mark: Mark, place_x, place_y, right: float, drawn: Sequence[Points]) -> str:
    if mark.x is not None:
        x = place_x(mark.x)
        line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        y = _clear_height(x + 4, LETTER * len(mark.name), drawn)
        return f'{line}<text x="{x + 4:.1f}" y="{y:.1f}">{html.escape(mark.name)}</text>'
    y = place_y(mark.y)  # its name stands beside the chart, because lines may cross it here
    return f'<line class="mark" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _clear_height(x: float, width: float, drawn: Sequence[Points]) -> float:
    """The height of a text at x that the fewest drawn lines cross."""

    def crossings(y: float) -> int:
        steps = [(a, b, i / 20) for points in drawn for a, b in zip(points, points[1:]) for i in range(21)]
        places = ((a[0] + t * (b[0] - a[0]), a[1] + t * (b[1] - a[1])) for a, b, t in steps)
        return sum(x <= u <= x + width and y - LINE_HEIGHT <= v <= y + 4 for u, v in places)

    return min((TOP + part * (HEIGHT - BOTTOM - TOP) for part in MARK_HEIGHTS), key=crossings)


def _short(value: float) -> str:
    """A short form of a number.

    >>> _short(100000), _short(0.25), _short(2_500_000), _short(1024)
    ('100k', '0.25', '2.5M', '1,024')
    """
    if 1000 < value < 10_000 and value % 10:  # a power of two
        return f"{value:,.0f}"
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
