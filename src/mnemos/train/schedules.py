"""Schedules, as functions of the step t of T: learning rate, λ of the polarisation loss, chunk size of the memory."""

from __future__ import annotations

import math

from .config import LossConfig, ScheduleConfig


def warmup_steps(config: ScheduleConfig, total: int) -> int:
    """`warmup` in steps; below 1 it is a fraction of all steps."""
    return min(total, round(config.warmup * total if config.warmup < 1 else config.warmup))


def lr_factor(config: ScheduleConfig, step: int, total: int) -> float:
    """Learning rate of step 0, 1, … total-1, as a fraction of the peak.

    >>> [round(lr_factor(ScheduleConfig("cosine", warmup=2), t, 10), 2) for t in (0, 1, 2, 9)]
    [0.5, 1.0, 1.0, 0.13]
    """
    warm = warmup_steps(config, total)
    if step < warm:
        return (step + 1) / warm
    if config.name == "constant":
        return 1.0
    begin = warm if config.name == "cosine" else max(warm, total - round(config.decay * total))
    if step < begin:
        return 1.0
    done = min(1.0, (step - begin) / max(1, total - begin))
    falling = (1 + math.cos(math.pi * done)) / 2 if config.name == "cosine" else 1 - done
    return config.final + (1 - config.final) * falling


def polarisation(config: LossConfig, step: int, total: int) -> float:
    """λ(t): 0 in the warm-up, λ0 for a fraction of the steps, then geometric decay to λ1 at the end.

    >>> config = LossConfig(polarisation=10, polarisation_end=0.1)
    >>> [round(polarisation(config, t, 10000), 3) for t in (0, 999, 5500, 10000)]
    [10, 10, 1.0, 0.1]
    """
    if not config.polarisation or step < config.polarisation_warmup:
        return 0.0
    hold = int(config.polarisation_hold * total)
    if step < hold:
        return config.polarisation
    end = config.polarisation / 100 if config.polarisation_end is None else config.polarisation_end
    return config.polarisation * (end / config.polarisation) ** ((step - hold) / max(1, total - hold))


def chunk_size(config: ScheduleConfig, step: int, total: int) -> int | None:
    """Chunk size of the memory at this step; None for the model's own.

    >>> config = ScheduleConfig(finish_chunk=8, finish_share=0.1)
    >>> [chunk_size(config, t, 100) for t in (0, 89, 90, 99)]
    [None, None, 8, 8]
    """
    if config.finish_chunk is None or step < total - round(config.finish_share * total):
        return None
    return config.finish_chunk
