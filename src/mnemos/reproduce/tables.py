"""From rows to tables: the best learning rate of each point, means over seeds, one quantity down and one across.

A table in a config:

    {title: ..., rows: model, columns: pairs, value: accuracy, best: lr, where: {dim: 64}}
    {title: ..., rows: model, values: [bits@chunk8, bits@chunk64], lower: true}

`best`: what is tuned; each point shows the value of it that did best on average over seeds. `lower`: less is better. `where`: which rows
count; a list admits any of its values. `values` in place of columns and value: one column per measured quantity, all of the rows that are
best by the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..trials.intervals import interval

Row = dict[str, Any]


def matches(row: Row, where: dict[str, Any]) -> bool:
    """Whether a row has these values; of a list, any."""
    return all(row.get(name) in (value if isinstance(value, list) else [value]) for name, value in where.items())


def select(rows: Iterable[Row], where: dict[str, Any] | None) -> list[Row]:
    return [row for row in rows if "error" not in row and matches(row, where or {})]


def tuned(rows: list[Row], names: Iterable[str], best: str | None, value: str, lower: bool) -> list[Row]:
    """Of every point, the rows with the best value of `best`: that whose mean over seeds is highest, or lowest.

    names: what varies, besides what is measured. Only values of `best` that the most seeds have are considered, for one lucky seed is no tuning.

    >>> rows = [{"lr": lr, "seed": s, "x": x} for lr, s, x in ((1, 0, 0.5), (1, 1, 0.7), (2, 0, 0.9), (2, 1, 0.1))]
    >>> [row["x"] for row in tuned(rows, ["lr", "seed"], "lr", "x", lower=False)]
    [0.5, 0.7]
    """
    rows = [row for row in rows if row.get(value) is not None]
    if best is None:
        return rows
    points: dict[tuple, dict[Any, list[Row]]] = {}
    for row in rows:
        point = tuple((name, row.get(name)) for name in sorted(names) if name not in (best, "seed"))
        points.setdefault(point, {}).setdefault(row.get(best), []).append(row)
    kept = []
    for tried in points.values():
        most = max(map(len, tried.values()))
        means = {
            key: sum(row[value] for row in group) / len(group) for key, group in tried.items() if len(group) == most
        }
        kept += tried[(min if lower else max)(means, key=lambda key: means[key])]
    return kept


def pivot(rows: list[Row], names: Iterable[str], table: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of a table of a config, as text."""
    lower, best, names = table.get("lower", False), table.get("best"), list(names)
    chosen = select(rows, table.get("where"))
    down = table["rows"]
    lines = list(dict.fromkeys(row[down] for row in chosen if down in row))
    found: dict[tuple[Any, Any], str] = {}
    if "values" in table:
        columns: list[Any] = list(table["values"])
        kept = chosen if best is None else tuned(chosen, names, best, columns[0], lower)
        for value in columns:
            for line in lines:
                here = [row for row in kept if row[down] == line]
                found[line, value] = shown(
                    [row[value] for row in here if row.get(value) is not None], _nothing(here, value)
                )
    else:
        value, across = table["value"], table["columns"]
        columns = sorted({row[across] for row in chosen if across in row})
        kept = tuned(chosen, names, best, value, lower)
        for line in lines:
            for column in columns:
                here = [row for row in chosen if (row[down], row.get(across)) == (line, column)]
                found[line, column] = shown([row[value] for row in kept if row in here], _nothing(here, value))
    corner = down if "values" in table else f"{down} \\ {table['columns']}"
    return [corner, *map(str, columns)], [[str(line), *(found[line, column] for column in columns)] for line in lines]


def _nothing(rows: list[Row], value: str) -> str:
    """What to show where no row has a value."""
    return "diverged" if any("diverged" in row and value not in row for row in rows) else "–"


def shown(values: list[float], nothing: str = "–") -> str:
    """Mean, with the 95 % interval over seeds where there are several; a dash, or another word, where there is nothing.

    >>> shown([0.5]), shown([0.5, 0.6, 0.7]), shown([]), shown([44])
    ('0.500', '0.600 ± 0.248', '–', '44')
    """
    if not values:
        return nothing
    mean, half = interval(values)
    if all(isinstance(x, int) for x in values) and len(set(values)) == 1:
        return f"{values[0]:,}"
    return f"{mean:.3f}" + ("" if half is None else f" ± {half:.3f}")
