"""From cells to conclusions: means over seeds with confidence intervals, and differences to the full model."""

from __future__ import annotations

import math
from typing import Any

from .grid import FULL


def student_t(level: float, freedom: int) -> float:
    """How many standard errors either side of a mean hold the truth with probability `level`: the quantile of Student's t.

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
    """Mean, and half the width of its confidence interval; None for a single value, which has none.

    >>> mean, half = interval([1.0, 2.0, 3.0])
    >>> mean, round(half, 3)
    (2.0, 2.484)
    """
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    spread = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
    return mean, student_t(level, len(values) - 1) * spread / math.sqrt(len(values))


def summary(results: list[dict[str, Any]], level: float = 0.95) -> list[dict[str, Any]]:
    """A row per ablation, in the order in which they come: score and its interval, difference to the full model and its interval.

    Differences are taken seed by seed, for a seed's batches are the same in both; their interval tells more than the two intervals.
    """
    full = {r["seed"]: r["score"] for r in results if r["ablation"] == FULL and "score" in r}
    rows = []
    for name in dict.fromkeys(r["ablation"] for r in results):
        cells = [r for r in results if r["ablation"] == name]
        good = [r for r in cells if "score" in r]
        row: dict[str, Any] = {
            "ablation": name,
            "seeds": len(good),
            "failed": len(cells) - len(good),
            "errors": [r["error"] for r in cells if "error" in r],
            "scores": [r["score"] for r in good],
        }
        if good:
            row["score"], row["score_interval"] = interval(row["scores"], level)
            row["parameters"] = good[0]["parameters"]
            row["seconds"] = sum(r["seconds"] for r in good) / len(good)
            row["bad_steps"] = sum(r["bad_steps"] for r in good)
        pairs = [r["score"] - full[r["seed"]] for r in good if r["seed"] in full]
        if pairs and name != FULL:
            row["difference"], row["difference_interval"] = interval(pairs, level)
        rows.append(row)
    return rows
