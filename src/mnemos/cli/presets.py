"""`mnemos presets`: the table of models, or one of them in full."""

from __future__ import annotations

from typing import Annotated

import tyro


def presets(name: Annotated[str | None, tyro.conf.Positional] = None, /, size: str | None = None) -> None:
    """Print the table of presets with their parameter counts, or one preset's whole config as JSON.

    Args:
        name: a preset, to see its config.
        size: the size of that config (nano); in the table, the only size to count.
    """
    if name is None:
        _print_table([size] if size else ["nano", "micro", "170m", "340m", "760m", "1.3b"])
    else:
        _print_config(name, size or "nano")


def _print_config(name: str, size: str) -> None:
    """Every choice, those of the memory spelt out."""
    import dataclasses
    import json

    from ..models import presets as table
    from ..models.config import FIELDS

    config = table.config(name, size)
    choices = {field: getattr(config, field) for field in FIELDS}
    if config.has_memory:
        choices["memory"] = {k: v for k, v in dataclasses.asdict(config.memory_config).items() if k != "dim"}
    print(json.dumps({"preset": name, "size": size, "parameters": table.count(config)} | choices, indent=2))


def _print_table(sizes: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..models import presets as table

    shapes = [table.size(name) for name in sizes]
    grid = Table(title="Presets", title_justify="left")
    for column in ("name", "block", "structure", "objective", "features", "window", "rule", "retention"):
        grid.add_column(column, no_wrap=True)
    for shape in shapes:
        grid.add_column(shape.name, justify="right", no_wrap=True)
    for preset in table.PRESETS.values():
        counts = [_short(table.count(table.config(preset.name, shape.name))) for shape in shapes]
        grid.add_row(preset.name, preset.block, *preset.choices.values(), *counts)
    known = Table(title="Sizes", title_justify="left")
    for column in ("name", "hidden_size", "layers", "heads", "vocab_size", "attention_window", "used by"):
        known.add_column(column, no_wrap=True)
    for shape in table.SIZES.values():
        numbers = (shape.hidden_size, shape.layers, shape.heads, shape.vocab_size, shape.window)
        known.add_row(shape.name, *map(str, numbers), shape.source)
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    console.print(grid, known, "One in full: mnemos presets atlas-mag --size 340m", highlight=False)


def _short(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M" if count < 1e7 else f"{count / 1e6:.1f}M"
