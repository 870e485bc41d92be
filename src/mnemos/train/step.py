"""The trainer's part of a step: batches, loss over all processes, validation. Independent of the number of processes and of accumulated batches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..memory.validation import NotFiniteError
from .config import TrainConfig
from .distillation import Distillation
from .distributed import Spread
from .divergence import TrainingFailed
from .hooks import GateWatch
from .loop import BatchLoss, Outcome
from .losses import polarisation_loss, predicted_tokens
from .tbptt import CarriedState


@dataclass
class StepResult:
    """One step over all processes. loss: mean over the predicted tokens. distillation: its term, a mean over the same tokens. tokens: read in the step. waited: seconds for data. stop: a process wants to stop."""

    loss: float = math.nan
    polarisation: float = 0.0
    distillation: float = 0.0
    grad_norm: float = math.nan
    tokens: int = 0
    waited: float = 0.0
    stop: bool = False


class Stepper:
    """Batches and losses of the trainer's steps; `result` is the current or the last step."""

    def __init__(
        self,
        spread: Spread,
        config: TrainConfig,
        batches: Iterator[dict[str, Tensor]],
        carried: CarriedState,
        distillation: Distillation | None = None,
    ):
        self.spread, self.config, self.batches, self.carried = spread, config, batches, carried
        self.device = spread.world.device
        self.distillation = distillation
        self.watch = GateWatch(spread.model) if config.loss.polarisation else None
        self.result = StepResult()
        self._items, self._strength = 0.0, 0.0
        self._polarisation: Tensor | float = 0.0
        self._distillation: Tensor | float = 0.0

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def begin(self, polarisation: float, stop: bool) -> list[dict[str, Tensor]]:
        """The batches of the next step; none if they predict no token. stop: this process wants to stop."""
        began = time.perf_counter()
        batches = [self.to_device(next(self.batches)) for _ in range(self.config.accumulate)]
        waited = time.perf_counter() - began
        items, rows, any_stop = self.spread.world.sum(
            [
                float(sum(predicted_tokens(batch) for batch in batches)),
                float(sum(batch["input_ids"].numel() for batch in batches)),
                float(stop),
            ]
        )
        self._items, self._strength, self._polarisation, self._distillation = items, polarisation, 0.0, 0.0
        self.result = StepResult(tokens=int(rows), waited=waited, stop=any_stop > 0)
        return batches if items else []

    def loss(self, batch: dict[str, Tensor]) -> BatchLoss:
        """This batch's share of the mean over the step's tokens; the objective adds the polarisation of the gates."""
        carried = self.carried if self.config.data.carry_state else None
        output = self.forward(
            batch, self._items, carried, {} if self.distillation is None else self.distillation.options
        )
        loss = objective = output.loss
        if self.distillation is not None:
            with self.autocast():
                term = self.distillation(output, batch, self._items)
            self._distillation = self._distillation + term.detach()
            objective = self.config.distill.labels * loss + term
        objective = objective * self.spread.gradient_scale
        if self.watch is not None and self._strength and self.watch.values:
            undecided = polarisation_loss(list(self.watch.values.values())) / self.config.accumulate
            self._polarisation = self._polarisation + undecided.detach()
            objective = objective + self._strength * undecided
        return BatchLoss(objective, loss.detach())

    def not_finite(self, error: NotFiniteError) -> None:
        """Skip the step. With several processes the others wait in an exchange, so training can only resume from the last checkpoint."""
        world = self.spread.world
        if world.size > 1:
            raise TrainingFailed(
                f"process {world.rank}: {error}; resume from the last checkpoint with --resume"
            ) from None
        self._polarisation = self._distillation = 0.0

    def end(self, outcome: Outcome) -> StepResult:
        """The step's result, summed over all processes."""
        world = self.spread.world
        if self._items:
            loss, polarisation, term = world.sum([outcome.loss, float(self._polarisation), float(self._distillation)])
            self.result.loss, self.result.polarisation = loss, polarisation / world.size
            self.result.distillation = term
            self.result.grad_norm = outcome.grad_norm
        return self.result

    def forward(
        self,
        batch: dict[str, Tensor],
        items: float,
        carried: CarriedState | None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        """The model's output, whose loss is this batch's share of the mean over `items` tokens. options: further keywords of the call."""
        if self.watch is not None:
            self.watch.clear()
        inputs = {key: batch[key] for key in ("input_ids", "labels", "position_ids") if key in batch}
        options = {"num_items_in_batch": items, "return_logits": False} | (options or {})
        with self.autocast():
            if carried is None:
                return self.spread.call(**inputs, use_cache=False, **options)
            cache = carried.before(self.spread.call, batch)
            output = self.spread.call(**inputs, past_key_values=cache, use_cache=True, **options)
        carried.after(output.past_key_values)
        return output

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.device.type == "cpu":
            return batch
        return {key: x.to(self.device, non_blocking=True) for key, x in batch.items()}

    @torch.no_grad()
    def evaluate(self, batches) -> tuple[float, int]:
        """Mean loss over all processes' batches, and the number of its tokens. Carries memory as training does."""
        carried = CarriedState() if self.config.data.carry_state else None
        total, count = 0.0, 0.0
        for raw in batches:
            batch = self.to_device(raw)
            count += predicted_tokens(batch)
            total += float(self.forward(batch, 1.0, carried).loss)
        total, count = self.spread.world.sum([total, count])
        return (total / count if count else math.nan), int(count)
