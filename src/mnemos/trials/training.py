"""The loop that trains a small model for a trial: AdamW, a warm-up, a cosine, clipped gradients, nothing written anywhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..train.config import OptimConfig, ScheduleConfig
from ..train.guard import not_finite
from ..train.optimisers import Optimisers
from ..train.schedules import lr_factor

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Course:
    """steps: of the optimiser. lr: its peak. batch(step): ids and labels (B, T), as transformers' models take them. start_lr: see `OptimConfig`."""

    steps: int
    lr: float
    batch: Callable[[int], Batch]
    clip: float = 1.0
    start_lr: float = OptimConfig.start_lr


def train(model: nn.Module, course: Course) -> dict[str, Any]:
    """Train in place; the last loss, steps whose loss or gradient was not finite (they are skipped), and the seconds.

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("swa", hidden_size=16, num_hidden_layers=1, vocab_size=16))
    >>> import torch
    >>> ids = torch.arange(16)[None]
    >>> train(model, Course(2, 1e-3, lambda step: (ids, ids)))["bad_steps"]
    0
    """
    model.train()
    optimisers = Optimisers(model, OptimConfig(lr=course.lr, start_lr=course.start_lr))
    begin, cpu, bad, loss = time.perf_counter(), time.process_time(), 0, math.nan
    for step in range(course.steps):
        ids, labels = course.batch(step)
        optimisers.set_factor(lr_factor(ScheduleConfig(), step, course.steps))
        try:
            found = model(ids, labels=labels).loss
        except ValueError as error:
            if not not_finite(error):
                raise
            bad += 1
            continue
        optimisers.zero_grad()
        found.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), course.clip)
        if not (found.isfinite() and norm.isfinite()):
            bad += 1
            continue
        optimisers.step()
        loss = found.item()
    model.eval()
    return {
        "train_loss": loss,
        "bad_steps": bad,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
    }
