"""Results of several models side by side: one row per model, with its parameters and its training tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import read_json
from .headlines import Headline, best_of
from .suites import SUITES

COMPARISON_FORMAT = "mnemos.eval.comparison/1"


@dataclass
class Comparison:
    """names: of the models. columns: of the table. cells: name -> column -> headline; a column may be missing."""

    names: list[str]
    columns: list[str]
    cells: dict[str, dict[str, Headline]]
    sizes: dict[str, dict[str, int | None]]

    def best(self, column: str) -> float | None:
        """The best value of a column; None if fewer than two models have one, or all have the same."""
        return best_of([self.cells[name][column] for name in self.names if column in self.cells[name]])

    def rows(self) -> list[list[str]]:
        """The table: model, parameters, training tokens, then the columns; the best of a column has a star.

        >>> suites = {"mqar": {"rows": [{"pairs": 4, "accuracy": 0.5}]}}
        >>> compare({"a": {"suites": suites, "parameters": 1000}, "b": {"suites": {}}}).rows()
        [['a', '1,000', '-', '50.0 %'], ['b', '-', '-', '-']]
        """
        made = []
        for name in self.names:
            size = self.sizes[name]
            row = [name, *("-" if size[key] is None else f"{size[key]:,}" for key in ("parameters", "training_tokens"))]
            for column in self.columns:
                found = self.cells[name].get(column)
                star = " *" if found is not None and found.value == self.best(column) else ""
                row.append("-" if found is None else found.text() + star)
            made.append(row)
        return made

    def heads(self) -> list[str]:
        return ["model", "parameters", "training tokens", *self.columns]


def compare(results: Mapping[str, dict[str, Any]]) -> Comparison:
    """The comparison of results of `run_suites`, by name of the model."""
    cells: dict[str, dict[str, Headline]] = {name: {} for name in results}
    columns: dict[str, None] = {}  # in the order of suites, whichever model has them
    for suite in SUITES.values():
        for name, found in results.items():
            rows = found["suites"].get(suite.name, {}).get("rows")
            for headline in suite.headline(rows) if rows and suite.headline is not None else ():
                cells[name][headline.name] = headline
                columns[headline.name] = None
    sizes = {
        name: {key: found.get(key) for key in ("parameters", "training_tokens")} for name, found in results.items()
    }
    return Comparison(list(results), list(columns), cells, sizes)


def training_tokens(path: str | os.PathLike, checkpoint: str | None = None) -> int | None:
    """Tokens that the model of a run had read in training; None for other folders, whose training is not recorded."""
    from ..train.runs import find_checkpoint

    folder = Path(path)
    if not (folder / "config.yaml").is_file():
        return None
    try:
        tokens = read_json(find_checkpoint(folder, checkpoint or "best") / "state.json")["tokens"]
    except (ValueError, KeyError, TypeError):
        return None
    return tokens if type(tokens) is int else None


def short_names(paths: Sequence[str]) -> list[str]:
    """Names for a table: the last part of each path, or the whole path where that is not unique.

    >>> short_names(["runs/a", "runs/b"]), short_names(["x/a", "y/a"])
    (['a', 'b'], ['x/a', 'y/a'])
    """
    last = [Path(path).name or path for path in paths]
    return [name if last.count(name) == 1 else path for name, path in zip(last, paths)]
