"""Norms, computed in float32 or wider and returned in the dtype of the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..dispatch import operation


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@operation
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, gate: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last axis, times `weight`, times SiLU of `gate`, which has the shape of x.

    (..., D) -> (..., D), with a finite gradient at 0. weight: (D,), or as many of x's last axes as it has.

    >>> rms_norm(torch.tensor([3.0, 4.0])).square().mean().round(decimals=3)
    tensor(1.)
    """
    wide = _wide(x)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = (y if weight is None else y * weight).to(x.dtype)
    return y if gate is None else y * F.silu(gate)


@operation
def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(Σ x² + eps) over the last axis: a unit vector, or 0 with a finite gradient if x is 0.

    >>> l2_normalize(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` over the last axis with a learned scale per feature, initially 1.

    >>> RMSNorm(8)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
