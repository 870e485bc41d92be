"""`mnemos reproduce`: rerun the experiments that the defaults and the claims of the documentation rest on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from ..reproduce import Experiment


def reproduce(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    all: bool = False,
    quick: bool = False,
    keep: bool = False,
    write: bool = False,
    workers: int | None = None,
    root: Path = Path("experiments"),
    output: Path = Path("runs/reproduce"),
) -> None:
    """Rerun an experiment of experiments/, show its tables, and say what they make of its claims.

    Without a name: list the experiments. Finished cells are kept, and the same command goes on with what is missing.

    Args:
        name: a folder of experiments/.
        all: every experiment, one after the other.
        quick: a small version, minutes instead of hours; its claims are set beside those of the kept results.
        keep: go on from the results that are kept in experiments/, and write new ones there.
        write: only write docs/results.md, the experiments' README.md and their pictures anew from the kept results.
        workers: parallel processes (one per core).
        root: the folder of the experiments.
        output: folder of the results, unless they are kept.
    """
    from ..reproduce import find

    if name is None and not all and not write:
        _list(find(None, root))
        return
    chosen = find(name, root)
    if write:
        _write(find(None, root), root)
        return
    if quick and keep:
        raise ValueError("--quick results are not kept; leave out --keep, or --quick")
    same, changed, open_ = [], [], []
    for experiment in chosen:
        path = experiment.results_path if keep else output / ("quick" if quick else "full") / f"{experiment.name}.json"
        rows = _run(experiment, path, quick, workers)
        for sink, texts in zip((same, changed, open_), _show(experiment, rows)):
            sink += texts
        print(f"Results: {path}")
    if quick:
        print(f"Orders of the kept results: {len(same)} came out again, {len(changed)} the other way round.")
        for text in changed:
            print(f"The other way round: {text}")
        if open_:
            print(f"{len(open_)} more are within noise here or there, or not asked by the quick version.")


def _list(experiments: list[Experiment]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..reproduce.page import done

    table = Table("experiment", "question", "kept")
    for experiment in experiments:
        question = " ".join(experiment.config["question"].split())
        table.add_row(experiment.name, question, done(experiment, experiment.results()))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table, highlight=False)


def _run(experiment: Experiment, path: Path, quick: bool, workers: int | None) -> list[dict[str, Any]]:
    from ..reproduce.runner import missing, run
    from .progress import bar_of_cells

    total, left = len(experiment.cells(quick)), len(missing(experiment, path, quick))
    with bar_of_cells(experiment.name, total, total - left) as advance:
        return run(experiment, path, quick, workers, lambda row: advance(_what(experiment, row)))


def _what(experiment: Experiment, row: dict[str, Any]) -> str:
    from ..reproduce.page import names

    return f"{experiment.name}: " + " ".join(str(row[n]) for n in names(experiment) if n in row)


def _show(experiment: Experiment, rows: list[dict[str, Any]]) -> tuple[list[str], list[str], list[str]]:
    """Print tables and claims. Of the claims that compare: those whose verdict is the kept one, those whose is the opposite, the others."""
    from rich.console import Console
    from rich.table import Table

    from ..reproduce.page import names
    from ..reproduce.tables import pivot
    from ..reproduce.verdicts import FAILS, HOLDS, verdicts
    from .tables import print_table

    console = Console()
    console, varying = console if console.is_terminal else Console(width=160), names(experiment)
    for spec in experiment.config.get("tables", []):
        header, lines = pivot(rows, varying, spec)
        if lines:
            print(spec["title"])
            print_table(header, lines, left=header[:1])
    for row in rows:
        if "error" in row:
            console.print(f"failed: {_what(experiment, row)}: {row['error']}", highlight=False)
    claims = experiment.config.get("claims", [])
    now, kept = verdicts(rows, varying, claims), verdicts(experiment.results(), varying, claims)
    table = Table("claim", "now", "kept", "numbers now")
    same, changed, open_ = [], [], []
    for claim, new, old in zip(claims, now, kept):
        table.add_row(new.text, new.found, old.found, new.numbers)
        if "of" not in claim:
            decided = {new.found, old.found} <= {HOLDS, FAILS}
            chosen = open_ if not decided else same if new.found == old.found else changed
            chosen.append(f"{experiment.name}: {new.text}")
    if claims:
        console.print(table, highlight=False)
    return same, changed, open_


def _write(experiments: list[Experiment], root: Path) -> None:
    from shutil import copyfile

    from ..reproduce.page import names, page, readme
    from ..reproduce.plots import draw
    from ..whole import write_text

    docs = root.parent / "docs"
    for experiment in experiments:
        rows = experiment.results()
        write_text(experiment.folder / "README.md", readme(experiment))
        if rows and experiment.config.get("plots"):
            draw(rows, names(experiment), experiment.config["plots"], experiment.folder / "plot.png")
            copyfile(experiment.folder / "plot.png", docs / "images" / f"results-{experiment.name}.png")
    write_text(docs / "results.md", page(experiments, root))
    print(f"Written: {docs / 'results.md'} and {len(experiments)} README.md")
