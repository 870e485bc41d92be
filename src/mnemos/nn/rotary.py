"""Rotary positions: queries and keys are rotated by angles proportional to their positions, so that scores depend on distances.

Shapes: B batch, T time, H heads, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotary_table(
    positions: Tensor, dim: int, theta: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of positions (B, T): two (B, T, 1, dim/2). Pair i rotates by theta^(-2i/dim) per token.

    Angles are computed in float64, so that position ten million is as exact as position ten; dtype is float32 or wider.

    >>> cos, sin = rotary_table(torch.tensor([[0, 10_000_000]]), dim=8)
    >>> cos.shape, bool(torch.allclose(cos[0, 1, 0, 0].double(), torch.tensor(1e7, dtype=torch.float64).cos()))
    (torch.Size([1, 2, 1, 4]), True)
    """
    home = positions.device
    if home.type == "mps":  # has no float64
        positions = positions.cpu()
    steps = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device)
    angle = positions.unsqueeze(-1) * torch.exp(steps * (-math.log(theta) / dim))  # B T D/2
    angle = angle.unsqueeze(2)
    return angle.cos().to(home, dtype), angle.sin().to(home, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + D/2}) of x (B, T, H, D) by the angles of a `rotary_table`. Position 0 is no rotation.

    >>> x = torch.randn(2, 3, 4, 8)
    >>> torch.equal(rotate(x, *rotary_table(torch.zeros(2, 3), 8)), x)
    True
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def apply_rotary(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """x (B, T, H, D) rotated by its positions (B, T), computed in float32 or wider and returned in the dtype of x.

    >>> x = torch.randn(1, 2, 1, 8, dtype=torch.float64)
    >>> near = apply_rotary(x, torch.tensor([[3, 5]]))
    >>> far = apply_rotary(x, torch.tensor([[1003, 1005]]))
    >>> near.dtype, torch.allclose(near[:, 0] @ near[:, 1].mT, far[:, 0] @ far[:, 1].mT)
    (torch.float64, True)
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x has {x.shape[-1]} features per head, but rotary positions need an even number")
    return rotate(x, *rotary_table(positions, x.shape[-1], theta, torch.promote_types(x.dtype, torch.float32)))
