"""Divergence: steps without a finite loss are skipped and counted; a run whose loss diverges returns to a checkpoint."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from .config import CheckpointConfig
from .loop import Verdict


class TrainingFailed(RuntimeError):
    """A run that cannot continue; the message names the reason and a remedy."""


SMOOTHING = 0.1  # weight of the newest loss: an average over about ten steps


@dataclass
class DivergenceGuard:
    """Counts bad steps and rollbacks, and smooths the loss. Saved in checkpoints; bad_steps, rollbacks and lr_factor survive a rollback.

    >>> guard = DivergenceGuard()
    >>> [guard.see(loss, CheckpointConfig(bad_steps=2)) for loss in (2.0, math.nan, math.nan)]
    ['good', 'skip', 'back']
    """

    smoothed: float | None = None
    lowest: float | None = None
    bad_in_a_row: int = 0
    bad_steps: int = 0
    rollbacks: int = 0
    lr_factor: float = 1.0

    def see(self, loss: float, config: CheckpointConfig) -> Verdict:
        """Returns "good" (update the weights), "skip" (do not) or "back" (return to the last good checkpoint)."""
        if not math.isfinite(loss):
            self.bad_in_a_row += 1
            self.bad_steps += 1
            return "back" if self.bad_in_a_row >= config.bad_steps else "skip"
        self.bad_in_a_row = 0
        self.smoothed = loss if self.smoothed is None else self.smoothed + SMOOTHING * (loss - self.smoothed)
        self.lowest = self.smoothed if self.lowest is None else min(self.lowest, self.smoothed)
        return "back" if self.spiked(config) else "good"

    def spiked(self, config: CheckpointConfig) -> bool:
        if not config.spike or self.smoothed is None or self.lowest is None:
            return False
        return self.smoothed > self.lowest + config.spike

    @property
    def healthy(self) -> bool:
        """Whether a rollback may return to a checkpoint written now."""
        return self.bad_in_a_row == 0

    def rolled_back(self, saved: dict, config: CheckpointConfig) -> None:
        """Restore the smoothed loss of the checkpoint; count the rollback and lower the learning rate."""
        self.smoothed, self.lowest = saved.get("smoothed"), saved.get("lowest")
        self.bad_in_a_row = 0
        self.rollbacks += 1
        self.lr_factor *= config.rollback_lr

    def state(self) -> dict:
        return asdict(self)
