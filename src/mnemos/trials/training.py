"""Trains a small model for a trial: AdamW, warm-up, cosine schedule, clipped gradients. Writes no files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..train.config import OptimConfig, ScheduleConfig
from ..train.loop import BatchLoss, Loop, Outcome
from ..train.optimisers import Optimisers
from ..train.schedules import lr_factor

InputsAndLabels = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TrialConfig:
    """The config of one training.

    steps: number of optimiser steps. lr: peak learning rate. batch(step): ids and labels (B, T) for a transformers model.
    clip: largest gradient norm. w0_lr_scale: see `OptimConfig`.
    """

    steps: int
    lr: float
    batch: Callable[[int], InputsAndLabels]
    clip: float = 1.0
    w0_lr_scale: float = OptimConfig.w0_lr_scale


def train(model: nn.Module, trial: TrialConfig) -> dict[str, Any]:
    """Train in place. Returns the last loss, the number of steps without a finite loss or gradient (these are skipped), and the seconds.

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("swa", hidden_size=16, num_hidden_layers=1, vocab_size=16))
    >>> import torch
    >>> ids = torch.arange(16)[None]
    >>> train(model, TrialConfig(2, 1e-3, lambda step: (ids, ids)))["bad_steps"]
    0
    """
    model.train()
    optimisers = Optimisers(model, OptimConfig(lr=trial.lr, w0_lr_scale=trial.w0_lr_scale))
    begin, cpu, losses = time.perf_counter(), time.process_time(), []

    def loss(batch: InputsAndLabels) -> BatchLoss:
        found = model(batch[0], labels=batch[1]).loss
        return BatchLoss(found, found.detach())

    def note(step: int, outcome: Outcome) -> None:
        if outcome.verdict == "good":
            losses.append(outcome.loss)

    Loop(
        optimisers,
        lambda step: [trial.batch(step)],
        loss,
        lambda step: lr_factor(ScheduleConfig(), step, trial.steps),
        trial.clip,
        progress=note,
    ).run(range(trial.steps))
    model.eval()
    return {
        "train_loss": losses[-1] if losses else math.nan,
        "bad_steps": trial.steps - len(losses),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
    }
