"""The whole demo: train two models of one size, measure both, print the measurements, write the page."""

from __future__ import annotations

import functools
import json
import platform
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..atomic_io import check_not_foreign, write_text
from ..eval.files import write_json
from ..models import MnemosForCausalLM
from .facts import CHANCE
from .kept import keep, kept_folder
from .measure import Asked, Kept, bits_per_byte, recall_by_distance, save_and_load, state_bytes
from .page import page
from .picture import picture
from .results import MODEL_NAMES, WINDOW_ONLY, WITH_MEMORY, DemoPlan, DemoReport, example_at, examples_of
from .training import Curve, train, training_text

MEMORY_SHARE = 0.65  # of the training time, at most


def _is_report(path: Path) -> bool:
    """Whether a file holds the results of a demo."""
    try:
        return {"plan", "recall", "bits_per_byte"} <= {*json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def run(folder: str | Path, plan: DemoPlan | None = None, console: Console | None = None) -> DemoReport:
    """Run the demo. Writes to `folder`: index.html, results.json, facts.safetensors, and recall.png if matplotlib is installed."""

    plan, console, folder = plan or DemoPlan(), console or Console(), Path(folder)
    if not _is_report(folder / "results.json"):
        check_not_foreign(folder, ("index.html", "results.json", "recall.png"), "mnemos demo")
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    learn, held_out = training_text(plan.text_characters)
    torch.manual_seed(plan.curriculum.seed)
    models = {
        WITH_MEMORY: MnemosForCausalLM(plan.memory_config()),
        WINDOW_ONLY: MnemosForCausalLM(plan.window_config()),
    }
    parameters = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    console.rule("1. Two models of one size learn to keep facts while they read")
    console.print(
        f"Up to {plan.curriculum.pairs} facts, then {plan.curriculum.gap[0]} to {plan.curriculum.longest} bytes of Python's documentation, then questions. "
        f"{parameters[WITH_MEMORY]:,} parameters with a memory, {parameters[WINDOW_ONLY]:,} without; both see {plan.window} tokens at a time.",
        highlight=False,
    )
    curves = _train_both(models, learn, plan, console)
    if plan.memory_config().to_dict() == DemoPlan().memory_config().to_dict() and keep(models[WITH_MEMORY]):
        console.print(f"The memory model is kept for `mnemos chat`: {kept_folder()}", highlight=False, soft_wrap=True)
    console.rule("2. Facts far beyond the attention window")
    recall, kept = _recall(models, held_out, plan, folder, console)
    _print_recall(recall, plan, console)
    console.rule("3. The state has one size, however much is read")
    far, attention = _read_far(models, held_out, plan, console)
    console.rule("4. The state is a file")
    console.print(
        f"{kept.path}: {kept.file_bytes:,} bytes for {plan.rows} readers. Recall before saving {kept.before:.0%}, after loading {kept.after:.0%}; "
        f"largest difference of any logit {kept.largest_difference:g}.",
        highlight=False,
        soft_wrap=True,
    )
    console.rule("5. How well they predict text")
    curriculum = plan.curriculum
    text = {
        name: bits_per_byte(model, held_out, 64, curriculum.pairs, 256, curriculum.seed)
        for name, model in models.items()
    }
    console.print(
        f"Bits per byte of held-out text after {curriculum.pairs} facts, as in training: {text[WITH_MEMORY]:.3f} with a memory, {text[WINDOW_ONLY]:.3f} without.",
        highlight=False,
    )
    threads = torch.get_num_threads()
    report = DemoReport(
        plan,
        parameters,
        curves,
        recall,
        far,
        attention,
        kept,
        text,
        time.perf_counter() - begin,
        f"{platform.processor() or platform.machine()}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}, Python {platform.python_version()}",
        folder / "index.html",
        folder / "results.json",
    )
    write_json(report.data, report.to_json())
    write_text(report.page, page(report))
    drawn = picture(report, folder / "recall.png")
    console.rule()
    console.print(f"{report.seconds:.0f} seconds in all.", highlight=False)
    if drawn is not None:
        console.print(f"Picture: {drawn}", highlight=False, soft_wrap=True)
    console.print(f"Report: {report.page.resolve()}", highlight=False, soft_wrap=True)
    return report


def _train_both(models: dict, text: np.ndarray, plan: DemoPlan, console: Console) -> dict[str, Curve]:
    """Train the memory model first; then the other, which is faster, for as many steps on the same batches in the remaining time."""
    curves: dict[str, Curve] = {}
    with _bars(console) as bar:
        for name in MODEL_NAMES:
            seconds = plan.seconds - curves[WITH_MEMORY].seconds if curves else MEMORY_SHARE * plan.seconds
            line = bar.add_task(f"training: {name}", total=1.0, done="")

            def progress(done: float, curve: Curve, line=line) -> None:
                shown = f"step {curve.steps}, gap up to {curve.longest(plan.curriculum)}, recall {curve.recent():.0%}"
                bar.update(line, completed=min(1.0, done), done=shown)

            curves[name] = train(models[name], text, plan.curriculum, seconds, curves.get(WITH_MEMORY), progress)
    for name, curve in curves.items():
        console.print(
            f"{name}: {curve.steps} steps in {curve.seconds:.0f} s, recall of the last steps {curve.recent():.1%} (guessing: {CHANCE:.1%})",
            highlight=False,
        )
    return curves


def _asking(
    model, text: np.ndarray, plan: DemoPlan, distances: tuple[int, ...], rows: int, seed: int, bar: Progress, line
):
    """The results of `recall_by_distance`, with progress on `line` of the bar; seed: for facts that differ from training."""
    seed += plan.curriculum.seed
    advance = functools.partial(bar.advance, line)
    return recall_by_distance(model, text, distances, rows, plan.curriculum.pairs, seed, advance)


def _recall(
    models: dict, text: np.ndarray, plan: DemoPlan, folder: Path, console: Console
) -> tuple[dict[str, list[Asked]], Kept]:
    """Both models at every distance, and the memory's state at the last but one, saved and loaded."""
    found: dict[str, list[Asked]] = {}
    kept: Kept | None = None
    saved_at = sorted(plan.distances)[-2:][0]
    with _bars(console) as bar:
        for name in MODEL_NAMES:
            line = bar.add_task(f"reading: {name}", total=plan.rows * max(plan.distances), done="")
            found[name] = []
            for asked, cache in _asking(models[name], text, plan, plan.distances, plan.rows, 1, bar, line):
                found[name].append(asked)
                bar.update(line, done=f"{asked.distance:,} tokens away: recall {asked.recall:.0%}")
                if name == WITH_MEMORY and asked.distance == saved_at:
                    kept = save_and_load(models[name], cache, asked, folder / "facts.safetensors")
    assert kept is not None
    return found, kept


def _print_recall(recall: dict[str, list[Asked]], plan: DemoPlan, console: Console) -> None:
    table = Table("tokens since the facts", *(f"recall, {name}" for name in MODEL_NAMES))
    for memory, window in zip(recall[WITH_MEMORY], recall[WINDOW_ONLY]):
        table.add_row(f"{memory.distance:,}", f"{memory.recall:.0%}", f"{window.recall:.0%}")
    console.print(table)
    questions = plan.rows * plan.curriculum.pairs
    console.print(
        f"{questions} questions each; guessing: {CHANCE:.0%}. The windows of {plan.layers} layers reach {plan.reach} tokens back.",
        highlight=False,
    )
    far = example_at(plan)
    examples = Table("person", "fact", *(f"answer, {name}" for name in MODEL_NAMES), title=f"{far:,} tokens later")
    for row in examples_of(recall, far):
        examples.add_row(*row)
    console.print(examples)


def _read_far(
    models: dict, text: np.ndarray, plan: DemoPlan, console: Console
) -> tuple[dict[str, list[Asked]], dict[int, int]]:
    found: dict[str, list[Asked]] = {}
    with _bars(console) as bar:
        for name in MODEL_NAMES:
            line = bar.add_task(f"reading: {name}", total=plan.far_rows * max(plan.far), done="")
            reading = _asking(models[name], text, plan, plan.far, plan.far_rows, 2, bar, line)
            found[name] = [asked for asked, _ in reading]
    attention = state_bytes(MnemosForCausalLM(plan.attention_config()).eval(), text, plan.attention_lengths)
    names = (
        "tokens read",
        "state, bytes",
        "tokens/s",
        "recall",
        "window only, bytes",
        "recall",
        "full attention, bytes",
    )
    table = Table(*names)
    for memory, window in zip(found[WITH_MEMORY], found[WINDOW_ONLY]):
        table.add_row(
            f"{memory.distance:,}",
            f"{memory.state_bytes:,}",
            f"{plan.far_rows * memory.distance / memory.seconds:,.0f}",
            f"{memory.recall:.0%}",
            f"{window.state_bytes:,}",
            f"{window.recall:.0%}",
            f"{attention[memory.distance]:,}" if memory.distance in attention else "not measured",
        )
    console.print(table)
    return found, attention


@contextmanager
def _bars(console: Console) -> Generator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        yield bar
