"""Tables for terminals of any width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def fitting(
    width: int, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, title: str = ""
) -> list[Table]:
    """The rows as one table, or as several below each other where `width` characters are too few: nothing is cut off, and the first
    column leads each. The first `left` columns are aligned left, the others right.

    >>> [len(table.columns) for table in fitting(24, ["name", "step", "loss"], [["first", "1,000", "1.2345"]], left=1)]
    [2, 2]
    """
    from rich.table import Table

    needed = [max(len(row[i]) for row in [columns, *rows]) + 3 for i in range(len(columns))]  # a line and two blanks
    groups: list[list[int]] = [[0]]
    for i in range(1, len(columns)):
        if len(groups[-1]) > 1 and sum(needed[j] for j in [*groups[-1], i]) + 1 > width:
            groups.append([0])
        groups[-1].append(i)
    made = []
    for group in groups:
        table = Table(title=title or None, title_justify="left")
        for i in group:
            table.add_column(columns[i], justify="left" if i < left else "right", no_wrap=i == 0)
        for row in rows:
            table.add_row(*(row[i] for i in group))
        made.append(table)
    return made
