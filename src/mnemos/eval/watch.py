"""Evaluates the checkpoints of a run as they appear, in a process beside the trainer: one line of JSON for each.

runs/x/eval_results.jsonl   {"step", "seconds", "suites": {name: {"rows"} or {"error"}}}
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .files import finite
from .loading import load
from .runner import run_suites
from .settings import EvalSettings
from .suites import check_names

RESULTS_FILE = "eval_results.jsonl"


def checkpoint_steps(run: str | os.PathLike) -> list[int]:
    """Steps of the checkpoints of a run, in order."""
    found = (re.fullmatch(r"step-(\d+)", p.name) for p in (Path(run) / "checkpoints").glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def read_results(run: str | os.PathLike) -> list[dict[str, Any]]:
    """The results so far; a truncated last line is skipped."""
    file = Path(run) / RESULTS_FILE
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return found


def watch(
    run: str | os.PathLike,
    suites: Sequence[str],
    settings: EvalSettings | None = None,
    poll: float = 30.0,
    once: bool = False,
    device: str = "cpu",
    dtype: str = "auto",
    report: Callable[[str], object] = print,
    sleep: Callable[[float], object] = time.sleep,
    allow_missing: bool = False,
) -> list[dict[str, Any]]:
    """Evaluate every checkpoint without results, the oldest first, then look for new ones every `poll` seconds, unless `once`.

    A checkpoint that cannot be opened, for instance because it is being removed, is reported and tried again later.
    """
    check_names(suites)
    run = Path(run)
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} is not a run: it has no config.yaml")
    if not 0 < poll < 1e9:
        raise ValueError(f"poll={poll} must be > 0 seconds")
    while True:
        done = {row["step"] for row in read_results(run)}
        for step in [s for s in checkpoint_steps(run) if s not in done]:
            began = time.perf_counter()
            try:
                model, tokenizer = load(run, device, dtype, checkpoint=str(step), allow_missing=allow_missing)
            except (ValueError, OSError) as wrong:
                report(f"step {step}: {wrong}")
                continue
            results = run_suites(model, tokenizer, suites, settings)["suites"]
            entries = {
                name: {k: v for k, v in entry.items() if k not in ("settings", "files")}
                for name, entry in results.items()
            }
            _append(
                run / RESULTS_FILE, {"step": step, "seconds": round(time.perf_counter() - began, 3), "suites": entries}
            )
            report(f"step {step}: {', '.join(suites)}")
        if once:
            return read_results(run)
        sleep(poll)


def _append(file: Path, row: dict[str, Any]) -> None:
    """Append one line in one write, after any partial line of a killed process."""
    line = json.dumps(finite(row), allow_nan=False) + "\n"
    cut = file.is_file() and file.stat().st_size > 0 and not file.read_bytes().endswith(b"\n")
    with open(file, "a", encoding="utf-8") as out:
        out.write(("\n" if cut else "") + line)
        out.flush()
        os.fsync(out.fileno())
