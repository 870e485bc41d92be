"""`mnemos inspect`: a page that shows what a memory did with a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def inspect(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    /,
    text: Path,
    against: str | None = None,
    checkpoint: str | None = None,
    against_checkpoint: str | None = None,
    out: Path | None = None,
    max_tokens: int = 2000,
    device: str = "cpu",
    allow_missing: bool = False,
) -> None:
    """Read a text with a model, and write a page: every token by surprise, lr, retain, momentum, gate and routing, layer by layer.

    Args:
        model: a run's folder (runs/x), or a folder that `mnemos export` wrote.
        text: a file with text in UTF-8.
        against: a second model to show beside it; the same run with another --against-checkpoint, too.
        checkpoint: of a run: best, last or a step (its export, else the best).
        against_checkpoint: the same, of the second model.
        out: the page (inspect.html in the model's folder).
        max_tokens: so many tokens of the text are read, at most 20,000.
        device: where to compute.
        allow_missing: open weights that lack tensors, which are then initialised as in a new model.
    """
    from ..eval.loading import load
    from ..report.inspect import inspect as look
    from ..report.inspect import inspect_page
    from ..report.page import write_page
    from ..report.texts import read_text

    if against is None and against_checkpoint is not None:
        against = model
    chosen = [(model, checkpoint)] + ([(against, against_checkpoint)] if against is not None else [])
    content, longer = read_text(text, max_tokens)
    seen = []
    for path, which in chosen:
        opened, tokenizer = load(path, device, "auto", which, allow_missing)
        found = look(opened, tokenizer, content, max_tokens, name=_name(path, which))
        found.cut |= longer
        seen.append(found)
    target = out or (Path(model) if Path(model).is_dir() else Path()) / "inspect.html"
    write_page(target, inspect_page(seen, f"mnemos inspect: {' and '.join(x.name for x in seen)}"))
    for found in seen:
        _print(found)
    print(f"page: {target}")


def _name(path: str, checkpoint: str | None) -> str:
    """`x, step 500`."""
    from ..train.runs import find_checkpoint

    folder = Path(path)
    if not (folder / "config.yaml").is_file():
        return folder.name or path
    if checkpoint is None and (folder / "export" / "config.json").is_file():
        return f"{folder.name}, export"
    return f"{folder.name}, step {int(find_checkpoint(folder, checkpoint or 'best').name.removeprefix('step-')):,}"


def _print(seen) -> None:
    """How tokens are routed, layer by layer."""
    from .tables import print_table

    perplexity = ", ".join(f"{x:.3f} {name}" for name, x in seen.perplexities().items())
    print(f"{seen.name}: {'the first ' * seen.cut}{len(seen.tokens):,} tokens, perplexity {perplexity}")
    names = ("surprise", "lr", "retain", "momentum", "gate", "route", "share", "to_attention", "to_memory")
    rows = seen.routing()
    names = [name for name in names if any(name in row for row in rows)]
    cells = [
        [str(row["layer"]), row["kind"], *(f"{row[name]:.4g}" if name in row else "" for name in names)] for row in rows
    ]
    print_table(["layer", "kind", *(name.replace("_", " ") for name in names)], cells, left=["kind"])
