"""Run the cells of an experiment that have no result yet, in parallel processes; each is kept when it is done."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mnemos.eval.files import finite
from mnemos.trials import run_all

from .experiment import Cell, Experiment
from .kinds import run_cell

Report = Callable[[dict[str, Any]], object]


def missing(experiment: Experiment, path: Path, quick: bool = False) -> list[Cell]:
    """Cells without a result, or with one of another config."""
    known = {row["digest"] for row in experiment.results(path) if "error" not in row}
    return [cell for cell in experiment.cells(quick) if experiment.digest(cell, quick) not in known]


def run(
    experiment: Experiment,
    path: Path,
    quick: bool = False,
    workers: int | None = None,
    report: Report | None = None,
    text_folder: Path = Path("data"),
) -> list[dict[str, Any]]:
    """The rows of every cell, in the config's order. `report` is called with each new row. Rows of cells that the config no longer asks
    for are dropped. text_folder: where corpora that are files are."""
    wanted = {experiment.digest(cell, quick): cell for cell in experiment.cells(quick)}
    rows = {row["digest"]: row for row in experiment.results(path) if row["digest"] in wanted and "error" not in row}
    todo = [(digest, cell) for digest, cell in wanted.items() if digest not in rows]
    pieces = [(experiment.whole(cell, quick), text_folder) for _, cell in todo]
    for index, result in run_all(run_cell, pieces, workers):
        digest, cell = todo[index]
        rows[digest] = finite({**cell, **result, "digest": digest})
        experiment.write([rows[d] for d in wanted if d in rows], path, machine())
        if report is not None:
            report(rows[digest])
    return [rows[digest] for digest in wanted]


def machine() -> str:
    return (
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    )
