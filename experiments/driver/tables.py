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

from mnemos.trials.intervals import interval

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
        kept = list(chosen) if best is None else tuned(chosen, names, best, columns[0], lower)
        if best is not None:
            kept += broken(chosen, kept, names, best, columns[0])
        for value in columns:
            for line in lines:
                here = [row for row in kept if row[down] == line]
                found[line, value] = _entry(here, [row for row in here if broke(row, value)], value)
    else:
        value, across = table["value"], table["columns"]
        columns = list(dict.fromkeys(row[across] for row in chosen if across in row))  # words as the config has them
        if not any(isinstance(column, str) for column in columns):
            columns.sort()
        kept = tuned(chosen, names, best, value, lower)
        lost = broken(chosen, kept, names, best, value)
        for line in lines:
            for column in columns:
                ours, theirs = (
                    [row for row in rows if (row[down], row.get(across)) == (line, column)] for rows in (kept, lost)
                )
                found[line, column] = _entry(ours, theirs, value)
    corner = down if "values" in table else f"{down} \\ {table['columns']}"
    return [corner, *map(str, columns)], [[str(line), *(found[line, column] for column in columns)] for line in lines]


def broke(row: Row, value: str) -> bool:
    """Whether a row was run and has no such value, for its memory left all numbers.

    >>> broke({"diverged": 1}, "x"), broke({"x": None}, "x"), broke({}, "x"), broke({"x": 1, "diverged": 1}, "x")
    (True, True, False, False)
    """
    return row.get(value) is None and ("diverged" in row or value in row)


def broken(rows: list[Row], kept: list[Row], names: Iterable[str], best: str | None, value: str) -> list[Row]:
    """Rows that broke, of the settings that `tuned` has kept, or of points of which it kept none: a mean over the seeds that are left
    would not tell."""

    def setting(row: Row, *without: str | None) -> tuple:
        return tuple(row.get(name) for name in names if name not in ("seed", *without))

    names = list(names)
    settings, points = {setting(row) for row in kept}, {setting(row, best) for row in kept}
    return [row for row in rows if broke(row, value) and (setting(row) in settings or setting(row, best) not in points)]


def _entry(rows: list[Row], lost: list[Row], value: str) -> str:
    values = [row[value] for row in rows if row.get(value) is not None]
    if not values:
        return "diverged" if lost else "–"
    return shown(values) + (f" ({len(lost)} of {len(lost) + len(values)} diverged)" if lost else "")


def shown(values: list[float]) -> str:
    """Mean, with the 95 % interval over seeds where there are several; a dash where there is nothing.

    >>> shown([0.5]), shown([0.5, 0.6, 0.7]), shown([]), shown([44])
    ('0.500', '0.600 ± 0.248', '–', '44')
    """
    if not values:
        return "–"
    mean, half = interval(values)
    if all(isinstance(x, int) for x in values) and len(set(values)) == 1:
        return f"{values[0]:,}"
    return f"{mean:.3f}" + ("" if half is None else f" ± {half:.3f}")
