"""Tables for terminals of any width."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str], title: str = "") -> None:
    """Print the rows in the width of the terminal, or in full width without one. left: columns to align left."""
    from rich.console import Console

    console = Console()
    console = console if console.is_terminal else Console(width=200)
    console.print(*fitting(console.width, columns, rows, left, title), highlight=False)


def fitting(
    width: int, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str], title: str = ""
) -> list[Table]:
    """The rows as one table, or as several if `width` characters are too few: nothing is cut off, and each begins with the first column.

    >>> [len(table.columns) for table in fitting(24, ["name", "step", "loss"], [["first", "1,000", "1.2345"]], left=["name"])]
    [2, 2]
    """
    from rich.table import Table

    needed = [
        max(len(row[i]) for row in [columns, *rows]) + 3 for i in range(len(columns))
    ]  # a line and two blanks per column
    groups: list[list[int]] = [[0]]
    for i in range(1, len(columns)):
        if len(groups[-1]) > 1 and sum(needed[j] for j in [*groups[-1], i]) + 1 > width:
            groups.append([0])
        groups[-1].append(i)
    made = []
    for group in groups:
        table = Table(title=None if made else title or None, title_justify="left")
        for i in group:
            table.add_column(columns[i], justify="left" if columns[i] in left else "right", no_wrap=i == 0)
        for row in rows:
            table.add_row(*(row[i] for i in group))
        made.append(table)
    return made
