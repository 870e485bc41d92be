"""`mnemos data build` tokenises a corpus before training; `mnemos data show` prints its contents."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from ..data.config import DataConfig

if TYPE_CHECKING:
    from ..data import Data, ReadReport


@dataclass
class BuildData:
    """Tokenise the sources into shards, unless they exist, and print counts of the documents read and skipped."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Same as --sources."""
    data: Annotated[DataConfig, tyro.conf.arg(name="")] = field(default_factory=DataConfig)


@dataclass
class ShowData(BuildData):
    """Print counts of the documents read and skipped, and the first sequences of a training with this seed."""

    rows: int = 2
    """Sequences to print."""
    width: int = 400
    """Characters to print of each sequence."""
    seed: int = 0
    """Seed of the order of the data."""


def data(
    command: Annotated[
        Annotated[BuildData, tyro.conf.subcommand("build")] | Annotated[ShowData, tyro.conf.subcommand("show")],
        tyro.conf.arg(name=""),
    ],
) -> None:
    """Tokenise or show training data."""
    from ..data import open_data

    if isinstance(command, ShowData):
        for name in ("rows", "width", "seed"):
            if getattr(command, name) < 0:
                raise ValueError(f"{name}={getattr(command, name)} must be 0 or more")
    config = dataclasses.replace(command.data, sources=command.sources or command.data.sources, prefetch=0)
    opened = open_data(config, seed=command.seed if isinstance(command, ShowData) else 0)
    _print_report(opened)
    if isinstance(command, ShowData):
        _print_rows(opened, command.rows, command.width)


def _print_report(opened: Data) -> None:
    from rich.console import Console
    from rich.table import Table

    grid = Table(title="Read", title_justify="left")
    for column in ("source", "weight", "documents", "tokens", "bytes", "bytes/token", "repaired", "skipped"):
        grid.add_column(column, justify="left" if column in ("source", "skipped") else "right")

    def add(name: str, weight: str, report: ReadReport) -> None:
        numbers = (report.documents, report.tokens, report.bytes)
        grid.add_row(
            name,
            weight,
            *(f"{n:,}" for n in numbers),
            f"{report.bytes_per_token:.2f}",
            f"{report.repaired:,}",
            report.why_skipped() or "-",
        )

    for (name, report), weight in zip(opened.report.sources.items(), opened.weights):
        add(name, f"{weight:.3f}", report)
    if len(opened.report.sources) > 1:
        add("all", "1.000", opened.report)
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    console.print(grid, highlight=False)
    parts = ", ".join(f"{name} {tokens:,}" for name, tokens in opened.report.splits.items() if tokens)
    print(f"Tokens: {parts}. Tokenizer {opened.tokenizer.name}, vocabulary {opened.vocab_size:,}.")
    for note in opened.report.notes:
        print(note)
    for store in opened.stores:
        print(f"Shards: {store.folder}")


def _print_rows(opened: Data, rows: int, width: int) -> None:
    shown = 0
    for batch in opened.train:
        for i in range(len(batch["input_ids"])):
            if shown == rows:
                return
            shown += 1
            ids, labels = batch["input_ids"][i], batch["labels"][i]
            positions = batch["position_ids"][i] if "position_ids" in batch else None
            starts = 1 if positions is None else int((positions == 0).sum())
            print(f"\nRow {shown}: {len(ids)} tokens, {int((labels >= 0).sum())} of them learned, {starts} stretch(es)")
            print(opened.tokenizer.decode(ids.tolist())[:width])
