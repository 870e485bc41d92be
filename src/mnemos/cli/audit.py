"""`mnemos audit`: tests any causal language model, and prints pass, fail or not applicable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from ..audit.settings import AuditSettings

INTERRUPTED = 130  # as shells report a process that SIGINT ended


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
    """Test any causal language model: causality, caches, batches, padding, state, gradients, memory, recall.

    Each check is printed as it finishes. Ctrl-C stops the audit and keeps the finished checks, also in --json and --html.
    The exit status is 0 if nothing failed, 1 if something did, 2 for a wrong usage, 130 if the audit was interrupted.

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
    from .audit_screen import AuditScreen

    names = None if checks is None else [name.strip() for name in checks.split(",") if name.strip()]
    with_needs(choose(names))  # raises an error for an unknown name before the model is opened
    options.check()
    for option, path in (("--json", json), ("--html", html)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"{option} {path} cannot be written: give a file in a folder that exists")
    flags = [] if device == "cpu" else ["--device", device]
    flags += ([] if checkpoint is None else ["--checkpoint", checkpoint]) + ["--allow-missing"] * allow_missing
    prompts = None if options.prompts is None else read_prompts(options.prompts)
    opened, tokenizer = open_model(model, device, checkpoint, allow_missing)
    with AuditScreen() as screen:
        try:
            result = run(opened, tokenizer, names, options, prompts, model, flags, screen)
        except KeyboardInterrupt:
            if not screen.rows:
                raise
            result = screen.partial_result()
    screen.print_counts(result)
    if json is not None:
        from ..eval.files import write_json

        write_json(json, result.to_dict())
        print(f"Results: {json}")
    if html is not None:
        from ..report.audit import audit_page
        from ..report.page import write_page

        write_page(html, audit_page(result.to_dict()))
        print(f"Page: {html}")
    if result.unfinished:
        return INTERRUPTED
    return 0 if result.ok else 1
