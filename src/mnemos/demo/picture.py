"""Recall by distance as a PNG, for places that cannot show HTML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..drawing import SOFT, label_lines, new_figure, save, styled
from .facts import CHANCE
from .page import MODEL_COLORS, finding

if TYPE_CHECKING:
    from .run import DemoReport


def picture(report: DemoReport, path: Path) -> Path | None:
    """Draw the picture, as SVG or PNG by its suffix. Returns its path, or None if matplotlib (extra `plots`) is not installed: the page has the same picture."""
    try:
        with styled():
            _draw(report, path)
    except ValueError:
        return None
    return path


def _draw(report: DemoReport, path: Path) -> None:
    figure = new_figure(7.6, 3.7)
    axis = figure.add_subplot()
    ends = []
    for name, found in report.recall.items():
        axis.plot([a.distance for a in found], [a.recall for a in found], marker="o", ms=4, color=MODEL_COLORS[name])
        ends.append((name, found[-1].recall, MODEL_COLORS[name]))
    axis.axhline(CHANCE, color=SOFT[0], ls=":", lw=1)
    axis.axvline(report.plan.reach, color=SOFT[0], ls="--", lw=1)
    axis.text(report.plan.reach * 1.08, 0.45, "reach of\nthe windows", color=SOFT[0], fontsize=8)
    axis.set_xscale("log")
    distances = [a.distance for a in report.recall["memory"]]
    axis.set_xticks(distances, [f"{d:,}" for d in distances])
    axis.minorticks_off()
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axis.set(xlabel="tokens since the facts", ylabel="facts recalled", ylim=(-0.03, 1.05))
    axis.set_title(finding(report))
    axis.grid(alpha=0.6, lw=0.6)
    label_lines(axis, [*ends, ("guessing", CHANCE, SOFT[0])])
    save(figure, path)
