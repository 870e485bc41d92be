"""`mnemos audit`: tests any causal language model, and prints pass, fail or not applicable."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..audit.settings import AuditSettings

if TYPE_CHECKING:
    from ..audit import AuditResult

COLOURS = {"pass": "green", "fail": "bold red", "not applicable": "dim"}


def audit(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    /,
    checks: str | None = None,
    json: Path | None = None,
    html: Path | None = None,
    device: str = "cpu",
    checkpoint: str | None = None,
    allow_missing: bool = False,
    options: Annotated[AuditSettings, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="check")] = AuditSettings(),  # noqa: B008
) -> int:
    """Test any causal language model: causality, caches, rows, padding, state, gradients, memory, recall.

    The exit status is 0 if nothing failed, 1 if something did, 2 for a wrong usage.

    Args:
        model: folder of a run, or of a model that transformers can open (attached models too), or a hub name; or package:function (or ./file.py:function), which imports that module and calls the function: it runs your code, and returns a model, or a model and a tokenizer. Code in a model's folder is never run.
        checks: names of checks, separated by commas: calls, causality, loss, cached, splits, batch, padding, swap, state, gradients, memory, needle, prompts; those that they need run too. By default all.
        json: also write the result as JSON.
        html: also write the result as a page.
        device: torch device.
        checkpoint: checkpoint of a run: best, last or a step; by default its export, else best.
        allow_missing: initialise tensors that the weights lack as in a new model, instead of raising an error.
        options: options of the checks.
    """
    from ..audit.opening import open_model
    from ..audit.prompts import read_prompts
    from ..audit.runner import choose, run, with_needs

    names = None if checks is None else [name.strip() for name in checks.split(",") if name.strip()]
    chosen = with_needs(choose(names))
    options.check()
    for option, path in (("--json", json), ("--html", html)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"{option} {path} cannot be written: give a file in a folder that exists")
    flags = [] if device == "cpu" else ["--device", device]
    flags += ([] if checkpoint is None else ["--checkpoint", checkpoint]) + ["--allow-missing"] * allow_missing
    prompts = None if options.prompts is None else read_prompts(options.prompts)
    opened, tokenizer = open_model(model, device, checkpoint, allow_missing)
    with _progress(len(chosen)) as (report, tick):
        result = run(opened, tokenizer, names, options, prompts, model, flags, report, tick)
    print_result(result)
    if json is not None:
        from ..eval.files import write_json

        write_json(json, result.to_dict())
        print(f"Results: {json}")
    if html is not None:
        from ..report.audit import audit_page
        from ..report.page import write_page

        write_page(html, audit_page(result.to_dict()))
        print(f"Page: {html}")
    return 0 if result.ok else 1


def print_result(result: AuditResult) -> None:
    """One table: check, verdict, number, limit, finding; and the command that shows each fault."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..audit.result import shown

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    about = result.about
    title = f"{about['model']}: {about['parameters']:,} parameters, {about['dtype']}, texts of {about['tokens']:,} tokens, rounding in {about['rounding']}"
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (("check", "left"), ("verdict", "left"), ("number", "right"), ("limit", "right")):
        table.add_column(name, justify=justify, no_wrap=True)
    table.add_column("finding", overflow="fold")
    for row in result.rows:
        finding = Text(row.text)
        finding.append(f"\n{row.command}", style="dim")
        verdict = Text(row.status, style=COLOURS[row.status])
        table.add_row(row.check, verdict, shown(row.number), shown(row.limit), finding)
    console.print(table, highlight=False)
    counts = ", ".join(f"{count} {status}" for status, count in result.counts.items())
    console.print(Text(f"{counts} ({about['seconds']:.1f} s)"), highlight=False)


@contextmanager
def _progress(checks: int) -> Generator[tuple[Any, Any]]:
    """A progress bar of checks on stderr, which also turns while a check works."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[parts]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console if console.is_terminal else Console(stderr=True, width=120)) as bar:
        line, parts = bar.add_task("opening", total=checks, parts=""), 0

        def report(check: str, status: str) -> None:
            nonlocal parts
            parts = 0
            bar.update(line, description=check, parts="", advance=status != "running")

        def tick() -> None:
            nonlocal parts
            parts += 1
            bar.update(line, parts=f"part {parts}")

        yield report, tick
