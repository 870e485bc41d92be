"""Training by the clock: until the facts come back, or until the time is over; then the learning rate falls, and that is all.

Facts first stand close to their questions, because what is told through much text at once is not learnt in minutes: every byte that is
read writes too, until the gates have learnt what is worth writing, and they learn that only from facts that come back. When most
answers are right, the distance grows by one token per step.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..models import MnemosForCausalLM
from ..train.config import OptimConfig
from ..train.optimisers import Optimisers
from .facts import Lesson, lesson

WARMUP = 20  # steps
WINDOW = 20  # steps over which recall is averaged
FINISH = 0.2  # share of all steps in which the learning rate falls
LONG = 64  # tokens of text from which on a batch has half the rows, to cost about the same


@dataclass(frozen=True)
class Course:
    """What the batches hold, and when it is enough. pairs: facts, at most. gap: tokens between facts and questions at first, from .. to;
    longest: in the end. ready: recall at which the gap begins to grow; goal: recall at the longest gap that is enough."""

    rows: int = 32
    pairs: int = 8
    gap: tuple[int, int] = (2, 6)
    longest: int = 160
    ready: float = 0.85
    goal: float = 0.99
    lr: float = 4e-3
    seed: int = 0


@dataclass
class Curve:
    """A training as it went: recall of the answers and loss of the text at every step; the step from which on the gap grew."""

    recall: list[float] = field(default_factory=list)
    text_loss: list[float] = field(default_factory=list)
    seconds: float = 0.0
    grew_at: int | None = None
    reached: bool = False

    @property
    def steps(self) -> int:
        return len(self.recall)

    def recent(self) -> float:
        """Recall over the last steps."""
        last = self.recall[-WINDOW:]
        return sum(last) / max(1, len(last))

    def longest(self, course: Course) -> int:
        """The largest gap of the next batch."""
        grown = 0 if self.grew_at is None else max(0, self.steps - self.grew_at)
        return min(course.longest, course.gap[1] + grown)


Progress = Callable[[float, Curve], object]


def train(
    model: MnemosForCausalLM,
    text: np.ndarray,
    course: Course,
    seconds: float,
    like: Curve | None = None,
    progress: Progress | None = None,
) -> Curve:
    """Train for `seconds` at most. The learning rate begins to fall when recall reaches the goal, or when only the time for falling is left.

    like: another model's training. This one then has as many steps on the same batches. `progress` gets the share that is done.
    """
    model.train()
    rng, curve = np.random.default_rng(course.seed), Curve()
    optimisers = Optimisers(model, OptimConfig(lr=course.lr, weight_decay=0.01))
    begin = time.perf_counter()
    steps = None if like is None else like.steps
    falling = None if steps is None else round(steps * (1 - FINISH))
    while (steps is None or curve.steps < steps) and curve.seconds < seconds:
        if like is not None and curve.steps == like.grew_at:
            curve.grew_at = like.grew_at
        optimisers.set_factor(_factor(curve.steps, falling, steps))
        recall, loss = _step(model, optimisers, _batch(text, course, curve, rng), 0.3 if curve.grew_at is None else 1.0)
        curve.recall.append(recall)
        curve.text_loss.append(loss)
        curve.seconds = time.perf_counter() - begin
        if steps is None:
            if curve.grew_at is None and curve.steps >= WINDOW and curve.recent() >= course.ready:
                curve.grew_at = curve.steps
            curve.reached = curve.longest(course) == course.longest and curve.recent() >= course.goal
            if curve.reached or curve.seconds > seconds * (1 - FINISH):
                falling, steps = curve.steps, math.ceil(curve.steps / (1 - FINISH))
        if progress is not None:
            progress(max(curve.seconds / seconds, curve.steps / steps if steps else 0.0), curve)
    model.eval()
    return curve


def _batch(text: np.ndarray, course: Course, curve: Curve, rng: np.random.Generator) -> Lesson:
    longest = curve.longest(course)
    pairs = int(rng.integers(min(2, course.pairs), course.pairs + 1))
    rows = course.rows if longest < LONG else max(1, course.rows // 2)
    return lesson(text, rows, pairs, int(rng.integers(course.gap[0], longest + 1)), rng)


def _factor(step: int, falling: int | None, steps: int | None) -> float:
    """The learning rate as a share of its peak: up, flat, then down to a twentieth."""
    warm = min(1.0, (step + 1) / WARMUP)
    if falling is None or steps is None or step < falling:
        return warm
    return warm * (0.05 + 0.95 * (1 - (step - falling) / max(1, steps - falling)))


def _step(model: MnemosForCausalLM, optimisers: Optimisers, batch: Lesson, text_weight: float) -> tuple[float, float]:
    """One step on the mean loss of the answers plus that of the text: recall of the answers, loss of the text."""
    logits = model(batch.ids, use_cache=False).logits[:, :-1]  # B T-1 V
    answers, recall = _of(logits, batch.ids, batch.of_answer)
    text, _ = _of(logits, batch.ids, batch.of_text)
    optimisers.zero_grad()
    (answers + text_weight * text).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimisers.step()
    return recall.item(), text.item()


def _of(logits: Tensor, ids: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and accuracy at the chosen tokens, each predicted by the one before it."""
    kept = chosen[:, 1:]
    predicted, right = logits[kept], ids[:, 1:][kept]
    return F.cross_entropy(predicted, right), (predicted.argmax(-1) == right).float().mean()
