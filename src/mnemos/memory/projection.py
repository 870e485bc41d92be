"""From the mixed projection of a layer to the heads of q, k and v: causal convolution, SiLU, norms.

Shapes: B batch, T time, C channels (of all heads of q, k and v), H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import operation
from ..nn.checkpoint import recomputed
from ..nn.conv import causal_conv

Norms = tuple[tuple[float, float], ...]  # for q, k and v: alpha and epsilon of s / sqrt(alpha Σ s² + epsilon)


@operation
def project_heads(
    x: Tensor, tail: Tensor | None, weight: Tensor | None, heads: int, dims: tuple[int, ...], norms: Norms
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x (B, T, C) -> q, k, v (B, T, H, ·), and the convolution's new tail.

    tail (B, width-1, C) and weight (width, C) of the convolution, or None and None. dims: of a head's q, k and v.
    """
    if weight is not None:
        x, tail = causal_conv(x, weight, tail)
    return *activate(x, heads, dims, norms), tail


def activate(
    x: Tensor, heads: int, dims: tuple[int, ...], norms: Norms, pairs: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """SiLU and norms: x (B, T, C) -> q, k, v (B, T, H, ·). Elementwise work, cheaper to recompute than to keep.

    pairs: of keys and values of a head, each with a norm of its own.
    """

    def function(x: Tensor) -> tuple[Tensor, ...]:
        parts = F.silu(x).split([heads * dim for dim in dims], dim=-1)
        counts = heads, heads * pairs, heads * pairs
        vectors = (part.unflatten(-1, (count, -1)) for part, count in zip(parts, counts))
        return tuple(_normalize(s, *norm).flatten(-2).unflatten(-1, (heads, -1)) for s, norm in zip(vectors, norms))

    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return recomputed(function, x)
    return function(x)  # ty: ignore[invalid-explicit-return]


def _normalize(s: Tensor, alpha: float, epsilon: float) -> Tensor:
    if alpha == 0.0:
        return s
    wide = s.to(torch.promote_types(s.dtype, torch.float32))
    return (wide * torch.rsqrt(alpha * wide.square().sum(-1, keepdim=True) + epsilon)).to(s.dtype)
