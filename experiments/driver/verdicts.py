"""Claims, and what the rows say of them.

A claim in a config compares two kinds of rows, or asks for a level:

    {text: ..., paper: ..., value: accuracy, better: {model: deltanet}, worse: {model: swa}, where: {pairs: 16}, best: lr}
    {text: ..., value: accuracy, of: {model: [deltanet, titans]}, at_least: 0.99}

Rows of a comparison are matched by everything else that varies, seeds too, and their differences averaged. Who diverged has not reached a
level, and is not better.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mnemos.trials.intervals import interval

from .tables import Row, broken, matches, select, tuned

HOLDS, FAILS, NOISE, OPEN = "reproduced", "not reproduced", "within noise", "not run"
MARGIN = 0.05  # a difference that fewer than three pairs may claim: what seeds differ by in bits per byte
MARGIN_OF_SHARES = (
    0.25  # … in shares of right answers: whether a model sets out to learn in a short training depends on its seed
)


@dataclass(frozen=True)
class Verdict:
    """A claim, what was found, and the numbers behind it."""

    text: str
    paper: str
    found: str
    numbers: str


def verdicts(rows: list[Row], names: Iterable[str], claims: list[dict[str, Any]]) -> list[Verdict]:
    """One per claim, in their order."""
    return [_verdict(rows, list(names), claim) for claim in claims]


def _verdict(rows: list[Row], names: list[str], claim: dict[str, Any]) -> Verdict:
    value, lower = claim["value"], claim.get("lower", False)
    chosen = select(rows, claim.get("where"))
    kept = tuned(chosen, names, claim.get("best"), value, lower)
    lost = broken(chosen, kept, names, claim.get("best"), value)
    found, numbers = (_level if "of" in claim else _comparison)(kept, lost, names, claim, value, lower)
    return Verdict(claim["text"], claim.get("paper", "Mnemos"), found, numbers)


def _level(kept: list[Row], lost: list[Row], names: list[str], claim: dict, value: str, lower: bool) -> tuple[str, str]:
    """Every kind of row that is asked for has to reach the level at every point, on average over seeds; the numbers are the worst.
    Within noise: the interval over seeds holds the level."""
    wanted = claim.get("at_least", claim.get("at_most"))
    assert wanted is not None
    found, numbers, sign = [], [], 1 if "at_least" in claim else -1
    for combination in _each(claim["of"]):
        name = ", ".join(map(str, combination.values()))
        points: dict[tuple, list[float]] = {}
        for row in kept:
            if matches(row, combination):
                point = tuple(row.get(name) for name in names if name not in ("seed", claim.get("best")))
                points.setdefault(point, []).append(row[value])
        count = sum(matches(row, combination) for row in lost)
        if count:
            found.append(FAILS)
            numbers.append(f"{name} {count} diverged")
            continue
        if not points:
            return OPEN, ""
        found += [_reached(values, wanted, sign) for values in points.values()]
        worst = min(points.values(), key=lambda values: sign * interval(values)[0])
        mean, half = interval(worst)
        numbers.append(f"{name} {mean:.3f}" + ("" if half is None else f" ± {half:.3f}") + _count(worst, names))
    verdict = FAILS if FAILS in found else NOISE if NOISE in found else HOLDS
    return verdict, "; ".join(numbers)


def _reached(values: list[float], wanted: float, sign: int) -> str:
    mean, half = interval(values)
    if half and abs(mean - wanted) <= half:
        return NOISE
    return HOLDS if sign * mean >= sign * wanted else FAILS


def _count(values: list[float], names: list[str]) -> str:
    return f" (n = {len(values)})" if "seed" in names else ""


def _each(of: dict[str, Any]) -> list[dict[str, Any]]:
    name, values = next((item for item in of.items() if isinstance(item[1], list)), (None, [None]))
    return [of if name is None else of | {name: value} for value in values]


def _comparison(
    kept: list[Row], lost: list[Row], names: list[str], claim: dict, value: str, lower: bool
) -> tuple[str, str]:
    varying = {*claim["better"], *claim["worse"], claim.get("best")}
    shared = [name for name in names if name not in varying]

    def side(where: dict[str, Any]) -> dict[tuple, float]:
        return {tuple(row.get(name) for name in shared): row[value] for row in kept if matches(row, where)}

    better, worse = side(claim["better"]), side(claim["worse"])
    both = [point for point in better if point in worse]
    counts = [sum(matches(row, where) for row in lost) for where in (claim["better"], claim["worse"])]
    broke = f"{counts[0]} against {counts[1]} diverged" if any(counts) else ""
    if counts[0] > counts[1] and worse:
        return FAILS, broke
    if not both:
        return (HOLDS if better and counts[1] else OPEN), broke
    sign = -1 if lower else 1
    mean, half = interval([sign * (better[point] - worse[point]) for point in both])
    averages = [sum(side[point] for point in both) / len(both) for side in (better, worse)]
    margin = MARGIN_OF_SHARES if value.startswith(("accuracy", "recall")) else MARGIN
    noise = max(margin, half or 0.0) if len(both) < 3 else half or 0.0
    found = NOISE if abs(mean) <= noise else HOLDS if mean > 0 else FAILS
    plus_minus = "" if half is None else f" ± {half:.3f}"
    numbers = f"{averages[0]:.3f} against {averages[1]:.3f}; better by {mean:+.3f}{plus_minus} (n = {len(both)})"
    return found, f"{numbers}; {broke}" if broke else numbers
