"""Summary of the cells: means over seeds with confidence intervals, and differences to the full model."""

from __future__ import annotations

from typing import Any

from ..trials.intervals import interval
from .grid import FULL


def summary(results: list[dict[str, Any]], level: float = 0.95) -> list[dict[str, Any]]:
    """One row per ablation, in order of appearance: score with interval, and difference to the full model with interval.

    Differences are taken per seed, because a seed has the same batches in both; compare ablations by the interval of the difference.
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
