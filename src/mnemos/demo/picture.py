"""Recall by distance as a PNG, for places that cannot show HTML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .facts import CHANCE
from .page import MODEL_COLORS, finding

if TYPE_CHECKING:
    from .run import DemoReport


def picture(report: DemoReport, path: Path) -> Path | None:
    """Draw the picture. Returns its path, or None if matplotlib (extra `plots`) is not installed: the page has the same picture."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    for name, found in report.recall.items():
        axis.plot([a.distance for a in found], [a.recall for a in found], marker="o", ms=4, color=MODEL_COLORS[name])
        last = found[-1]
        above = name != "window only" and last.recall < 0.8
        axis.annotate(
            name,
            (last.distance, last.recall),
            (0, 9 if above else -12),
            textcoords="offset points",
            color=MODEL_COLORS[name],
            ha="right",
            va="bottom" if above else "top",
        )
    axis.axhline(CHANCE, color="grey", ls=":", lw=1)
    axis.axvline(report.plan.reach, color="grey", ls="--", lw=1)
    axis.text(report.plan.reach * 1.08, 0.5, "reach of the\nwindows", color="grey", fontsize=8)
    axis.set_xscale("log")
    distances = [a.distance for a in report.recall["memory"]]
    axis.set_xticks(distances, [f"{d:,}" for d in distances], fontsize=8)
    axis.minorticks_off()
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axis.set(xlabel="tokens since the facts", ylabel="facts recalled", ylim=(-0.08, 1.08))
    axis.set_title(finding(report), fontsize=10, loc="left")
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=110)
    return path
