"""The inner loss of Moneta (Miras, eqs. 10 and 11)."""

from __future__ import annotations

from torch import Tensor

from .losses import InnerLoss, register_loss
from .smooth import smooth_abs

MAX_P = 8.0


@register_loss
class Lp(InnerLoss):
    """1/p Σ |output - value|^p with a smooth |x|: the gradient is |r|^(p-1) sign(r), without the factor p.

    >>> import torch
    >>> Lp(p=3).error(torch.tensor([[2.0, -0.5]]), torch.zeros(1, 2))
    tensor([[ 4.0000, -0.2500]])
    """

    name = "lp"
    of_difference = True

    def __init__(self, p: float = 3.0):
        if not 1 <= p <= MAX_P:
            raise ValueError(f"objective='lp' needs p from 1 to {MAX_P:g}, not {p}")
        self.p = p
        self.description = f"L{p:g}"

    def loss(self, output: Tensor, value: Tensor) -> Tensor:
        return (smooth_abs(output - value) ** self.p).sum(-1) / self.p

    def error(self, output: Tensor | None, value: Tensor) -> Tensor:
        assert output is not None
        r = output - value
        return r * smooth_abs(r) ** (self.p - 2)

    def max_curvature(self, error: float) -> float:
        return max(1.0, (self.p - 1) * error ** (self.p - 2)) if self.p > 2 else 1.0
