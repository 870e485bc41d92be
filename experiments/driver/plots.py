"""Results as a picture: one axis per plot of a config, a line per series, means over seeds.

{title: ..., x: pairs, y: accuracy, series: model, best: lr, where: {dim: 64}, log_x: true}
{title: ..., x: recall@, series: model}      # measured quantities whose names go on with a number: x is the number
{title: ..., dots: model, y: bits}           # a line of the picture per model: its mean, and the interval over seeds
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from mnemos.trials.intervals import interval

from .tables import Row, select, tuned


def points(rows: list[Row], names: Iterable[str], plot: dict[str, Any]) -> dict[Any, list[tuple[float, float]]]:
    """Series -> (x, mean y), sorted by x."""
    names, lower = list(names), plot.get("lower", False)
    chosen = select(rows, plot.get("where"))
    found: dict[Any, dict[float, list[float]]] = {}
    if plot["x"].endswith("@"):
        prefix = plot["x"]
        for value in sorted({name for row in chosen for name in row if name.startswith(prefix)}):
            number = float(value.removeprefix(prefix).removeprefix("chunk"))
            for row in tuned(chosen, names, plot.get("best"), value, lower):
                found.setdefault(row[plot["series"]], {}).setdefault(number, []).append(row[value])
    else:
        for row in tuned(chosen, names, plot.get("best"), plot["y"], lower):
            found.setdefault(row[plot["series"]], {}).setdefault(row[plot["x"]], []).append(row[plot["y"]])
    return {name: [(x, sum(ys) / len(ys)) for x, ys in sorted(line.items())] for name, line in found.items()}


def dots(rows: list[Row], names: Iterable[str], plot: dict[str, Any]) -> dict[Any, tuple[float, float]]:
    """Name -> mean and half of the interval over seeds (0 of a single one), in the order of the rows."""
    found: dict[Any, list[float]] = {}
    for row in tuned(select(rows, plot.get("where")), names, plot.get("best"), plot["y"], plot.get("lower", False)):
        found.setdefault(row[plot["dots"]], []).append(row[plot["y"]])
    return {name: (interval(values)[0], interval(values)[1] or 0.0) for name, values in found.items()}


def draw(rows: list[Row], names: Iterable[str], plots: list[dict[str, Any]], path: str | os.PathLike) -> None:
    """All plots of a config side by side. Needs matplotlib (extra `plots`)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib, which is not installed: pip install 'mnemos[plots]'") from None
    names = list(names)
    most = max((len(dots(rows, names, plot)) for plot in plots if "dots" in plot), default=0)
    figure = Figure(figsize=(6.2 * len(plots), max(4.2, 0.24 * most + 1.2)), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, plot in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots):
        (_draw_dots if "dots" in plot else _draw_lines)(axis, rows, names, plot)
        axis.set_title(plot["title"], fontsize=10)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def _draw_dots(axis: Any, rows: list[Row], names: list[str], plot: dict[str, Any]) -> None:
    found = dots(rows, names, plot)
    means, halves = [mean for mean, _ in found.values()], [half for _, half in found.values()]
    axis.errorbar(means, range(len(found)), xerr=halves, fmt="o", ms=5, capsize=2, lw=1.2)
    axis.set_yticks(range(len(found)), list(map(str, found)), fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel=plot.get("y_label", plot["y"]))
    if means:
        room = 0.05 * (max(means) - min(means)) or 0.5  # whiskers of two seeds may be longer than the picture
        axis.set_xlim(min(means) - 2 * room, max(means) + 2 * room)


def _draw_lines(axis: Any, rows: list[Row], names: list[str], plot: dict[str, Any]) -> None:
    lines = points(rows, names, plot)
    every = sorted({x for line in lines.values() for x, _ in line if isinstance(x, int | float)})
    for i, (name, line) in enumerate(lines.items()):
        label = name if isinstance(name, str) else f"{plot['series']} {name}"
        axis.plot([x for x, _ in line], [y for _, y in line], marker="osD^vP*X"[i % 8], ms=5, lw=1.6, label=label)
    if plot.get("log_x"):
        axis.set_xscale("log", base=2)
        axis.set_xticks(every, [f"{x:g}" for x in every])
        axis.minorticks_off()
    if "chance" in plot:
        axis.axhline(plot["chance"], color="grey", lw=0.8, ls=":", label="chance")
    axis.set(xlabel=plot.get("x_label", plot["x"].rstrip("@")), ylabel=plot.get("y_label", plot.get("y", "")))
