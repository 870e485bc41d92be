"""Training with a time limit: until recall reaches its goal or the time is nearly over; then the learning rate falls to its end.

Facts are close to their questions at first, because long distances cannot be learned from scratch in minutes: every byte of text is
written to the memory too, until the gates have learned to select, and they learn this only from answers that are recalled.
When most answers are right, the distance grows by one token per step.

Shapes: B batch rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from ..data.embedded import documents
from ..models import MnemosForCausalLM
from ..train.config import OptimConfig
from ..train.loop import BatchLoss, Loop, Outcome
from ..train.optimisers import Optimisers
from .facts import Lesson, lesson

WARMUP = 20  # steps
RECALL_WINDOW_STEPS = 20  # steps over which recall is averaged
FINISH = 0.2  # fraction of all steps in which the learning rate falls
LONG = 64  # tokens of text; above, a batch has half the rows and so about the same cost


@dataclass(frozen=True)
class Curriculum:
    """Batches and goals. pairs: largest number of facts. gap: smallest and largest distance from facts to questions at first, in tokens;
    longest: largest distance in the end. ready: recall at which the distance begins to grow; goal: recall at the longest distance that ends training."""

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
    """The record of a training: recall of the answers and loss of the text at every step. grew_at: the step at which the distance began to grow."""

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
        last = self.recall[-RECALL_WINDOW_STEPS:]
        return sum(last) / max(1, len(last))

    def longest(self, curriculum: Curriculum) -> int:
        """The largest distance of the next batch."""
        grown = 0 if self.grew_at is None else max(0, self.steps - self.grew_at)
        return min(curriculum.longest, curriculum.gap[1] + grown)


ProgressHook = Callable[[float, Curve], object]


def train(
    model: MnemosForCausalLM,
    text: np.ndarray,
    curriculum: Curriculum,
    seconds: float,
    like: Curve | None = None,
    progress: ProgressHook | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Curve:
    """Train for at most `seconds` of `clock`. The learning rate begins to fall when recall reaches the goal, or when only the time for the decay is left.

    like: the curve of another model; this one then trains for as many steps on the same batches. progress: called with the fraction done.
    """
    model.train()
    training = _Training(model, text, curriculum, seconds, like, progress, clock)
    optimisers = Optimisers(model, OptimConfig(lr=curriculum.lr, weight_decay=0.01))
    Loop(
        optimisers,
        training.batches,
        training.loss,
        lr_factor=training.lr_factor,
        clip=1.0,
        progress=training.after_step,
    ).run(training.steps())
    model.eval()
    return training.curve


def training_text(characters: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes for training, and held-out bytes, of this many characters of Python's documentation. Byte 0, which ends a document elsewhere,
    does not occur."""
    text = np.frombuffer("".join(documents(characters)).encode(), np.uint8)
    border = len(text) * 9 // 10
    return text[:border], text[border:]


class _Training:
    """The functions of the `Loop`, and their common state. falling: step at which the learning rate begins to fall; total: number of steps; both None until decided."""

    def __init__(
        self,
        model: MnemosForCausalLM,
        text: np.ndarray,
        curriculum: Curriculum,
        seconds: float,
        like: Curve | None,
        progress: ProgressHook | None,
        clock: Callable[[], float],
    ):
        self.model, self.text, self.curriculum, self.seconds = model, text, curriculum, seconds
        self.like, self.progress, self.clock = like, progress, clock
        self.rng, self.curve, self.recall = np.random.default_rng(curriculum.seed), Curve(), math.nan
        self.total = None if like is None else like.steps
        self.falling = None if self.total is None else round(self.total * (1 - FINISH))
        self.begin = clock()

    def steps(self) -> Iterator[int]:
        """Steps until the total is reached or the time is over."""
        while (self.total is None or self.curve.steps < self.total) and self.curve.seconds < self.seconds:
            yield self.curve.steps

    def batches(self, step: int) -> list[Lesson]:
        if self.like is not None and step == self.like.grew_at:
            self.curve.grew_at = step
        return [_batch(self.text, self.curriculum, self.curve, self.rng)]

    def lr_factor(self, step: int) -> float:
        return _factor(step, self.falling, self.total)

    def loss(self, batch: Lesson) -> BatchLoss:
        """Mean loss of the answers plus that of the text, which is the one reported."""
        logits = self.model(batch.ids, use_cache=False).logits[:, :-1]  # B T-1 V
        answers, recall = _of(logits, batch.ids, batch.of_answer)
        text, _ = _of(logits, batch.ids, batch.of_text)
        self.recall = recall.item()
        return BatchLoss(answers + (0.3 if self.curve.grew_at is None else 1.0) * text, text.detach())

    def after_step(self, step: int, outcome: Outcome) -> None:
        """Record the step, let the gap grow, and decide when the learning rate falls. A skipped step costs time only."""
        curriculum, curve = self.curriculum, self.curve
        curve.seconds = self.clock() - self.begin
        if outcome.verdict != "good":
            return
        curve.recall.append(self.recall)
        curve.text_loss.append(outcome.loss)
        if self.total is None:
            if curve.grew_at is None and curve.steps >= RECALL_WINDOW_STEPS and curve.recent() >= curriculum.ready:
                curve.grew_at = curve.steps
            curve.reached = curve.longest(curriculum) == curriculum.longest and curve.recent() >= curriculum.goal
            if curve.reached or curve.seconds > self.seconds * (1 - FINISH):
                self.falling, self.total = curve.steps, math.ceil(curve.steps / (1 - FINISH))
        if self.progress is not None:
            done = curve.steps / self.total if self.total else 0.0
            self.progress(max(curve.seconds / self.seconds, done), curve)


def _batch(text: np.ndarray, curriculum: Curriculum, curve: Curve, rng: np.random.Generator) -> Lesson:
    longest = curve.longest(curriculum)
    pairs = int(rng.integers(min(2, curriculum.pairs), curriculum.pairs + 1))
    rows = curriculum.rows if longest < LONG else max(1, curriculum.rows // 2)
    return lesson(text, rows, pairs, int(rng.integers(curriculum.gap[0], longest + 1)), rng)


def _factor(step: int, falling: int | None, steps: int | None) -> float:
    """The learning rate as a fraction of its peak: warm-up, constant, then linear decay to a twentieth."""
    warm = min(1.0, (step + 1) / WARMUP)
    if falling is None or steps is None or step < falling:
        return warm
    return warm * (0.05 + 0.95 * (1 - (step - falling) / max(1, steps - falling)))


def _of(logits: Tensor, ids: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and accuracy of the chosen tokens, each predicted from the position before it."""
    kept = chosen[:, 1:]
    predicted, right = logits[kept], ids[:, 1:][kept]
    return F.cross_entropy(predicted, right), (predicted.argmax(-1) == right).float().mean()
