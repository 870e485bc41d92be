"""`python experiments/run.py`: rerun an experiment, show its tables, check its claims."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from mnemos.atomic_io import write_text
from mnemos.cli.progress import bar_of_cells
from mnemos.cli.tables import print_table
from mnemos.cli.usage import parsed

from .experiment import Experiment, find
from .page import done, names, page, readme
from .plots import draw
from .runner import missing, run
from .tables import pivot
from .verdicts import FAILS, HOLDS, verdicts

PROGRAM = "python experiments/run.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run; returns the exit status. A user's mistake is one sentence and status 2."""
    try:
        options = sys.argv[1:] if arguments is None else list(arguments)
        parsed(lambda: tyro.cli(_bound, prog=PROGRAM, args=options), PROGRAM)()
    except ValueError as wrong:
        print(f"experiments: {wrong}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the output has closed it
        sys.stdout = None
    return 0


def experiments(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    all: bool = False,
    quick: bool = False,
    keep: bool = False,
    write: bool = False,
    workers: int | None = None,
    root: Path = Path("experiments"),
    output: Path = Path("runs/reproduce"),
    text: Path = Path("data"),
) -> None:
    """Rerun an experiment of experiments/, show its tables, and check its claims against them.

    Without a name: list the experiments. Finished cells are kept; the same command runs only the missing ones.

    Args:
        name: a folder of experiments/.
        all: every experiment, one after the other.
        quick: a small version, minutes instead of hours; its claims are set beside those of the kept results.
        keep: resume from the results in experiments/, and write new ones there.
        write: only write docs/results.md, the experiments' README.md and their plots from the kept results.
        workers: parallel processes (one per core).
        root: the folder of the experiments.
        output: folder of the results, unless they are kept.
        text: folder of corpora that are files, such as shakespeare.txt.
    """
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
        rows = _run(experiment, path, quick, workers, text)
        for sink, texts in zip((same, changed, open_), _show(experiment, rows)):
            sink += texts
        print(f"Results: {path}")
    if quick:
        print(f"Orders of the kept results: {len(same)} came out again, {len(changed)} the other way round.")
        for text in changed:
            print(f"The other way round: {text}")
        if open_:
            print(f"{len(open_)} more are within noise here or there, or not asked by the quick version.")


@functools.wraps(experiments)
def _bound(*args, **kwargs):
    """`experiments` with its arguments, to be called after parsing."""
    return functools.partial(experiments, *args, **kwargs)


def _list(experiments: list[Experiment]) -> None:
    table = Table("experiment", "question", "kept")
    for experiment in experiments:
        question = " ".join(experiment.config["question"].split())
        table.add_row(experiment.name, question, done(experiment, experiment.results()))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table, highlight=False)


def _run(experiment: Experiment, path: Path, quick: bool, workers: int | None, text: Path) -> list[dict[str, Any]]:
    total, left = len(experiment.cells(quick)), len(missing(experiment, path, quick))
    with bar_of_cells(experiment.name, total, total - left) as advance:
        return run(experiment, path, quick, workers, lambda row: advance(_what(experiment, row)), text)


def _what(experiment: Experiment, row: dict[str, Any]) -> str:
    return f"{experiment.name}: " + " ".join(str(row[n]) for n in names(experiment) if n in row)


def _show(experiment: Experiment, rows: list[dict[str, Any]]) -> tuple[list[str], list[str], list[str]]:
    """Print tables and claims. Returns the comparing claims in three lists: same verdict as kept, opposite verdict, undecided."""
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
    docs = root.parent / "docs"
    for experiment in experiments:
        rows = experiment.results()
        write_text(experiment.folder / "README.md", readme(experiment))
        if rows and experiment.config.get("plots"):
            draw(rows, names(experiment), experiment.config["plots"], experiment.folder / "plot.svg")
            copyfile(experiment.folder / "plot.svg", docs / "images" / f"results-{experiment.name}.svg")
    write_text(docs / "results.md", page(experiments, root))
    print(f"Written: {docs / 'results.md'} and {len(experiments)} README.md")
