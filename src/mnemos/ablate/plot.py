"""Plots an ablation: a dot per seed, and each mean with its interval."""

from __future__ import annotations

import os
from typing import Any

from .grid import FULL


def plot(rows: list[dict[str, Any]], path: str | os.PathLike, title: str, unit: str, chance: float | None) -> None:
    """Draw the rows of `summary` into a .png, .svg or .pdf file. Needs matplotlib (extra `plots`)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plotting needs matplotlib, which is not installed: pip install 'mnemos[plots]'") from None
    shown = [row for row in rows if "score" in row][::-1]
    figure = Figure(figsize=(7, 1.2 + 0.42 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    for y, row in enumerate(shown):
        color = "tab:orange" if row["ablation"] == FULL else "tab:blue"
        axis.plot(row["scores"], [y] * len(row["scores"]), "o", color=color, alpha=0.4, markersize=5)
        axis.errorbar(row["score"], y, xerr=row["score_interval"], fmt="|", color=color, markersize=16, capsize=4, lw=2)
        if row["ablation"] == FULL:
            axis.axvline(row["score"], color=color, lw=0.8, ls="--", zorder=0)
    if chance is not None:
        axis.axvline(chance, color="grey", lw=0.8, ls=":", zorder=0)
        axis.text(chance, len(shown) - 0.45, " chance", color="grey", fontsize=8)
    axis.set_yticks(range(len(shown)), [row["ablation"] for row in shown])
    axis.set(xlabel=f"{unit}, mean and 95 % interval", title=title, ylim=(-0.6, len(shown) - 0.2))
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=130)
