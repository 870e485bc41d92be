"""The progress bar of commands that work through cells."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def bar_of_cells(title: str, total: int, completed: int) -> Generator[Callable[[str], None]]:
    """A progress bar on stderr; yields a function to call with a description whenever a cell is done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    console = Console(stderr=True)
    console = console if console.is_terminal else Console(stderr=True, width=120)
    with Progress(*columns, console=console) as bar:
        line = bar.add_task(title, total=total, completed=completed)
        yield lambda what: bar.update(line, advance=1, description=what)
