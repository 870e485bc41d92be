"""Linear maps."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..dispatch import operation


@operation
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x (..., in), weight (out, in), bias (out,) -> (..., out)."""
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` that computes `linear`, for which backends may have a kernel.

    >>> import torch
    >>> Linear(8, 3)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 3])
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
