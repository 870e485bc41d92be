"""The grid in parallel processes. Finished cells are kept, so that a stopped run can resume.

A folder holds settings.json (the settings of the training) and results.jsonl (a line per cell); both are written atomically.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..atomic_io import check_not_foreign, write_text
from ..choices import unknown
from ..data.tasks.examples import whole
from ..eval.files import finite, read_json, write_json
from ..parsing import parse_json
from ..trials import run_all
from ..trials.text import fingerprint
from .cell import model_config, run_cell
from .grid import FULL, applicable
from .tasks import TASKS

OnCell = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class AblationSettings:
    """All settings of a score except the ablation and the seed.

    overrides: of `presets.config`. vocab_size and pairs are those of MQAR; the other tasks have their own. data: files and folders of the task
    text, as the sources of `mnemos.data`; empty for Python's own documentation.

    >>> AblationSettings(task="mqar", steps=100).check()
    """

    preset: str = "atlas"
    size: str = "nano"
    overrides: dict[str, Any] = field(default_factory=dict)
    task: str = "mqar"
    length: int = 64
    pairs: int = 4
    vocab_size: int = 64
    steps: int = 400
    batch_size: int = 16
    lr: float = 3e-3
    examples: int = 500
    data: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise an error for settings that cannot be trained, before anything starts."""
        if self.task not in TASKS:
            raise unknown("task=", self.task, TASKS)
        if self.data and self.task != "text":
            raise ValueError(f"data is the text of the task text, but the task is {self.task}")
        for name in ("steps", "batch_size", "examples"):
            whole(name, getattr(self, name), 1)
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr!r} must be > 0")
        chosen = dataclasses.asdict(self)
        TASKS[self.task].train(chosen, 0, 1)  # raises the task's own error for an impossible length or number of pairs
        model_config(chosen, FULL)


def run(
    settings: AblationSettings,
    folder: str | os.PathLike,
    ablations: Sequence[str] | None = None,
    seeds: int = 3,
    workers: int | None = None,
    report: OnCell | None = None,
) -> list[dict[str, Any]]:
    """Train the full model and every ablation (None: all that change the model) with `seeds` seeds each. Returns one result per cell.

    Finished cells in `folder` are not run again, unless they failed. `report` is called with every new result.
    A cell that cannot be run has an `error` instead of a score; the others continue.
    """
    settings.check()
    whole("seeds", seeds, 1)
    chosen = json.loads(json.dumps(dataclasses.asdict(settings)))
    if settings.data:
        chosen["data_version"] = fingerprint(settings.data)
    names = [FULL, *(applicable(model_config(chosen, FULL)) if ablations is None else dict.fromkeys(ablations))]
    for name in names:
        model_config(chosen, name)  # an unknown ablation, or one that changes nothing, raises now
    path = _open(Path(folder), chosen)
    results = read_results(path)
    wanted = [(name, seed) for seed in range(seeds) for name in dict.fromkeys(names)]
    done = {(r["ablation"], r["seed"]) for r in results if "error" not in r}
    missing = [cell for cell in wanted if cell not in done]
    if missing:
        workers = min(len(missing), whole("workers", (os.cpu_count() or 1) if workers is None else workers, 1))
        _run_cells(chosen, missing, workers, path, results, report)
    found = {(r["ablation"], r["seed"]): r for r in results}
    return [found[cell] for cell in wanted]


def _run_cells(
    settings: dict[str, Any],
    cells: list[tuple[str, int]],
    workers: int,
    path: Path,
    results: list[dict[str, Any]],
    report: OnCell | None,
) -> None:
    for index, result in run_all(run_cell, [(settings, *cell) for cell in cells], workers):
        name, seed = cells[index]
        if not math.isfinite(result.get("score", 0.0)):
            result = {"error": f"the score is {result['score']}"}
        if "error" in result:
            result = {"ablation": name, "seed": seed} | result
        kept = [r for r in results if (r["ablation"], r["seed"]) != (name, seed)]
        results[:] = [*kept, result]
        write_text(path, "".join(json.dumps(finite(r), allow_nan=False) + "\n" for r in results))
        if report is not None:
            report(result)


def _open(folder: Path, settings: dict[str, Any]) -> Path:
    """The results file of a folder that is new, or that holds results of the same settings."""
    about = folder / "settings.json"
    if not about.exists():
        check_not_foreign(folder, ("results.jsonl", "summary.json", "ablation.png"), "mnemos ablate")
    else:
        before = read_json(about)
        before = {"data": []} | before if isinstance(before, dict) else before  # of versions without data
        if not isinstance(before, dict) or {*before} - {"data_version"} != {*settings} - {"data_version"}:
            check_not_foreign(folder, ("settings.json",), "this version of mnemos ablate")
        differing = [
            f"{name}={before.get(name)!r} (now {settings.get(name)!r})"
            for name in {**before, **settings}
            if before.get(name) != settings.get(name)
        ]
        if differing:
            raise ValueError(f"{folder} holds an ablation with {', '.join(differing)}; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(about, settings)
    return folder / "results.jsonl"


def read_results(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of a results file; empty if there is no file."""
    path = Path(path)
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [parse_json(line, "a line") for line in lines if line.strip()]
    except ValueError as broken:
        raise ValueError(f"{path} is not a results file: {broken}") from None
    if not all(isinstance(row, dict) and {"ablation", "seed"} <= {*row} for row in rows):
        raise ValueError(f"{path} was not written by mnemos ablate: choose another output folder")
    return rows
