"""Analysis of a run over its checkpoints: metrics, readings of one text by each checkpoint, samples, and findings.

Shapes: T tokens, H heads, N moments.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..data.held_out import held_out_text
from ..train.checkpoints import checkpoint_steps, problem_of
from ..train.records import Run, open_run
from ..train.runs import load_model, load_tokenizer
from ..train.telemetry import read_metrics
from .diagnostics import Finding, Known, health
from .inspect import describe, inspect
from .page import render

READ_TOKENS = 512
POINTS = 1500  # of a curve; more than the columns of a screen
SAMPLES = 40
EVENTS = 200


@dataclass
class Reading:
    """One checkpoint reading a text. perplexity: see `Inspection.perplexities`. layers: for each layer the mean of every value, the
    vitality of its memory (see `watching.LayerTrace`), and for every fast map its norm before and after the text ("start", "end") and its effective rank after it. sample: a greedy continuation."""

    step: int
    perplexity: dict[str, float]
    layers: list[dict[str, Any]]
    sample: str = ""


@dataclass
class Analysis:
    """A run: its metrics by kind, its readings, samples and findings."""

    name: str
    about: str
    summary: dict[str, Any]
    records: dict[str, list[dict[str, Any]]]
    readings: list[Reading]
    samples: list[dict[str, Any]]
    findings: list[Finding]
    text: str = ""
    notes: list[str] = field(default_factory=list)


def analyze(
    path: str | os.PathLike,
    text: str | None = None,
    tokens: int = READ_TOKENS,
    generate: int = 80,
    checkpoints: bool = True,
    say: Callable[[str], None] = lambda sentence: None,
) -> Analysis:
    """Analyse a run's folder: its metrics, and each checkpoint, which reads `tokens` tokens of one text and continues the run's prompt.

    text: the text to read (None: the run's held-out text; if that is not in the cache any more, Python's own documentation). generate: tokens by which the prompt is continued, 0 for none.
    checkpoints=False uses the metrics only. say: called with progress messages.
    """
    run = open_run(path)
    for name, value, least in (("tokens", tokens, 2), ("generate", generate, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number >= {least}")
    records = {kind: read_metrics(run.path, kind) for kind in ("train", "validate", "probe", "event")}
    readings, damaged, about, where = [], {}, "", "the text given"
    if checkpoints:
        if text is None:
            text, where = _own_text(run, tokens, say)
        readings, damaged, about = _readings(run, text, tokens, generate, say)
    known = Known(
        train=records["train"],
        validate=records["validate"],
        readings=[dataclasses.asdict(r) for r in readings],
        gate_mode=run.config.model.overrides().get("gate_mode", "convex"),
        total_steps=None if run.config.tokens == "chinchilla" else run.config.total_steps(parameters=0),
        damaged=damaged,
    )
    return Analysis(
        name=run.name,
        about=about or run.config.title,
        summary=run.summary(),
        records=records,
        readings=readings,
        samples=_samples(run.path),
        findings=health(known),
        text=f"the first {tokens:,} tokens of {where}" if readings else "",
    )


def _own_text(run: Run, tokens: int, say: Callable[[str], None]) -> tuple[str, str]:
    """The text that a run held out, or Python's own documentation, and its name."""
    try:
        found = held_out_text(run.config.data, load_tokenizer(run.path), tokens)
    except (ValueError, OSError, ImportError):  # sources that are gone, or a reader that is not installed here
        found = None
    if found is not None and len(found) > 1:
        return found, "the run's held-out text"
    say("the run's held-out text is not in the cache: reading Python's own documentation; --text FILE reads another")
    return embedded_text(), "Python's own documentation"


def _readings(
    run: Run, text: str, tokens: int, generate: int, say: Callable[[str], None]
) -> tuple[list[Reading], dict[str, str], str]:
    readings, damaged, about = [], {}, ""
    for step in checkpoint_steps(run.path / "checkpoints"):
        name = f"step-{step:06d}"
        wrong = problem_of(run.path / "checkpoints" / name)
        if wrong:
            damaged[name] = wrong
            continue
        say(f"reading {name}")
        try:
            model = load_model(run.path, str(step))
        except ValueError as wrong:
            damaged[name] = str(wrong)
            continue
        tokenizer = load_tokenizer(run.path)
        about = f"{run.config.title}: {describe(model)}"
        seen = inspect(model, tokenizer, text, tokens)
        layers = []
        for row, layer in zip(seen.routing(), seen.layers):
            maps = []
            for spectrum in layer.spectra:
                start, end = spectrum.norm[0].mean().item(), spectrum.norm[-1].mean().item()
                rank = None if spectrum.rank is None else spectrum.rank[-1].mean().item()
                maps.append({"name": spectrum.name, "start": start, "end": end, "rank": rank})
            layers.append(row | {"index": layer.index, "maps": maps})
        sample = _continue(model, tokenizer, run.config.watch.prompt, generate) if generate else ""
        readings.append(Reading(step, seen.perplexities(), layers, sample))
    return readings, damaged, about


@torch.no_grad()
def _continue(model, tokenizer, prompt: str, count: int) -> str:
    """The greedy continuation: the same prompt gives the same text."""
    ids = torch.tensor([tokenizer.encode(prompt) or [tokenizer.eos_token_id]])
    made = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tokenizer.decode(made[0].tolist())


def embedded_text(length: int = 20_000) -> str:
    """Python's own documentation: the same text on every machine with this Python."""
    from ..data.embedded import documents

    return "\n\n".join(documents(length))


def _samples(path: Path) -> list[dict[str, Any]]:
    file, found = path / "samples.jsonl", []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            sample = json.loads(line)
            found.append({"step": int(sample["step"]), "text": str(sample["text"])})
        except (ValueError, KeyError, TypeError, RecursionError):  # a last line truncated by a crash
            continue
    return found[-SAMPLES:]


def analyze_page(runs: Sequence[Analysis], title: str = "mnemos analyze") -> str:
    """The page of one run, or of several to compare: one self-contained HTML file."""
    if not runs:
        raise ValueError("runs is empty: give at least one analysis")
    return render(title, "analyze", {"runs": [_run(run) for run in runs]})


def _run(run: Analysis) -> dict[str, Any]:
    found = dataclasses.asdict(run)
    found["records"] = {kind: _thinned(rows) for kind, rows in run.records.items()}
    found["records"]["event"] = run.records.get("event", [])[-EVENTS:]
    return found


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every n-th record and the last, at most `POINTS`, so that the page does not grow with the run."""
    stride = -(-len(rows) // POINTS) if rows else 1
    return [row for i, row in enumerate(rows) if (len(rows) - 1 - i) % stride == 0]
