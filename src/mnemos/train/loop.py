"""The training loop: forward, backward, clipping, optimiser step. Shared by trainer, demo, ablations and experiments."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from ..memory.validation import NotFiniteError
from .distributed import full
from .optimisers import Optimisers

Verdict = Literal["good", "skip", "back"]


class BatchLoss(NamedTuple):
    """objective: a scalar to differentiate. reported: a scalar to report, without its graph."""

    objective: Tensor
    reported: Tensor


@dataclass
class Outcome:
    """One step. loss: sum of the reported losses. grad_norm: before clipping. Both are NaN if a forward pass failed. verdict: "good" if the weights were updated."""

    loss: float
    grad_norm: float
    verdict: Verdict = "skip"


def finite_steps_only(outcome: Outcome) -> Verdict:
    """The default judge: "good" if loss and gradient are finite, else "skip"."""
    return "good" if math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm) else "skip"


def no_gradient_exchange(last: bool) -> AbstractContextManager:
    """The default `syncing`, for one process."""
    return contextlib.nullcontext()


@dataclass
class Loop:
    """Trains the parameters of `optimisers`. Everything that differs between trainings is a function.

    batches(step): the batches of a step; their gradients add up. An empty list skips the step.
    loss(batch): objective and reported loss of one batch.
    lr_factor(step): learning rate as a fraction of its peak.
    clip: largest norm of the gradient; 0 does not clip.
    judge(outcome): called after the backward passes; the optimiser steps only if it returns "good".
    progress(step, outcome): called after each step.
    syncing(last): context around forward and backward of a batch; `last` marks the last batch of a step.
    on_not_finite(error): called if a memory rejects NaN or infinite numbers. The step is skipped unless this raises.

    >>> import torch
    >>> from mnemos.train.config import OptimConfig
    >>> _, losses = torch.manual_seed(0), []
    >>> model = nn.Linear(2, 1)
    >>> def loss(x):
    ...     error = model(x).square().mean()
    ...     return BatchLoss(error, error.detach())
    >>> optimisers = Optimisers(model, OptimConfig(lr=0.1))
    >>> loop = Loop(optimisers, lambda step: [torch.ones(4, 2)], loss, progress=lambda step, outcome: losses.append(outcome.loss))
    >>> loop.run(range(20))
    >>> len(losses), losses[-1] < losses[0]
    (20, True)
    """

    optimisers: Optimisers
    batches: Callable[[int], Sequence[Any]]
    loss: Callable[[Any], BatchLoss]
    lr_factor: Callable[[int], float] = lambda step: 1.0
    clip: float = 1.0
    judge: Callable[[Outcome], Verdict] = finite_steps_only
    progress: Callable[[int, Outcome], object] = lambda step, outcome: None
    syncing: Callable[[bool], AbstractContextManager] = no_gradient_exchange
    on_not_finite: Callable[[NotFiniteError], object] = lambda error: None

    def run(self, steps: Iterable[int]) -> None:
        """Train for the given steps. The stop rule is the end of the iterable: `range(n)`, or a generator that decides after each step."""
        self.optimisers.zero_grad()
        for step in steps:
            self.progress(step, self.step(step))

    def step(self, step: int) -> Outcome:
        """One optimiser step. Leaves no gradients."""
        batches = self.batches(step)
        self.optimisers.set_factor(self.lr_factor(step))
        outcome = Outcome(*self._backward(batches))
        outcome.verdict = self.judge(outcome)
        if outcome.verdict == "good":
            self.optimisers.step()
        self.optimisers.zero_grad()
        return outcome

    def _backward(self, batches: Sequence[Any]) -> tuple[float, float]:
        """Leaves clipped gradients; returns the loss and the gradient's norm."""
        if not batches:
            return math.nan, math.nan
        total: Tensor | float = 0.0
        try:
            for i, batch in enumerate(batches):
                with self.syncing(i == len(batches) - 1):
                    objective, reported = self.loss(batch)
                    total = total + reported
                    objective.backward()
        except NotFiniteError as error:
            self.on_not_finite(error)
            return math.nan, math.nan
        norm = full(nn.utils.clip_grad_norm_(self.optimisers.named.values(), self.clip or math.inf))
        return float(total), float(norm)
