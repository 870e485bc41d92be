"""Plots of results: one panel per suite that has a plot."""

from __future__ import annotations

import os
from typing import Any

from .suites import SUITES


def plot_results(results: dict[str, Any], path: str | os.PathLike) -> None:
    """Plot the suites of a results dictionary into one file. Needs matplotlib (extra `plots`)."""
    panels = {name: suite.plot for name, suite in SUITES.items() if suite.plot is not None}
    found = {name: entry["rows"] for name, entry in results["suites"].items() if entry.get("rows") and name in panels}
    if not found:
        raise ValueError(f"the results have none of the suites that can be plotted: {', '.join(panels)}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "drawing results needs matplotlib, which is not installed: pip install 'mnemos[plots]'"
        ) from None
    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    figure = Figure(figsize=(5.2 * columns, 4.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for i, (name, rows) in enumerate(found.items()):
        axis = figure.add_subplot(lines, columns, i + 1)
        panels[name](axis, rows)
        axis.set_title(name)
    figure.savefig(path, dpi=110)
