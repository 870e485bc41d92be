"""`mnemos inspect`: a page about a model's memory while it reads a text."""

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
    """Read a text with a model and write a page: surprise, lr, retain, momentum, gate and routing of every token and layer.

    Args:
        model: folder of a run (runs/x), or a folder written by `mnemos export`.
        text: text file in UTF-8.
        against: second model, shown beside the first; may be the same run with another --against-checkpoint.
        checkpoint: checkpoint of a run: best, last or a step; by default its export, else best.
        against_checkpoint: the same, for the second model.
        out: file of the page; by default inspect.html in the model's folder.
        max_tokens: tokens of the text to read, at most 20,000.
        device: torch device.
        allow_missing: initialise tensors that the weights lack as in a new model, instead of raising an error.
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
    """A model's name for the page, such as `x, step 500`."""
    from ..train.runs import find_checkpoint

    folder = Path(path)
    if not (folder / "config.yaml").is_file():
        return folder.name or path
    if checkpoint is None and (folder / "export" / "config.json").is_file():
        return f"{folder.name}, export"
    return f"{folder.name}, step {int(find_checkpoint(folder, checkpoint or 'best').name.removeprefix('step-')):,}"


def _print(seen) -> None:
    """Print the routing of tokens and the vitality of the memory, layer by layer, and warnings."""
    from .tables import print_table

    kinds = {"learning": "with test-time learning", "frozen": "without", "off": "with memory off"}
    perplexity = ", ".join(f"{x:.3f} {kinds[name]}" for name, x in seen.perplexities().items())
    print(f"{seen.name}: {'the first ' * seen.cut}{len(seen.tokens):,} tokens, perplexity {perplexity}")
    names = ("surprise", "lr", "retain", "momentum", "gate", "route", "share", "to_attention", "to_memory")
    names += ("effective_rank", "distance", "relearning")
    rows = seen.routing()
    names = [name for name in names if any(name in row for row in rows)]
    cells = [
        [str(row["layer"]), row["kind"], *(f"{row[name]:.4g}" if name in row else "" for name in names)] for row in rows
    ]
    print_table(["layer", "kind", *(name.replace("_", " ") for name in names)], cells, left=["kind"])
    for warning in seen.warnings():
        print(f"warning: {warning}")
