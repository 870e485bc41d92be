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
    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL [MODEL ...]")],
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
    """Evaluate a model, or compare several: runs, folders that transformers can open, or hub names.

    Results are written to a JSON file after every suite, with a page beside it. A suite that the file has with the same settings is not run again.
    Several models get one table, with parameters and training tokens; each also gets its own results file.

    Args:
        models: folders of runs or of saved models, or hub names.
        suite: perplexity, needle, babilong, mqar, mad, capacity, length, vitality, commonsense, harness; by default needle babilong capacity; with --text also perplexity and length.
        output: results file; by default eval.json in the model's folder, and comparison.json here for several models.
        plot: also plot the results of one model, to a .png, .svg or .pdf file.
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

    from ..eval.comparison import short_names, training_tokens
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
    if not models:
        raise ValueError("name at least one model: mnemos eval runs/x")
    if len(models) > 1 and (plot is not None or watch is not None or len(set(models)) < len(models)):
        raise ValueError("--plot and --watch take one model, and every model may be named once")
    if watch is not None:
        from ..eval.watch import watch as watch_run

        watch_run(models[0], suite, settings, watch, once, device, dtype, allow_missing=allow_missing)
        return
    single = output if len(models) == 1 else None
    comparison = (output or Path("comparison.json")) if len(models) > 1 else None
    if comparison is not None:
        _check_comparison(comparison)
    measured, failed = {}, []
    for path, name in zip(models, short_names(models)):
        opened, tokenizer = load(path, device, dtype, checkpoint, allow_missing)
        about = {"path": str(path), "weights": fingerprint(opened), "dtype": str(opened.dtype).removeprefix("torch.")}
        place, tokens = Path(single or default_output(path)), training_tokens(path, checkpoint)

        def measure(progress, report, model=opened, tokenizer=tokenizer, about=about, place=place, tokens=tokens):
            return run_suites(model, tokenizer, suite, settings, place, about, fresh, progress, report, tokens)

        measured[name] = results = _with_progress(measure, "" if comparison is None else f"{name}: ")
        write_page(place.with_suffix(".html"), results_page(results, f"mnemos eval: {path}"))
        if comparison is None:
            _print_tables(results, suite)
        if plot is not None:
            from ..eval.plots import plot_results

            plot_results(results, plot)
            print(f"Drawn: {plot}")
        print(f"Results: {place}")
        print(f"Page: {place.with_suffix('.html')}")
        whose = "" if comparison is None else f"{name}, "
        errors = {one: results["suites"][one].get("error") for one in suite}
        failed += [f"{whose}{one}: {error}" for one, error in errors.items() if error is not None]
    if comparison is not None:
        _print_comparison(measured, comparison)
    if failed:
        raise ValueError("; ".join(failed))


def _check_comparison(path: Path) -> None:
    """Raise an error for a file that is there and holds no comparison."""
    from ..eval.comparison import COMPARISON_FORMAT
    from ..eval.files import read_json

    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"output={str(path)!r:.200} cannot be written; give a file in an existing folder")
    if path.exists():
        found = read_json(path)
        if not isinstance(found, dict) or found.get("format") != COMPARISON_FORMAT:
            raise ValueError(f"{path} is not a comparison of models; choose another --output")


def _print_comparison(measured: dict[str, Any], path: Path) -> None:
    """The table, and its JSON file and page."""
    from ..eval.comparison import COMPARISON_FORMAT, compare
    from ..eval.files import write_json
    from ..report.page import write_page
    from ..report.results import comparison_page
    from .tables import print_table

    found = compare(measured)
    print_table(found.heads(), found.rows(), left=["model"])
    print("* the best of a column")
    write_json(path, {"format": COMPARISON_FORMAT, "models": measured})
    write_page(path.with_suffix(".html"), comparison_page(measured, "mnemos eval: " + ", ".join(measured)))
    print(f"Comparison: {path}")
    print(f"Page: {path.with_suffix('.html')}")


def _with_progress(run, prefix: str = "") -> dict[str, Any]:
    """Run with a progress bar for the current suite; prefix: of the names of bars."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True)) as bar:
        bars: dict[str, Any] = {}
        current: list[Any] = []

        def report(name: str, what: str, work: int | None) -> None:
            if name not in bars:
                bars[name] = bar.add_task(prefix + name, total=None, done="")
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
    from ..eval.suites import SUITES, label
    from .tables import print_table

    for name in dict.fromkeys(names):
        entry = results["suites"][name]
        if "error" in entry:
            continue
        rows = entry["rows"]
        columns = SUITES[name].columns or tuple(dict.fromkeys(k for row in rows for k in row))
        columns = tuple(c for c in columns if any(row.get(c) is not None for row in rows))
        cells = [[_cell(row.get(column), column) for column in columns] for row in rows]
        left = [label(c) for c in columns if any(isinstance(row.get(c), str) for row in rows)]
        title = f"{name} ({entry['seconds']:.1f} s)"
        print_table([label(column) for column in columns], cells, left, title)


def _cell(value: Any, column: str) -> str:
    if value is None:
        return ""
    if column == "memory" and isinstance(value, str):
        from ..eval.suites import label

        return label(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=160)
