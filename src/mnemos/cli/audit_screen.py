"""The screen of `mnemos audit`: each check as it finishes, and a line about the one that runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..audit.result import AuditResult, Row, shown
from ..audit.watch import Watch

COLOURS = {"pass": "green", "fail": "bold red", "not applicable": "dim"}
WIDTHS = {"check": 10, "verdict": 14, "number": 8, "limit": 7, "seconds": 7}
PLAIN_WIDTH = 160  # of output that is no terminal
EVERY = 30.0  # seconds between lines about a running check, where no line can be redrawn


class AuditScreen(Watch):
    """Prints a row when a check finishes; on stderr, or below the rows on a terminal, the running check, its part and its time.

    Where stderr is no terminal, a line every half minute takes the place of the redrawn one.
    """

    def __init__(self) -> None:
        out = Console()
        self.out = out if out.is_terminal else Console(width=PLAIN_WIDTH)
        status = self.out if self.out.is_terminal else Console(stderr=True)
        self.redraws = status.is_terminal
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[hint]}"),
        )
        self.bar = Progress(*columns, console=status, transient=True, disable=not self.redraws)
        self.line = self.bar.add_task("preparing the model", total=None, hint="")
        self.rows: list[Row] = []
        self.about: dict[str, Any] = {}
        self.checks: list[str] = []
        self.check, self.parts, self.of = "", 0, 0
        self.began = self.check_began = self.said = time.perf_counter()

    def __enter__(self) -> AuditScreen:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def started(self, about: dict[str, Any], checks: Sequence[str]) -> None:
        self.about, self.checks = about, list(checks)
        title = f"{about['model']}: {about['parameters']:,} parameters, {about['dtype']}, texts of {about['tokens']:,} tokens, rounding in {about['rounding']}"
        self._print(Text(title, style="italic"))
        header = Text.assemble(
            *((f"{name:>{w}}  " if _is_number(name) else f"{name:<{w}}  ") for name, w in WIDTHS.items()), "finding"
        )
        header.stylize("bold")
        self._print(header)
        self._print(Text("─" * min(self.out.width, PLAIN_WIDTH)))

    def running(self, check: str) -> None:
        self.check, self.parts, self.of = check, 0, 0
        self.check_began = self.said = time.perf_counter()
        self._update()

    def expect(self, parts: int) -> None:
        self.of = parts
        self._update()

    def part(self) -> None:
        self.parts += 1
        self._update()

    def finished(self, row: Row) -> None:
        self.rows.append(row)
        self._print(_line(row))

    def partial_result(self) -> AuditResult:
        """The checks that were finished, and the names of the others."""
        about = self.about | {"seconds": round(time.perf_counter() - self.began, 3)}
        return AuditResult(about, list(self.rows), self.checks[len(self.rows) :])

    def print_counts(self, result: AuditResult) -> None:
        """Print the number of checks that passed, failed or were not applicable, and the checks that were not finished."""
        counts = ", ".join(f"{count} {status}" for status, count in result.counts.items())
        rest = f"; interrupted, not finished: {', '.join(result.unfinished)}" if result.unfinished else ""
        self._print(Text(f"\n{counts} ({result.about['seconds']:.1f} s){rest}"))

    def _update(self) -> None:
        part = f", part {self.parts + 1} of at most {max(self.of, self.parts + 1)}" if self.of else ""
        place = f"check {len(self.rows) + 1} of {len(self.checks)}: {self.check}{part}"
        self.bar.update(self.line, description=place, hint="(Ctrl-C stops, and keeps the finished checks)")
        now = time.perf_counter()
        if not self.redraws and now - self.said >= EVERY:
            self.said = now
            print(f"{place}, {now - self.check_began:.0f} s", file=sys.stderr, flush=True)

    def _print(self, what: Text | Table) -> None:
        self.out.print(what, highlight=False)
        self.out.file.flush()


def _is_number(column: str) -> bool:
    return column not in ("check", "verdict")


def _line(row: Row) -> Table:
    """One row of the table, with the widths that all rows share."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    for name, width in WIDTHS.items():
        table.add_column(width=width, justify="right" if _is_number(name) else "left", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    finding = Text(row.text)
    finding.append(f"\n{row.command}", style="dim")
    verdict = Text(row.status, style=COLOURS[row.status])
    table.add_row(row.check, verdict, shown(row.number), shown(row.limit), f"{row.seconds:.1f}", finding)
    return table
