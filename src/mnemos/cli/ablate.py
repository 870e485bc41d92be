"""`mnemos ablate`: switches off one component of a preset at a time, trains each variant with several seeds, and compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def ablate(
    preset: str = "atlas",
    task: str | None = None,
    data: tuple[str, ...] = (),
    size: str = "nano",
    ablations: tuple[str, ...] = (),
    seeds: int = 3,
    steps: int = 400,
    batch_size: int = 16,
    lr: float = 3e-3,
    length: int = 64,
    pairs: int = 4,
    vocab_size: int = 64,
    examples: int = 500,
    set: tuple[str, ...] = (),
    workers: int | None = None,
    output: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Switch off one component of a preset at a time, and measure the effect on a task.

    The full model and each ablation are trained from scratch, in parallel processes. Results are written as they finish; the same command
    resumes, and may ask for more seeds or ablations.

    Args:
        preset: a preset of `mnemos presets`.
        task: by default mqar, or text with --data. There are mqar, in-context-recall, noisy-in-context-recall, fuzzy-in-context-recall, selective-copying, memorization, text.
        data: text of the task text: files and folders, as for `mnemos train`; a twentieth is held out. By default Python's own documentation.
        size: a size of `mnemos presets`.
        ablations: no-polynomial, gd, shallow, window-1, no-memory, no-gates, no-momentum, no-forgetting; by default all that change the preset.
        seeds: trainings per ablation.
        steps: optimiser steps per training.
        batch_size: sequences per step.
        lr: peak learning rate.
        length: tokens per example.
        pairs: facts per example, for mqar.
        vocab_size: for mqar; half are keys, half are values.
        examples: examples to score.
        set: fields of the model's config as name=value: hidden_size=64 num_hidden_layers=2 memory_chunk_size=16.
        workers: parallel processes; by default one per core.
        output: folder of the results; by default ablations/PRESET-TASK, or ablations/PRESET-DATA.
        plot: plot file, .png, .svg or .pdf; by default ablation.png in that folder; needs matplotlib.
    """
    from ..ablate import TASKS, AblationSettings, applicable, run, summary
    from ..ablate.cell import model_config
    from ..ablate.grid import FULL
    from ..ablate.runner import read_results
    from ..eval.files import write_json
    from ..train.advice import few_commits
    from ..train.config import ModelConfig
    from .progress import bar_of_cells

    task = task or ("text" if data else "mqar")
    settings = AblationSettings(
        preset=preset,
        size=size,
        overrides=ModelConfig(set=set).overrides(),
        task=task,
        length=length,
        pairs=pairs,
        vocab_size=vocab_size,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        examples=examples,
        data=tuple(data),
    )
    settings.check()
    full = model_config(vars(settings), FULL)
    short = few_commits(full, length, "use --length {length} or --set {smaller}")
    if short:
        print(f"mnemos: {short}", file=sys.stderr)
    folder = output or Path("ablations") / f"{preset}-{Path(data[0]).stem if data else task}"
    names = ablations or tuple(applicable(full))
    kept = {(r["ablation"], r["seed"]) for r in read_results(folder / "results.jsonl") if "error" not in r}
    cells = [(name, seed) for name in (FULL, *names) for seed in range(seeds)]
    title = f"{preset} on {', '.join(Path(place).name or place for place in data) or task}"
    with bar_of_cells(title, len(cells), len(kept & {*cells})) as advance:

        def report(result: dict[str, Any]) -> None:
            advance(f"{title}: {result['ablation']}, seed {result['seed']}")

        results = run(settings, folder, names, seeds, workers, report)
    rows, chosen = summary(results), TASKS[task]
    _print(rows, f"{title}, {steps} steps", chosen)
    write_json(folder / "summary.json", {"settings": vars(settings), "rows": rows})
    picture = plot or folder / "ablation.png"
    try:
        from ..ablate.plot import plot as draw

        draw(rows, picture, title, chosen.unit, chosen.chance(vars(settings)))
        print(f"Drawn: {picture}")
    except ValueError as missing:
        if plot is not None:
            raise
        print(f"Not drawn: {missing}")
    print(f"Results: {folder}")
    failed = [f"{row['ablation']}: {row['errors'][0]}" for row in rows if row["failed"]]
    if failed:
        raise ValueError(f"some cells failed, and will be tried again by the same command: {'; '.join(failed)}")


def _print(rows: list[dict[str, Any]], title: str, task: Any) -> None:
    from .tables import print_table

    better = "higher is better" if task.higher else "lower is better"
    columns = ["ablation", task.unit, "against full", "seeds", "parameters", "s per run"]
    cells = []
    for row in rows:
        if "score" not in row:
            cells.append([row["ablation"], "failed", "", "0", "", ""])
            continue
        cells.append(
            [
                row["ablation"],
                _plus_minus(row["score"], row["score_interval"]),
                _plus_minus(row["difference"], row["difference_interval"], "+") if "difference" in row else "",
                f"{row['seeds']}" + (f" ({row['failed']} failed)" if row["failed"] else ""),
                f"{row['parameters']:,}",
                f"{row['seconds']:.1f}",
            ]
        )
    print(f"{title}: {task.unit}, {better}; ± is the 95 % interval over seeds")
    print_table(columns, cells, left=["ablation"])


def _plus_minus(value: float, half: float | None, sign: str = "") -> str:
    return f"{value:{sign}.3f}" + ("" if half is None else f" ± {half:.3f}")
