"""Shared by both kinds of attention: projections to heads with norms, rotary positions, and one call of SDPA.

Rotary positions turn queries and keys by angles proportional to their positions, so that scores depend on distances.

Shapes: B batch, T time, S keys, H query heads, G key-value heads, D head dim, C = (H + 2G) D channels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import RowCache
from .conv import CausalConv1d
from .linear import Linear
from .norm import RMSNorm, rms_norm

Table = tuple[Tensor, Tensor]  # cos and sin, as `rotary_table` returns them


class Heads(nn.Module):
    """Projections of attention: `qkv` holds the maps to queries, keys and values, `out` the map from the heads to dim.

    conv: a causal depthwise convolution over the channels of queries, keys and values, before norms and rotary positions; None if
    conv_width is 0. Without one, a token's key does not depend on the token before it.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        qk_norm: bool = True,
        rope_theta: float = 10000.0,
        eps: float = 1e-6,
        conv_width: int = 0,
    ):
        super().__init__()
        if heads < 1 or (head_dim is None and dim % heads):
            raise ValueError(f"heads={heads} must divide dim={dim}, or give head_dim")
        self.dim, self.heads = dim, heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.kv_heads = heads if kv_heads is None else kv_heads
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs of features")
        if self.kv_heads < 1 or heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={heads}")
        if conv_width < 0:
            raise ValueError(f"conv_width={conv_width} must be >= 0; 0 is no convolution")
        self.rope_theta, self.eps = rope_theta, eps
        channels = (heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(dim, channels, bias=False)
        self.conv = CausalConv1d(channels, conv_width) if conv_width else None
        self.out = Linear(heads * self.head_dim, dim, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps) if qk_norm else None

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Table:
        """The rotary table of positions (B or 1, T) for tensors of this dtype."""
        return rotary_table(positions, self.head_dim, self.rope_theta, torch.promote_types(dtype, torch.float32))

    def project(
        self, x: Tensor, angles: Table, tail: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x (B, T, dim) -> q (B, T, H, D), k and v (B, T, G, D), with q and k rotated by these angles, and the new tail."""
        mixed, tail = self.convolve(self.qkv(x), tail, mask)
        return *self.split_heads(mixed, angles), tail

    def convolve(
        self, mixed: Tensor, tail: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The convolution of mixed (B, T, C), the output of `qkv`, and its new tail; mixed itself and None without a convolution.

        tail: (B, conv_width - 1, C), the outputs of `qkv` just before; None at the beginning of a row. mask: (B, T) bool, valid tokens.
        """
        return (mixed, None) if self.conv is None else self.conv(mixed, tail, mask)

    def split_heads(self, mixed: Tensor, angles: Table) -> tuple[Tensor, Tensor, Tensor]:
        """mixed (B, T, C) -> q (B, T, H, D), k and v (B, T, G, D): q and k normed and rotated by these angles."""
        qk, v = self._split(mixed, self.heads + self.kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            weight = torch.cat(
                (self.q_norm.weight.expand(self.heads, -1), self.k_norm.weight.expand(self.kv_heads, -1))
            )
            qk = rms_norm(qk, weight, self.eps)
        q, k = rotate(qk, *angles).split((self.heads, self.kv_heads), dim=2)
        return q, k, v

    def project_keys(self, x: Tensor, angles: Table | None = None) -> tuple[Tensor, Tensor]:
        """x (B, T, dim) -> k, v (B, T, G, D), without the convolution, with k rotated by these angles, if any."""
        k, v = self._split(F.linear(x, self.qkv.weight[self.heads * self.head_dim :]), self.kv_heads)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return (k if angles is None else rotate(k, *angles)), v

    def _split(self, x: Tensor, before: int) -> tuple[Tensor, Tensor]:
        parts = x.unflatten(-1, (-1, self.head_dim)).split((before, self.kv_heads), dim=2)
        return parts[0], parts[1]

    def check(self, x: Tensor, mask: Tensor | None, cache: RowCache | None, kind: type[RowCache]) -> None:
        """Raise a ValueError for arguments that do not fit this layer."""
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != self.dim or 0 in x.shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"x has shape {got}, but (batch, time, dim={self.dim}) with at least one token is expected"
            )
        if mask is not None and (mask.shape != x.shape[:2] or mask.dtype != torch.bool):
            raise ValueError(
                f"mask has shape {tuple(mask.shape)} and type {mask.dtype}, but bool {tuple(x.shape[:2])} is expected"
            )
        if cache is None:
            return
        if not isinstance(cache, kind):
            raise ValueError(f"cache is a {type(cache).__name__}, but must be the {kind.__name__} of an earlier call")
        if cache.batch != x.shape[0]:
            raise ValueError(f"cache has {cache.batch} batch rows, but x has {x.shape[0]}; use cache.select([...])")
        if cache.position.device != x.device:
            raise ValueError(f"cache is on {cache.position.device}, but x is on {x.device}; use cache.to(...)")

    def check_tail(self, tail: Tensor | None, batch: int) -> None:
        """Raise a ValueError for a tail that is not of this layer's convolution."""
        found = None if tail is None else tuple(tail.shape)
        expected = None if self.conv is None else (batch, self.conv.width - 1, self.conv.channels)
        if found != expected:
            raise ValueError(f"cache has a convolution tail of shape {found}, but {expected} is expected")

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, head_dim={self.head_dim}, kv_heads={self.kv_heads}"


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Softmax attention, sequence-first: q (B, T, H, D), k and v (B, S, G, D) -> (B, T, H, D).

    mask: bool, True where a query sees a key, (T, S) or (B, 1, T, S). causal: query t sees keys 0..t.

    >>> q, k, v = torch.randn(3, 2, 5, 4, 8)
    >>> torch.allclose(attend(q, k, v, causal=True)[:, 0], v[:, 0])
    True
    """
    dtype = torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype))
    y = F.scaled_dot_product_attention(
        q.to(dtype).transpose(1, 2),
        k.to(dtype).transpose(1, 2),
        v.to(dtype).transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return y.transpose(1, 2).to(q.dtype)


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
