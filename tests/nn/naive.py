"""Attention by its definition: one query at a time, one softmax over the keys it may see. Written apart from the library."""

from __future__ import annotations

import torch
from torch import Tensor

f64 = torch.float64


def some(*shape: int, seed: int = 0, dtype=f64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """x (H, D) turned as complex numbers."""
    half = x.shape[-1] // 2
    z = torch.complex(x[:, :half], x[:, half:])
    angle = position * theta ** (-torch.arange(half, dtype=f64) / half)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)


def heads_of(layer, x: Tensor, position: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (heads, D) of one token x (dim,)."""
    H, G, D = layer.heads, layer.kv_heads, layer.head_dim
    q, k, v = (layer.qkv.weight @ x).split([H * D, G * D, G * D])
    q, k, v = q.view(H, D), k.view(G, D), v.view(G, D)
    if layer.q_norm is not None:
        q = q / (q.pow(2).mean(-1, keepdim=True) + layer.eps).sqrt() * layer.q_norm.weight
        k = k / (k.pow(2).mean(-1, keepdim=True) + layer.eps).sqrt() * layer.k_norm.weight
    if position is not None:
        q, k = turned(q, position, layer.rope_theta), turned(k, position, layer.rope_theta)
    return q, k, v


def look(layer, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query (H, D) over the keys and values it sees -> (dim,)."""
    group = layer.heads // layer.kv_heads
    k, v = (torch.stack(x, 1).repeat_interleave(group, 0) for x in (keys, values))  # H S D
    scores = (k @ q.unsqueeze(-1)).squeeze(-1) / layer.head_dim**0.5
    y = (scores.softmax(-1).unsqueeze(1) @ v).squeeze(1)
    return layer.out.weight @ y.flatten()


def naive_attention(layer, x: Tensor, persistent: int = 0) -> Tensor:
    """x (T, dim), one row, the persistent tokens first -> (T, dim)."""
    P = persistent
    tokens = [heads_of(layer, x[t], None if t < P else t - P) for t in range(len(x))]
    outputs = []
    for t in range(len(x)):
        near = range(0 if layer.window is None else max(P, t - layer.window + 1), t + 1)
        seen = [j for j in range(t + 1) if j < P or j in near]
        outputs.append(look(layer, tokens[t][0], [tokens[j][1] for j in seen], [tokens[j][2] for j in seen]))
    return torch.stack(outputs)
