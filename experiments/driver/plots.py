"""Results as a picture: one axis per plot of a config, a line per series with its name beside it, means over seeds.

{title: ..., x: pairs, y: accuracy, series: model, best: lr, where: {dim: 64}, log_x: true}
{title: ..., x: recall@, series: model}      # measured quantities whose names go on with a number: x is the number
{title: ..., dots: model, y: bits}           # a line of the picture per model: its mean, and the interval over seeds
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from mnemos.colours import PALETTE, colours_of
from mnemos.drawing import SOFT, label_lines, new_figure, save, styled
from mnemos.trials.intervals import interval

from .tables import Row, select, tuned

MODEL = re.compile(r",| ×| additive")  # behind it the name of a variant begins: "swa, convolution"


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
    """All plots of a config below each other, each with its finding as title. Needs matplotlib (extra `plots`)."""
    names = list(names)
    heights = [max(3.8, 0.24 * len(dots(rows, names, plot)) + 1.4) if "dots" in plot else 3.8 for plot in plots]
    with styled():
        figure = new_figure(6.6, sum(heights))
        for axis, plot in zip(figure.subplots(len(plots), 1, squeeze=False, height_ratios=heights)[:, 0], plots):
            (_draw_dots if "dots" in plot else _draw_lines)(axis, rows, names, plot)
            axis.set_title(finding(rows, names, plot), pad=20, wrap=True)
            above = {"xytext": (0, 5), "textcoords": "offset points", "va": "bottom"}
            axis.annotate(plot["title"], (0, 1), xycoords="axes fraction", color=SOFT[0], fontsize=9, **above)
            axis.grid(alpha=0.6, lw=0.6)
        save(figure, path)


def finding(rows: list[Row], names: Iterable[str], plot: dict[str, Any]) -> str:
    """The title of a plot: the best series, unless another one is as good within the intervals.

    A config may have its own as `finding`.
    """
    if plot.get("finding"):
        return plot["finding"]
    sign = -1 if plot.get("lower", False) else 1
    if "dots" in plot:
        ordered = sorted(dots(rows, names, plot).items(), key=lambda item: -sign * item[1][0])
        if len(ordered) < 2:
            return ""
        (best, (mean, half)), (second, (other, other_half)) = ordered[:2]
        word = "lowest" if sign < 0 else "highest"
        if not (half and other_half):
            return f"{best} is {word}: {mean:.3g} (one seed)"
        if abs(mean - other) <= half + other_half:
            return f"{best} is {word}, {second} within noise"
        return f"{best} is {word}: {mean:.3g} against {other:.3g} of {second}"
    lines = {name: line for name, line in points(rows, names, plot).items() if line}
    if len(lines) < 2:
        return ""
    last = max(line[-1][0] for line in lines.values())
    ends = {name: line[-1][1] for name, line in lines.items() if line[-1][0] == last}
    best = max(ends, key=lambda name: sign * ends[name])
    return f"{_name(plot, best)} is {'lowest' if sign < 0 else 'highest'} at {last:,g}: {ends[best]:.3g}"


def _name(plot: dict[str, Any], name: Any) -> str:
    return name if isinstance(name, str) else f"{plot['series']} {name}"


def _draw_dots(axis: Any, rows: list[Row], names: list[str], plot: dict[str, Any]) -> None:
    found = dots(rows, names, plot)
    models = {name: MODEL.split(str(name))[0] for name in found}  # variants of a model have its colour
    places = colours_of(models.values())
    for i, (name, (mean, half)) in enumerate(found.items()):
        color = PALETTE[places[models[name]]][0]
        axis.errorbar([mean], [i], xerr=[half] if half else None, fmt="o", ms=5, capsize=2, lw=1.2, color=color)
    axis.set_yticks(range(len(found)), list(map(str, found)), fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel=plot.get("y_label", plot["y"]))
    if found:  # all intervals lie inside the axis
        low, high = min(mean - half for mean, half in found.values()), max(mean + half for mean, half in found.values())
        room = 0.05 * (high - low) or 0.5
        axis.set_xlim(low - room, high + room)


def _draw_lines(axis: Any, rows: list[Row], names: list[str], plot: dict[str, Any]) -> None:
    lines = points(rows, names, plot)
    every = sorted({x for line in lines.values() for x, _ in line if isinstance(x, int | float)})
    places, ends = colours_of(_name(plot, name) for name in lines), []
    for i, (name, line) in enumerate(lines.items()):
        label = _name(plot, name)
        color = PALETTE[places[label]][0]
        axis.plot([x for x, _ in line], [y for _, y in line], marker="osD^vP*X"[i % 8], ms=5, lw=1.6, color=color)
        ends.append((label, line[-1][1], color))
    if plot.get("log_x"):
        axis.set_xscale("log", base=2)
        axis.set_xticks(every, [f"{x:g}" for x in every])
        axis.minorticks_off()
    if "chance" in plot:
        axis.axhline(plot["chance"], color=SOFT[0], lw=0.8, ls=":")
        ends.append(("chance", plot["chance"], SOFT[0]))
    axis.set(xlabel=plot.get("x_label", plot["x"].rstrip("@")), ylabel=plot.get("y_label", plot.get("y", "")))
    label_lines(axis, ends)
