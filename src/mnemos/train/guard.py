"""Watches the loss: steps without a finite one are skipped and counted, a run that diverges is sent back."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from .config import CheckpointConfig
from .loop import Verdict


class TrainingFailed(RuntimeError):
    """A run that cannot go on; the message says why and what to do."""


SMOOTHING = 0.1  # of the loss: about ten steps


@dataclass
class Guard:
    """The counters of a run; part of its checkpoints, but for the ones that must outlive a rollback.

    >>> guard = Guard()
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
        """ "good": take the step; "skip": do not; "back": go to the last good checkpoint."""
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
        """Whether a checkpoint of this moment is one to go back to."""
        return self.bad_in_a_row == 0

    def went_back(self, saved: dict, config: CheckpointConfig) -> None:
        """Take the loss's history of the checkpoint; what counts trouble goes on."""
        self.smoothed, self.lowest = saved.get("smoothed"), saved.get("lowest")
        self.bad_in_a_row = 0
        self.rollbacks += 1
        self.lr_factor *= config.rollback_lr

    def state(self) -> dict:
        return asdict(self)
