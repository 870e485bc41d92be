"""`mnemos eval`: evaluates a saved model, suite by suite, into one results file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..eval.settings import PATHS, EvalSettings

if TYPE_CHECKING:
    from rich.console import Console


def evaluate(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    /,
    suite: tuple[str, ...] = (),
    output: Path | None = None,
    plot: Path | None = None,
    fresh: bool = False,
    device: str = "cpu",
    dtype: str = "auto",
    checkpoint: str | None = None,
    watch: float | None = None,
    once: bool = False,
    allow_missing: bool = False,
    options: Annotated[EvalSettings, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="suite")] = EvalSettings(),  # noqa: B008
) -> None:
    """Evaluate a model: a run, a folder that transformers can open, or a hub name.

    Results are written to a JSON file after every suite, with a page beside it. A suite that the file has with the same settings is not run again.

    Args:
        model: folder of a run or of a saved model, or a hub name.
        suite: perplexity, needle, babilong, mqar, mad, capacity, length, vitality, commonsense, harness; by default needle babilong capacity; with --text also perplexity and length.
        output: results file; by default eval.json in the model's folder.
        plot: also plot the results, to a .png, .svg or .pdf file.
        fresh: run suites again that the results file already has.
        device: torch device.
        dtype: dtype of the weights: auto, float32, bfloat16.
        checkpoint: checkpoint of a run: best, last or a step; by default its export, else best.
        watch: evaluate every checkpoint of a run into eval_results.jsonl, and look for new ones at this interval in seconds.
        once: with --watch, evaluate the existing checkpoints only.
        allow_missing: initialise tensors that the weights lack as in a new model, instead of raising an error.
        options: options of the suites.
    """
    import dataclasses

    from ..eval.loading import load
    from ..eval.runner import fingerprint, run_suites
    from ..eval.suites import check_names, default_output, usual_suites
    from ..report.page import write_page
    from ..report.results import results_page

    given = {name: getattr(options, name) for name in PATHS}
    settings = dataclasses.replace(
        options, **{name: str(Path(path)) for name, path in given.items() if path is not None}
    )
    settings.check()
    if not suite:
        suite = usual_suites(with_text=options.text is not None)
        left_out = [name for name in usual_suites(with_text=True) if name not in suite]
        if left_out:
            names = " and ".join(left_out)
            print(f"mnemos: {names} are left out: they need a text, --text FILE", file=sys.stderr)
    check_names(suite)
    if watch is not None:
        from ..eval.watch import watch as watch_run

        watch_run(model, suite, settings, watch, once, device, dtype, allow_missing=allow_missing)
        return
    opened, tokenizer = load(model, device, dtype, checkpoint, allow_missing)
    target = output or default_output(model)
    about = {"path": str(model), "weights": fingerprint(opened), "dtype": str(opened.dtype).removeprefix("torch.")}
    results = _with_progress(
        lambda progress, report: run_suites(
            opened, tokenizer, suite, settings, target, about, fresh, progress=progress, report=report
        )
    )
    _print_tables(results, suite)
    if plot is not None:
        from ..eval.plots import plot_results

        plot_results(results, plot)
        print(f"Drawn: {plot}")
    page = target.with_suffix(".html")
    write_page(page, results_page(results, f"mnemos eval: {model}"))
    print(f"Results: {target}")
    print(f"Page: {page}")
    failed = [f"{name}: {results['suites'][name]['error']}" for name in suite if "error" in results["suites"][name]]
    if failed:
        raise ValueError("; ".join(failed))


def _with_progress(run) -> dict[str, Any]:
    """Run with a progress bar for the current suite."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True)) as bar:
        bars: dict[str, Any] = {}
        current: list[Any] = []

        def report(name: str, what: str, work: int | None) -> None:
            if name not in bars:
                bars[name] = bar.add_task(name, total=None, done="")
            if what == "running":
                current[:] = [bars[name], 0]
                bar.update(bars[name], total=work)
            else:
                done = (
                    "kept from before" if what == "reused" else what.partition(":")[0]
                )  # why it failed is said at the end
                bar.update(bars[name], total=1, completed=1, done=done)

        def progress(count: int) -> None:
            current[1] += count
            bar.update(current[0], completed=current[1], done=f"{current[1]:,}")

        return run(progress, report)


def _print_tables(results: dict[str, Any], names: tuple[str, ...]) -> None:
    from ..eval.suites import SUITES
    from .tables import print_table

    for name in dict.fromkeys(names):
        entry = results["suites"][name]
        if "error" in entry:
            continue
        rows = entry["rows"]
        columns = SUITES[name].columns or tuple(dict.fromkeys(k for row in rows for k in row))
        columns = tuple(c for c in columns if any(row.get(c) is not None for row in rows))
        cells = [[_cell(row.get(column)) for column in columns] for row in rows]
        left = [c.replace("_", " ") for c in columns if any(isinstance(row.get(c), str) for row in rows)]
        title = f"{name} ({entry['seconds']:.1f} s)"
        print_table([column.replace("_", " ") for column in columns], cells, left, title)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=160)
