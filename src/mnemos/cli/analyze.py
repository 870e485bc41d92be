"""`mnemos analyze`: a page about a run, checkpoint by checkpoint, with findings in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def analyze(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    /,
    out: Path | None = None,
    text: Path | None = None,
    tokens: int = 512,
    generate: int = 80,
    checkpoints: bool = True,
    json: bool = False,
) -> None:
    """Write a page about a run (or several, to compare): losses, gates, memory norms, validation, generations, health.

    Args:
        runs: folders of runs.
        out: file of the page; by default analyze.html in the first run's folder.
        text: file that every checkpoint reads; by default the text that the run held out.
        tokens: tokens of the text to read.
        generate: tokens by which every checkpoint continues the run's prompt; 0 for none.
        checkpoints: also examine the checkpoints, not only the metrics.
        json: print the findings as lines of JSON.
    """
    import dataclasses
    import json as text_of
    import sys

    from ..report.analyze import analyze as look
    from ..report.analyze import analyze_page
    from ..report.page import write_page
    from ..report.texts import read_text

    if not runs:
        raise ValueError("name at least one run's folder: mnemos analyze runs/x")
    content = None if text is None else read_text(text, tokens)[0]
    found = []
    for path in runs:
        found.append(
            look(
                path, content, tokens, generate, checkpoints, say=lambda s, p=path: print(f"{p}: {s}", file=sys.stderr)
            )
        )
    target = out or Path(runs[0]) / "analyze.html"
    write_page(target, analyze_page(found, f"mnemos analyze: {', '.join(run.name for run in found)}"))
    for run in found:
        if json:
            for finding in run.findings:
                print(text_of.dumps({"run": run.name} | dataclasses.asdict(finding)))
            continue
        print(f"{run.name}: {run.about}")
        for finding in run.findings:
            print(f"  {finding.level}: {finding.sentence()}")
        if not run.findings:
            print("  no findings")
    if not json:
        print(f"page: {target}")
