"""Findings about a run, in words, from its metrics and from readings of its checkpoints.

Each check is a function of a `Known` that yields findings; `CHECKS` lists them. A record is a line of metrics.jsonl.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]

COLLAPSED = 0.95  # fraction of gates on one side above which the other side counts as ignored
UNMOVED = 0.01  # largest standard deviation of gates that have not moved from their initial value
MIN_GAIN = 0.005  # fraction of the perplexity below which a gain counts as none
SHORT_LIFE = 4.0  # half-life of a memory, in tokens, below which it forgets at once
MIN_LR_SHARE = 0.01  # fraction of the inner learning rate's range below which almost nothing is written
DIVERGED = 0.5  # nats of the smoothed loss above its lowest
RISEN = 0.02  # nats of the validation loss above its lowest
GAP = 1.25  # perplexity on held-out text over that in training
UNLEARNED = 0.05  # nats by which the loss must fall in MANY steps
MANY = 50
MAX_DATA_WAIT = 0.3  # fraction of the time spent waiting for data
COLLAPSED_RANK = 2.0  # effective rank of a fast map below which its keys all point one way
MIN_RELEARNING = 0.5  # what a chunk teaches a memory, relative to a fresh one, below which the memory counts as dying
EXPLODED = 100.0  # ratio of a fast map's norm after a text to that before it
ADVICE = "Set memory_retention=start, train on longer sequences or with --carry-state; mnemos eval --suite vitality measures longer streams."


@dataclass(frozen=True)
class Finding:
    """level: "bad" (the run is broken or wasted), "warn" (look at it) or "note". advice: a remedy; may be empty."""

    level: str
    title: str
    text: str
    advice: str = ""

    def sentence(self) -> str:
        return " ".join(part for part in (f"{self.title}: {self.text}", self.advice) if part)


@dataclass
class Known:
    """The input of the checks. readings: `analyze.Reading`s as dictionaries; gate_mode: that of the model."""

    train: Sequence[Record] = ()
    validate: Sequence[Record] = ()
    readings: Sequence[Record] = ()
    gate_mode: str = "convex"
    total_steps: int | None = None
    damaged: dict[str, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return max((r["step"] for r in (*self.train, *self.validate)), default=0)


def health(known: Known) -> list[Finding]:
    """All findings, the worst first.

    >>> [f.title for f in health(Known(train=[{"step": 9, "loss": 2.0, "bad_steps": 4}]))]
    ['Steps without a finite loss', 'No validation']
    """
    found = [finding for rule in CHECKS for finding in rule(known)]
    return sorted(found, key=lambda f: ("bad", "warn", "note").index(f.level))


def _finite_steps(known: Known) -> Iterator[Finding]:
    last = known.train[-1] if known.train else {}
    bad, back = last.get("bad_steps") or 0, last.get("rollbacks") or 0
    if bad:
        share = bad / max(1, known.step)
        yield Finding(
            "bad" if share > 0.01 else "warn",
            "Steps without a finite loss",
            f"{bad} of {known.step:,} steps were skipped because the loss or its gradient was NaN or infinite.",
            "Try a smaller optim.lr, a longer schedule.warmup, or dtype float32.",
        )
    if back:
        yield Finding(
            "warn",
            "Rollbacks",
            f"the run was rolled back to an earlier checkpoint {back} time{'s' * (back > 1)}.",
            "The learning rate was lowered each time: start with a lower one.",
        )
    if any("val_loss" in r and r["val_loss"] is None for r in known.validate):
        yield Finding("bad", "Validation is not finite", "the loss on held-out text was NaN or infinite at least once.")


def _losses(known: Known) -> Iterator[Finding]:
    smoothed = [(r["step"], r["smoothed_loss"]) for r in known.train if r.get("smoothed_loss") is not None]
    if len(smoothed) < 2:
        return
    (first_step, first), (last_step, last) = smoothed[0], smoothed[-1]
    low_step, low = min(smoothed, key=lambda pair: pair[1])
    if last > low + DIVERGED:
        yield Finding(
            "bad",
            "Divergence",
            f"the smoothed loss is {last:.3f}, but was {low:.3f} at step {low_step:,}.",
            "Resume from an earlier checkpoint, with a smaller optim.lr.",
        )
    elif last_step - first_step >= MANY and last > first - UNLEARNED:
        yield Finding(
            "bad",
            "Nothing learned",
            f"the smoothed loss went from {first:.3f} to {last:.3f} in {last_step - first_step:,} steps.",
            "Check the learning rate and the data.",
        )


def _validation(known: Known) -> Iterator[Finding]:
    checked = [r for r in known.validate if r.get("val_loss") is not None]
    if not checked:
        if known.train:
            yield Finding(
                "note", "No validation", "there is no held-out loss yet, and therefore no statistics of the gates."
            )
        return
    last, best = checked[-1], min(checked, key=lambda r: r["val_loss"])
    if last["val_loss"] > best["val_loss"] + RISEN:
        yield Finding(
            "warn",
            "Validation has risen",
            f"its loss is {last['val_loss']:.3f}, but was {best['val_loss']:.3f} at step {best['step']:,}.",
            "The best checkpoint is kept; more data, or fewer steps, would help.",
        )
    if (last.get("gap") or 0) > GAP:
        yield Finding(
            "warn",
            "Learned by heart",
            f"perplexity on held-out text is {last['gap']:.2f} times that in training.",
            "More data, dropout or weight decay would help.",
        )


def _gates(known: Known) -> Iterator[Finding]:
    from ..models.gate import GATES

    last = _last_layers(known)
    to_memory = getattr(GATES.get(known.gate_mode), "additive", False)  # else a gate of 1 is attention alone
    for layer, numbers in last.items():
        gate = numbers.get("gate")
        if not gate:
            continue
        high, low = gate.get("near_1", 0.0), gate.get("near_0", 0.0)
        closed, opened = (low, high) if to_memory else (high, low)
        if closed > COLLAPSED:
            yield Finding(
                "bad",
                f"Gate collapse in layer {layer}",
                f"{closed:.0%} of its gates give the memory a weight below 0.1.",
                "Try memory dropout, a gate_init nearer to the memory, or no polarisation.",
            )
        elif opened > COLLAPSED and not to_memory:
            yield Finding(
                "warn",
                f"Gate collapse in layer {layer}",
                f"{opened:.0%} of its gates give the attention a weight below 0.1.",
                "Its attention has no effect: the block lmm has none.",
            )
        elif gate.get("std", 1.0) < UNMOVED and known.step >= 10 * MANY:
            yield Finding(
                "warn",
                f"Gate unmoved in layer {layer}",
                f"its gates are {gate['mean']:.2f} for every token (spread {gate['std']:.4f}).",
            )


def _memory_gates(known: Known) -> Iterator[Finding]:
    for layer, numbers in _last_layers(known).items():
        lr, retain = numbers.get("lr"), numbers.get("retain")
        if lr and lr["mean"] < MIN_LR_SHARE:
            yield Finding(
                "warn",
                f"Layer {layer} writes almost nothing",
                f"its inner learning rate is {lr['mean']:.2%} of its range.",
            )
        if retain and 0 < retain["mean"] < 1:
            half = math.log(0.5) / math.log(retain["mean"])
            if half < SHORT_LIFE:
                yield Finding(
                    "warn",
                    f"Layer {layer} forgets at once",
                    f"it retains {retain['mean']:.3f} per token: half is gone after {half:.1f} tokens.",
                )
        before, after = numbers.get("surprise_before"), numbers.get("surprise_after")
        if before is not None and after is not None and after >= before:
            yield Finding(
                "warn",
                f"Writing does not help in layer {layer}",
                f"the inner loss of a chunk is {before:.4g} before it is written and {after:.4g} after.",
                "The inner learning rate may be too high for its chunk (memory max_lr).",
            )


def _gain(known: Known) -> Iterator[Finding]:
    """By the last validation that measured it; without one, by the last checkpoint that has read the text."""
    measured = [r["memory"] for r in known.validate if (r.get("memory") or {}).get("gain") is not None]
    if measured:
        learning, frozen = measured[-1]["perplexity"], measured[-1]["perplexity_frozen"]
        place = "of held-out tokens beyond the window" if measured[-1]["beyond"] else "of held-out text"
    elif known.readings and "frozen" in known.readings[-1]["perplexity"]:
        learning, frozen = (known.readings[-1]["perplexity"][name] for name in ("learning", "frozen"))
        place = "of the text"
    else:
        return
    gain = 1 - learning / frozen
    numbers = f"perplexity {place} is {learning:.2f} with writes and {frozen:.2f} without ({gain:+.1%})"
    if gain < -MIN_GAIN:
        yield Finding("bad", "Learning at test time does harm", f"{numbers}.", "Train longer, or on longer sequences.")
    elif gain < MIN_GAIN:
        yield Finding(
            "warn",
            "Learning at test time gains almost nothing",
            f"{numbers}.",
            "Sequences must be longer than the attention window, and hold something to remember.",
        )


def _norms(known: Known) -> Iterator[Finding]:
    for reading in known.readings:
        for layer in reading["layers"]:
            for spectrum in layer["maps"]:
                start, end = spectrum["start"], spectrum["end"]
                floor = max(start, 1.0)  # last maps start near zero, and are expected to grow
                if end is None or not math.isfinite(end):
                    text = f"a fast map of layer {layer['index']} is not finite after the text, at step {reading['step']:,}."
                    yield Finding("bad", "A memory diverged", text, "Lower the memory's max_lr or its chunk_size.")
                    return
                if end > EXPLODED * floor:
                    text = (
                        f"in layer {layer['index']} at step {reading['step']:,} a fast map grows from norm {start:.3g} to {end:.3g}"
                        " over the text."
                    )
                    yield Finding("warn", "A memory grows without bound", text, "Lower max_lr, or enable forgetting.")
                    return


def dying(layer: str, numbers: Record) -> Iterator[Finding]:
    """Findings about the vitality of one layer's memory, from effective_rank and relearning.

    >>> [f.title for f in dying("0", {"effective_rank": 1.1, "relearning": 0.1})]
    ['The memory of layer 0 has collapsed', 'The memory of layer 0 learns little']
    """
    rank, ratio = numbers.get("effective_rank"), numbers.get("relearning")
    if rank is not None and rank < COLLAPSED_RANK:
        text = f"the effective rank of a fast map is {rank:.2f}: it distinguishes almost no keys."
        yield Finding("warn", f"The memory of layer {layer} has collapsed", text, ADVICE)
    if ratio is not None and ratio < MIN_RELEARNING:
        text = f"writing a chunk lowers its inner loss by {ratio:.0%} of the fall in a fresh memory."
        yield Finding("warn", f"The memory of layer {layer} learns little", text, ADVICE)


def _vitality(known: Known) -> Iterator[Finding]:
    """By the last checkpoint that has read the text; without checkpoints, by the last validation."""
    layers = {str(layer["index"]): layer for layer in known.readings[-1]["layers"]} if known.readings else {}
    for layer, numbers in (layers or _last_layers(known)).items():
        yield from dying(layer, numbers)
    for layer, numbers in _last_layers(known).items():
        rank, tokens = numbers.get("carried_rank"), numbers.get("carried_tokens")
        if rank is not None and tokens and rank < COLLAPSED_RANK:
            text = f"the state that training carries has an effective rank of {rank:.2f} after {tokens:,} tokens."
            yield Finding("warn", f"The carried memory of layer {layer} has collapsed", text, ADVICE)


def _speed(known: Known) -> Iterator[Finding]:
    waits = [r["data_wait"] for r in known.train if r.get("data_wait") is not None]
    if waits and statistics.median(waits) > MAX_DATA_WAIT:
        yield Finding(
            "warn",
            "Waiting for data",
            f"{statistics.median(waits):.0%} of the time is spent waiting for data.",
            "Put the data on a faster disk, or give data more workers.",
        )


def _ended(known: Known) -> Iterator[Finding]:
    for name, why in known.damaged.items():
        yield Finding("bad", f"Checkpoint {name} is damaged", f"{why}.", "An earlier one is used instead.")
    if known.total_steps and known.train and known.step < known.total_steps:
        yield Finding(
            "note",
            "Not finished",
            f"the record ends at step {known.step:,} of {known.total_steps:,}.",
            "Continue it with mnemos train --resume.",
        )


def _last_layers(known: Known) -> dict[str, Record]:
    return next((r["layers"] for r in reversed(known.validate) if r.get("layers")), {})


CHECKS: tuple[Callable[[Known], Iterator[Finding]], ...] = (
    _finite_steps,
    _losses,
    _validation,
    _gates,
    _memory_gates,
    _gain,
    _norms,
    _vitality,
    _speed,
    _ended,
)
