"""`mnemos presets`: the table of presets, or the config of one."""

from __future__ import annotations

from typing import Annotated

import tyro


def presets(
    name: Annotated[str | None, tyro.conf.Positional] = None, /, size: str | None = None, miras: bool = False
) -> None:
    """Print the tables of presets with purposes, papers and parameter counts, or the config of one preset as JSON.

    Args:
        name: preset whose config to print.
        size: size of that config; by default nano; for the table, the only size to count.
        miras: print the four choices of Miras for every preset: memory, attentional bias, retention, algorithm.
    """
    if miras and name is None:
        _print_miras()
    elif name is None:
        _print_table([size] if size else ["nano", "micro", "170m", "340m", "760m", "1.3b"])
    else:
        _print_config(name, size or "nano")


def _print_miras() -> None:
    from .preset_table import kept
    from .tables import print_table

    rows = {name: row["miras"] for name, row in kept()["presets"].items()}
    names = ["name", *next(iter(rows.values()))]
    print_table(names, [[name, *row.values()] for name, row in rows.items()], left=names, title="Presets by Miras")


def _print_config(name: str, size: str) -> None:
    """Print all fields, including those of the memory."""
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
    from .preset_purposes import PURPOSES
    from .preset_table import check_size, kept
    from .tables import print_table

    table = kept()
    for name in sizes:
        check_size(name, table)
    choices = ["name", "block", "structure", "objective", "features", "window", "rule", "retention"]
    presets = [
        [name, row["block"], *row["choices"].values(), *(_short(row["counts"][size]) for size in sizes)]
        for name, row in table["presets"].items()
    ]
    counted = ["transformer", "titans-mag", "atlas-mag", "qk-mag"]
    numbers = ["name", "hidden_size", "layers", "heads", "vocab_size", "attention_window", *counted, "used by"]
    known = []
    for name, x in table["sizes"].items():
        shape = (str(x[field]) for field in ("hidden_size", "layers", "heads", "vocab_size", "window"))
        counts = (_short(table["presets"][row]["counts"][name]) for row in counted)
        known.append([name, *shape, *counts, x["source"]])
    purposes = [[name, *PURPOSES[name]] for name in table["presets"]]
    heads = ["name", "for", "paper (arXiv)"]
    print_table(heads, purposes, left=heads, title="Presets by purpose")
    print_table(choices + sizes, presets, left=choices, title="Presets by their parts")
    print_table(numbers, known, left=[x for x in numbers if x not in counted], title="Sizes")
    print("One in full: mnemos presets atlas-mag --size 340m")


def _short(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M" if count < 1e7 else f"{count / 1e6:.1f}M"
