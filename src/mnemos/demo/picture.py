"""Recall by distance as a PNG, for places that cannot show HTML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .facts import CHANCE

if TYPE_CHECKING:
    from .run import DemoReport


def picture(report: DemoReport, path: Path) -> Path | None:
    """Draw the picture. Returns its path, or None if matplotlib (extra `plots`) is not installed: the page has the same picture."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    for (name, found), color in zip(report.recall.items(), ("#d9480f", "#1c7ed6")):
        label = "attention window and memory" if name == "memory" else "attention window only, same size"
        axis.plot([a.distance for a in found], [a.recall for a in found], marker="o", color=color, label=label)
    axis.axhline(CHANCE, color="grey", ls=":", lw=1)
    axis.axvline(report.plan.reach, color="grey", ls="--", lw=1)
    axis.text(report.plan.reach * 1.08, 0.5, "reach of the\nwindows", color="grey", fontsize=8)
    axis.set_xscale("log", base=2)
    distances = [a.distance for a in report.recall["memory"]]
    axis.set_xticks(distances, [f"{d:,}" for d in distances])
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axis.set(xlabel="tokens since the facts", ylabel="facts recalled", ylim=(-0.03, 1.05))
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="center right")
    figure.savefig(path, dpi=110)
    return path
