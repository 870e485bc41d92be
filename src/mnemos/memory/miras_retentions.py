"""Retentions of Miras whose weights are a function of an accumulator A."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .retention import TransformedRetention, register_retention

MAX_Q = 8.0
SPREAD = 2.0  # standard deviation of initial logits: uniform weights would make all hidden units alike


@register_retention
class Lq(TransformedRetention):
    """Moneta's (eqs. 24 and 25): W = A / ‖A‖_q^(q-2), for each matrix by itself; q = 2 leaves A as it is. Derived for 1 < q <= 2; Moneta's 4 is empirical.

    floor: the smallest norm that A is divided by. For q > 3 the weights grow while the accumulator shrinks (‖W‖_q = ‖A‖_q^(3-q)), and
    with them the steps: on long streams that diverges (docs/log.md). floor=1 normalises large accumulators only.
    The learned W0 is divided by its norm, so that W = A = W0 / ‖W0‖_q before the first token.

    >>> A = 2 * torch.ones(1, 2, 2)
    >>> Lq(q=4).weights(A)[0, 0]  # the 4-norm of A is 2^1.5
    tensor([0.2500, 0.2500])
    """

    name = "lq"

    def __init__(self, q: float = 4.0, floor: float = 1e-6):
        if not 2 <= q <= MAX_Q:
            raise ValueError(f"retention='lq' needs q from 2 to {MAX_Q:g}, not {q}")
        if not floor > 0:
            raise ValueError(f"retention='lq' needs floor > 0, not {floor}")
        self.q, self.floor = q, floor
        self.description = f"L{q:g} norm" + (f" from {floor:g}" if floor > 1e-3 else "")

    def weights(self, A: Tensor) -> Tensor:
        return A / self._norm(A, self.floor) ** (self.q - 2)

    def initial(self, W0: Tensor) -> Tensor:
        return W0 / self._norm(W0, 1e-6)

    def _norm(self, A: Tensor, floor: float) -> Tensor:
        return torch.linalg.vector_norm(A, self.q, dim=(-2, -1), keepdim=True).clamp(min=floor)


@register_retention
class KL(TransformedRetention):
    """Memora's (eqs. 21 and 27): W = scale · softmax(A) over the inputs of each output, A = log W up to a constant: forgetting is a KL divergence, and retain moves
    the weights towards uniform. All weights are positive and sum to `scale`. The learned W0 holds the logits, brought to one spread.

    >>> KL(scale=3).weights(torch.zeros(1, 6, 2))[0, 0].tolist()
    [0.5, 0.5]
    """

    name = "kl"
    description = "KL (softmax of logits)"

    def __init__(self, scale: float = 4.0):
        if not scale > 0:
            raise ValueError(f"retention='kl' needs scale > 0, not {scale}")
        self.scale = scale

    def weights(self, A: Tensor) -> Tensor:
        return self.scale * A.softmax(-2)

    def initial(self, W0: Tensor) -> Tensor:
        return SPREAD * W0 / W0.square().mean((-2, -1), keepdim=True).clamp(min=1e-12).sqrt()

    def lr_scale(self, shapes: tuple[tuple[int, int], ...]) -> float:
        """A step of logits moves a weight in proportion to it: scale / d_in on average."""
        return math.prod(d_in for d_in, _ in shapes) ** (1 / len(shapes)) / self.scale
