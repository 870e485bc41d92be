"""Comparisons in which no bit may change, and the one excuse: rounding of products whose shapes depend on the tokens.

A mixture of experts multiplies the tokens of each expert together, so that other tokens change the shapes of products, and with them the
last bits of tokens that have nothing to do with them. A leak stays as large in float64; rounding becomes a billion times smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .caching import kind_of
from .probe import Probe, changes, difference
from .registry import Outcome, not_applicable, passed
from .subject import Subject

WIDE_LIMIT = 1e-12  # of the logits' standard deviation: what rounding does in float64
Pair = Callable[[Subject], tuple[Tensor, Tensor]]


@dataclass
class Exactness:
    """The comparisons of a check. rounded: the largest change that was rounding; unclear: the largest that may be."""

    probe: Probe
    rounded: float = 0.0
    unclear: float = 0.0

    def change(self, pair: Pair) -> float:
        """The difference of the two tensors of a pair; 0.0 if every bit is equal, or rounding alone differs."""
        found, expected = pair(self.probe.own)
        worst = changes(found, expected)
        if not worst or difference(found, expected) > self.probe.tolerance(self.probe.own):
            return worst
        if not self.probe.is_wide and self.probe.own.dtype != torch.float64:
            self.unclear = max(self.unclear, worst)
            return 0.0
        if difference(*pair(self.probe.wide)) > WIDE_LIMIT:
            return worst
        self.rounded = max(self.rounded, worst)
        return 0.0

    def outcome(self, good: str) -> Outcome:
        """The outcome of a check that found no change."""
        if self.unclear:
            text = f"logits change by {self.unclear:.1e} at most, which rounding in {kind_of(self.probe.own)} may explain: without a float64 copy this cannot be decided"
            return not_applicable(text, self.unclear, 0.0)
        if self.rounded:
            text = f"{good}; not to the bit, but to {WIDE_LIMIT:.0e} in float64: the shapes of its products depend on the tokens"
            return passed(text, self.rounded)
        return passed(good, 0.0, 0.0)
