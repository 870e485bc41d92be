"""The retention of Memora (Miras, eqs. 21 and 27)."""

from __future__ import annotations

import math

from torch import Tensor

from .retention import TransformedRetention, register_retention

SPREAD = 2.0  # standard deviation of the initial logits: uniform weights would make all hidden units alike


@register_retention
class KL(TransformedRetention):
    """W = scale · softmax(A) over the inputs of each output, A = log W up to a constant: forgetting is a KL divergence, and retain moves
    the weights towards uniform. All weights are positive and sum to `scale`. The learned W0 holds the logits, brought to one spread.

    >>> import torch
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
