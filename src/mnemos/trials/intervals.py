"""Means over seeds, with confidence intervals."""

from __future__ import annotations

import math


def student_t(level: float, freedom: int) -> float:
    """Half the width of a two-sided confidence interval of a mean, in standard errors: the quantile of Student's t.

    With t = √ν tan θ the density becomes a power of cos θ, whose integral Simpson's rule gives to ten digits.

    >>> [round(student_t(0.95, n), 3) for n in (1, 2, 4, 1000)]
    [12.706, 4.303, 2.776, 1.962]
    """
    if not 0 < level < 1 or freedom < 1:
        raise ValueError(f"level={level} must lie between 0 and 1 and freedom={freedom} be at least 1")
    scale = 2 * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if scale * _power_of_cosine(freedom - 1, middle) < level else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _power_of_cosine(power: int, end: float, pieces: int = 400) -> float:
    """The integral of cos(θ)^power from 0 to `end`."""
    step = end / pieces
    values = [math.cos(i * step) ** power for i in range(pieces + 1)]
    return step / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))


def interval(values: list[float], level: float = 0.95) -> tuple[float, float | None]:
    """Mean, and half the width of its confidence interval; None for a single value.

    >>> mean, half = interval([1.0, 2.0, 3.0])
    >>> mean, round(half, 3)
    (2.0, 2.484)
    """
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    spread = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
    return mean, student_t(level, len(values) - 1) * spread / math.sqrt(len(values))
