"""The whole demo: train three models of one size, measure them, print the measurements, write the page."""

from __future__ import annotations

import functools
import json
import math
import platform
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..atomic_io import check_not_foreign, write_text
from ..eval.files import write_json
from ..models import MnemosForCausalLM
from .facts import CHANCE
from .kept import is_kept, keep, kept_folder
from .measure import Asked, Kept, bits_per_byte, recall_by_distance, save_and_load
from .page import page
from .picture import picture
from .results import MODEL_NAMES, WITH_MEMORY, DemoPlan, DemoReport
from .shown import print_example, print_recall, print_states
from .training import Curve, one_thread, train, training_text


def _is_report(path: Path) -> bool:
    """Whether a file holds the results of a demo."""
    try:
        return {"plan", "recall", "bits_per_byte"} <= {*json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def run(folder: str | Path, plan: DemoPlan | None = None, console: Console | None = None) -> DemoReport:
    """Run the demo. Writes to `folder`: index.html, results.json, facts.safetensors, and recall.png if matplotlib is installed.

    The memory model is also kept in the user's cache folder, where `mnemos chat` opens it.
    """
    plan, console, folder = plan or DemoPlan(), console or Console(), Path(folder)
    if not _is_report(folder / "results.json"):
        check_not_foreign(folder, ("index.html", "results.json", "recall.png"), "mnemos demo")
    folder.mkdir(parents=True, exist_ok=True)
    with one_thread():
        return _run(folder, plan, console)


def _run(folder: Path, plan: DemoPlan, console: Console) -> DemoReport:
    begin, curriculum = time.perf_counter(), plan.curriculum
    say = functools.partial(console.print, highlight=False, soft_wrap=True)
    learn, held_out = training_text(plan.text_characters)
    models = {name: _new_model(plan, name) for name in MODEL_NAMES}
    parameters = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    console.rule("1. Three models of one size learn to keep facts while they read")
    say(
        f"Each batch: up to {curriculum.pairs} facts, then {curriculum.gap[0]} to {curriculum.longest:,} bytes of Python's documentation, then questions.\n"
        f"memory: attention to {plan.window} tokens, and a memory that learns while it reads; {parameters['memory']:,} parameters\n"
        f"window only: attention to {plan.baseline_window} tokens; {parameters['window only']:,} parameters\n"
        f"full attention: attention to all tokens; {parameters['full attention']:,} parameters"
    )
    curves = _train_all(models, learn, plan, console)
    if plan.memory_config().to_dict() == DemoPlan().memory_config().to_dict():
        keep(models[WITH_MEMORY])
    console.rule("2. Facts far beyond the attention window")
    recall, kept = _recall(models, held_out, plan, folder, console)
    print_example(recall, plan, console)
    console.rule("3. The state has one size, however much is read, and it is a file")
    print_states(recall, plan, console)
    say(
        f"{kept.path}: {kept.file_bytes:,} bytes for {plan.rows} readers. Recall before saving {kept.before:.0%}, after loading {kept.after:.0%}; "
        f"largest difference of any logit {kept.largest_difference:g}."
    )
    text = {
        name: bits_per_byte(model, held_out, 64, curriculum.pairs, 256, curriculum.seed)
        for name, model in models.items()
    }
    numbers = ", ".join(f"{name} {bits:.2f}" for name, bits in text.items())
    say(f"Bits per byte of held-out text behind facts, as in training: {numbers}.")
    report = DemoReport(
        plan,
        parameters,
        curves,
        recall,
        kept,
        text,
        time.perf_counter() - begin,
        f"{platform.processor() or platform.machine()}, one thread, torch {torch.__version__}, Python {platform.python_version()}",
        folder / "index.html",
        folder / "results.json",
    )
    write_json(report.data, report.to_json())
    write_text(report.page, page(report))
    picture(report, folder / "recall.png")
    console.rule("Recall by distance")
    print_recall(recall, plan, console)
    say(f"{report.seconds:.0f} seconds in all.")
    if is_kept():
        say(f"The memory model stays in {kept_folder()}. Play a game of facts with it: mnemos chat demo")
    say(f"Page: {report.page.resolve()}")
    return report


def _new_model(plan: DemoPlan, name: str) -> MnemosForCausalLM:
    torch.manual_seed(plan.curriculum.seed)
    return MnemosForCausalLM(plan.config(name))


def _train_all(
    models: dict[str, MnemosForCausalLM], text: np.ndarray, plan: DemoPlan, console: Console
) -> dict[str, Curve]:
    """Train the memory model until it has learned; then the others for as many steps on the same batches."""
    curves: dict[str, Curve] = {}
    limit = math.inf if plan.seconds is None else plan.seconds
    with _bars(console) as bar:
        for name in MODEL_NAMES:
            line = bar.add_task(name, total=1.0, done="")

            def progress(done: float, curve: Curve, line=line) -> None:
                shown = (
                    f"step {curve.steps}, recall {curve.recent():.0%}, up to {curve.longest(plan.curriculum):,} tokens"
                )
                bar.update(line, completed=done, done=shown)

            curves[name] = train(models[name], text, plan.curriculum, curves.get(WITH_MEMORY), progress, limit)
            bar.update(line, completed=1.0)
    for name, curve in curves.items():
        console.print(
            f"{name}: {curve.steps} steps in {curve.seconds:.0f} s, recall of the last steps {curve.recent():.1%} (guessing: {CHANCE:.1%})",
            highlight=False,
        )
    if not curves[WITH_MEMORY].reached:
        console.print(
            f"The memory model has not reached a recall of {plan.curriculum.goal:.0%} at {plan.curriculum.longest:,} tokens: what follows shows an unfinished model.",
            highlight=False,
        )
    return curves


def _recall(
    models: dict[str, MnemosForCausalLM], text: np.ndarray, plan: DemoPlan, folder: Path, console: Console
) -> tuple[dict[str, list[Asked]], Kept]:
    """Every model at its distances, and the memory's state after about 4,000 tokens, saved and loaded."""
    found: dict[str, list[Asked]] = {}
    kept: Kept | None = None
    saved_at = max((d for d in plan.distances if d <= 4_096), default=min(plan.distances))
    seed = plan.curriculum.seed + 1  # facts that differ from training
    with _bars(console) as bar:
        for name in MODEL_NAMES:
            distances = plan.distances_of(name)
            line = bar.add_task(name, total=plan.rows * max(distances), done="")
            advance = functools.partial(bar.advance, line)
            found[name] = []
            for asked, cache in recall_by_distance(
                models[name], text, distances, plan.rows, plan.curriculum.pairs, seed, advance
            ):
                found[name].append(asked)
                bar.update(line, done=f"recall {asked.recall:.0%} after {asked.distance:,}")
                if name == WITH_MEMORY and asked.distance == saved_at:
                    kept = save_and_load(models[name], cache, asked, folder / "facts.safetensors")
    assert kept is not None
    return found, kept


@contextmanager
def _bars(console: Console) -> Generator[Progress]:
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield bar
