"""One optimiser step: forward, backward, the norm of the gradient. The same numbers for any number of processes or pieces."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .carry import Carried
from .config import TrainConfig
from .control import GateWatch
from .distributed import Spread, full
from .guard import TrainingFailed, not_finite
from .losses import polarisation_loss, predicted_tokens


@dataclass
class StepResult:
    """loss: mean over the step's predicted tokens, of all processes. tokens: read by all. waited: seconds for data."""

    loss: float
    polarisation: float
    grad_norm: float
    tokens: int
    waited: float
    stop: bool


class Stepper:
    """Runs forward and backward passes of one step over `accumulate` batches."""

    def __init__(self, spread: Spread, config: TrainConfig, batches: Iterator[dict[str, Tensor]], carried: Carried):
        self.spread, self.config, self.batches, self.carried = spread, config, batches, carried
        self.device = spread.world.device
        self.watch = GateWatch(spread.model) if config.loss.polarisation else None

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def run(self, parameters: list[nn.Parameter], polarisation: float, stop: bool) -> StepResult:
        """Leaves gradients, clipped. `stop` is whether this process wants to stop; the result says whether any does."""
        world, accumulate = self.spread.world, self.config.accumulate
        began = time.perf_counter()
        batches = [self.to_device(next(self.batches)) for _ in range(accumulate)]
        waited = time.perf_counter() - began
        items, rows, any_stop = world.sum(
            [
                float(sum(predicted_tokens(batch) for batch in batches)),
                float(sum(batch["input_ids"].numel() for batch in batches)),
                float(stop),
            ]
        )
        if not items:
            return StepResult(math.nan, 0.0, math.nan, int(rows), waited, any_stop > 0)
        try:
            total, polar = self._passes(batches, items, polarisation)
        except ValueError as error:
            if not not_finite(error):
                raise
            if (
                world.size > 1
            ):  # the others wait for us inside an exchange: there is no way back but the last checkpoint
                raise TrainingFailed(
                    f"process {world.rank}: {error}; go on from the last checkpoint with --resume"
                ) from None
            return StepResult(math.nan, 0.0, math.nan, int(rows), waited, any_stop > 0)
        clip = self.config.optim.clip or math.inf
        norm = full(torch.nn.utils.clip_grad_norm_(parameters, clip))
        loss_sum, polar_sum = world.sum([float(total), float(polar)])
        return StepResult(loss_sum, polar_sum / world.size, float(norm), int(rows), waited, any_stop > 0)

    def _passes(
        self, batches: list[dict[str, Tensor]], items: float, polarisation: float
    ) -> tuple[Tensor | float, Tensor | float]:
        """Forward and backward of every batch: this process's share of the loss, and how undecided its gates are."""
        accumulate = len(batches)
        total: Tensor | float = 0.0
        polar: Tensor | float = 0.0
        for i, batch in enumerate(batches):
            with self.spread.syncing(last=i == accumulate - 1):
                loss = self.forward(batch, items, self.carried if self.config.data.carry_state else None)
                total = total + loss.detach()
                objective = loss * self.spread.gradient_scale
                if self.watch is not None and polarisation and self.watch.values:
                    undecided = polarisation_loss(list(self.watch.values.values())) / accumulate
                    polar = polar + undecided.detach()
                    objective = objective + polarisation * undecided
                objective.backward()
        return total, polar

    def forward(self, batch: dict[str, Tensor], items: float, carried: Carried | None) -> Tensor:
        """This batch's share of the mean over `items` tokens."""
        if self.watch is not None:
            self.watch.clear()
        inputs = {key: batch[key] for key in ("input_ids", "labels", "position_ids") if key in batch}
        with self.autocast():
            if carried is None:
                return self.spread.call(**inputs, num_items_in_batch=items, use_cache=False, return_logits=False).loss
            cache = carried.before(self.spread.call, batch)
            output = self.spread.call(
                **inputs, past_key_values=cache, num_items_in_batch=items, use_cache=True, return_logits=False
            )
        carried.after(output.past_key_values)
        return output.loss

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.device.type == "cpu":
            return batch
        return {key: x.to(self.device, non_blocking=True) for key, x in batch.items()}

    @torch.no_grad()
    def evaluate(self, batches) -> tuple[float, int]:
        """Mean loss over all processes' batches, and how many tokens it is over. Carries memory as training does."""
        carried = Carried() if self.config.data.carry_state else None
        total, count = 0.0, 0.0
        for raw in batches:
            batch = self.to_device(raw)
            count += predicted_tokens(batch)
            total += float(self.forward(batch, 1.0, carried))
        total, count = self.spread.world.sum([total, count])
        return (total / count if count else math.nan), int(count)
