"""`mnemos runs`: a table of runs."""

from __future__ import annotations

from typing import Annotated

import tyro


def runs(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN ...]")] = (),
    /,
    folder: str = "runs",
    plot: str | None = None,
    json: bool = False,
) -> None:
    """List runs with their losses, or compare some of them in a table and a plot.

    Args:
        names: runs to compare, by name or folder; by default all.
        folder: parent folder of the runs.
        plot: plot the loss curves to this file (.png, .svg or .pdf).
        json: print lines of JSON instead of a table.
    """
    import sys
    from pathlib import Path

    from ..train import records

    if names:
        found = [records.open_run(name if Path(name).is_dir() else Path(folder) / name) for name in names]
    else:
        found = records.list_runs(folder, lambda why: print(f"mnemos: left out: {why}", file=sys.stderr))
    if not found:
        raise ValueError(_no_run(folder))
    rows = [run.summary() for run in found]
    if json:
        import json as text

        for row in rows:
            print(text.dumps(row))
    else:
        _print_table(rows)
    if plot is not None:
        records.plot(found, plot)
        print(f"picture: {plot}")


def _no_run(folder: str) -> str:
    return f"{folder} holds no run; `mnemos train` creates one"


def _print_table(rows: list[dict]) -> None:
    from .tables import print_table

    forms = {
        "name": "{}",
        "model": "{}",
        "step": "{:,}",
        "loss": "{:.4f}",
        "val_loss": "{:.4f}",
        "bits_per_byte": "{:.3f}",
        "best": "{:.4f}",
        "learning_gain": "{:+.1%}",
        "tokens_per_second": "{:,.0f}",
        "bad_steps": "{}",
    }
    cells = [["-" if row[key] is None else form.format(row[key]) for key, form in forms.items()] for row in rows]
    print_table([key.replace("_", " ") for key in forms], cells, left=("name", "model"))
