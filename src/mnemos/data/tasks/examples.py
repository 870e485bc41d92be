"""Examples of a task over token ids: inputs, and labels at the positions that are scored.

Shapes: N examples, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..labels import IGNORED


class Examples(NamedTuple):
    """inputs and labels (N, T), int64. labels[t] is the target of the logits at position t; -100 is not scored.

    >>> Examples(np.array([[1, 2]]), np.array([[-100, 7]])).for_language_model()[1].tolist()
    [[-100, -100, 7]]
    """

    inputs: np.ndarray
    labels: np.ndarray

    def for_language_model(self, filler: int = 0) -> Examples:
        """Labels in the convention of transformers' models, which shift them by one: (N, T+1) both, with a filler token at the end."""
        N = len(self.inputs)
        inputs = np.concatenate([self.inputs, np.full((N, 1), filler)], axis=1)
        labels = np.concatenate([np.full((N, 1), IGNORED), self.labels], axis=1)
        return Examples(inputs, labels)

    def answers(self) -> np.ndarray:
        """The number of scored positions of each example: (N,)."""
        return (self.labels != IGNORED).sum(1)


def whole(name: str, value, least: int) -> int:
    """`value`; raises a ValueError unless it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number >= {least}")
    return int(value)


def fraction(name: str, value: float) -> float:
    """`value`; raises a ValueError unless it lies in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value!r} must be >= 0 and < 1")
    return float(value)
