"""The numbers of a suite that a comparison of models shows: one or two per suite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Headline:
    """One number of a model. is_share: shown in per cent. higher: whether a higher number is better."""

    name: str
    value: float
    higher: bool
    is_share: bool = False

    def text(self) -> str:
        """The number as shown.

        >>> Headline("recall", 0.5, True, True).text(), Headline("perplexity", 12.345, False).text()
        ('50.0 %', '12.35')
        """
        if self.is_share:
            return f"{100 * self.value:.1f} %"
        return f"{self.value:,.0f}" if abs(self.value) >= 1000 else f"{self.value:.4g}"


Choose = Callable[[Rows], list[Headline]]


def perplexity(rows: Rows) -> list[Headline]:
    """Bits per byte, or perplexity without bytes; and the gain from learning at test time.

    >>> row = {"what": "all tokens", "perplexity": 4.0}
    >>> [h.value for h in perplexity([row | {"memory": "learning"}, row | {"memory": "frozen", "perplexity": 5.0}])]
    [4.0, 0.19999999999999996]
    """
    whole = {row["memory"]: row for row in rows if row.get("what") == "all tokens"}
    learning = whole.get("learning") or whole.get("-")
    if learning is None:
        return []
    name = "perplexity" if learning.get("bits_per_byte") is None else "bits_per_byte"
    found = [Headline(name.replace("_", " "), learning[name], False)]
    if "frozen" in whole:
        gain = 1 - learning["perplexity"] / whole["frozen"]["perplexity"]
        found.append(Headline("learning gain", gain, True, True))
    return found


def mean_of(name: str, *columns: str) -> Choose:
    """The mean over all rows of the first of these columns that a row has."""

    def choose(rows: Rows) -> list[Headline]:
        values = [next((row[c] for c in columns if row.get(c) is not None), None) for row in rows]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        return [Headline(name, sum(numbers) / len(numbers), True, True)] if numbers else []

    return choose


def at_most(name: str, by: str, column: str, higher: bool = True, is_share: bool = True) -> Choose:
    """A column in the row with the largest `by`; {} in the name is that largest value."""

    def choose(rows: Rows) -> list[Headline]:
        known = [row for row in rows if row.get(column) is not None]
        if not known:
            return []
        last = max(known, key=lambda row: row[by])
        return [Headline(name.format(f"{last[by]:,}"), float(last[column]), higher, is_share)]

    return choose


def best_of(headlines: list[Headline]) -> float | None:
    """The best value of one headline over models; None if fewer than two are finite, or all are equal."""
    finite = [h.value for h in headlines if math.isfinite(h.value)]
    if len(set(finite)) < 2:
        return None
    return max(finite) if headlines[0].higher else min(finite)
