"""Plots in one style by matplotlib (extra `plots`): findings as titles, names beside the lines, SVG for light and dark pages.

An SVG adapts by itself: a style inside it replaces every colour by its dark counterpart where the reader prefers dark.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .atomic_io import write_text
from .colours import PALETTE

INK, SOFT, LINE = ("#1d1c1a", "#ecebe8"), ("#5d5a55", "#aaa7a1"), ("#dedad3", "#3a3d41")
STYLE: Any = {
    "axes.edgecolor": SOFT[0],
    "axes.labelcolor": SOFT[0],
    "xtick.color": SOFT[0],
    "ytick.color": SOFT[0],
    "text.color": INK[0],
    "axes.titlecolor": INK[0],
    "grid.color": LINE[0],
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "svg.hashsalt": "mnemos",
}


def new_figure(width: float, height: float) -> Any:
    """An empty figure in the project's style; raises a ValueError without matplotlib. Draw inside `styled()`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib, which is not installed: pip install 'mnemos[plots]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def styled() -> Any:
    """A context in which plots have the project's style."""
    try:
        from matplotlib import rc_context
    except ImportError:
        raise ValueError("drawing needs matplotlib, which is not installed: pip install 'mnemos[plots]'") from None
    return rc_context(STYLE)


def label_lines(axis: Any, ends: Sequence[tuple[str, float, str]], size: float = 8) -> None:
    """Names beside the axis at the heights where lines end, moved apart where they would overlap. ends: (name, last y, colour).

    Call it when the limits and the scale of y are set.
    """
    if not ends:
        return
    place = axis.get_subplotspec()
    ratios = place.get_gridspec().get_height_ratios()
    inches = axis.figure.get_size_inches()[1] * ratios[place.rowspan.start] / sum(ratios)
    step = 1.25 * size / 72 / (inches * 0.72)  # of the axis, about
    to_axis = axis.transData + axis.transAxes.inverted()
    x = axis.get_xlim()[1]
    placed = sorted((float(to_axis.transform((x, y))[1]), name, colour) for name, y, colour in ends)
    heights: list[float] = []
    for height, *_ in placed:
        heights.append(max(height, heights[-1] + step) if heights else max(0.0, height))
    over = heights[-1] - 1.0
    if over > 0:  # move the crowded top down, as far as the names below allow
        ceiling = 1.0
        for i in reversed(range(len(heights))):
            heights[i] = min(heights[i], ceiling)
            ceiling = heights[i] - step
    for (_, name, colour), height in zip(placed, heights):
        axis.text(1.02, height, name, transform=axis.transAxes, color=colour, fontsize=size, va="center", clip_on=False)


def save(figure: Any, path: str | os.PathLike) -> None:
    """Write a figure. An SVG follows the reader's preference for light or dark; other formats get a white background."""
    path = Path(path)
    if path.suffix.lower() != ".svg":
        figure.savefig(path, dpi=120, facecolor="white")
        return
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    write_text(path, adaptive(out.getvalue()))


def adaptive(svg: str) -> str:
    """An SVG whose colours of the palette change where the reader prefers dark.

    >>> "prefers-color-scheme: dark" in adaptive('<svg><path style="fill: #0b62c4"/></svg>')
    True
    """
    rules = [
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
        for light, dark in (*PALETTE, INK, SOFT, LINE)
        for kind in ("fill", "stroke")
        if f"{kind}: {light}" in svg
    ]
    style = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    at = svg.index(">", svg.index("<svg")) + 1
    return svg[:at] + style + svg[at:]
