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


def convolved(layer, x: Tensor) -> list[Tensor]:
    """The projections (channels,) of every token of a row x (T, dim), each a weighted sum with those just before it."""
    raw = [layer.qkv.weight @ token for token in x]
    if layer.conv is None:
        return raw
    return [
        sum((w * raw[t - lag] for lag, w in enumerate(layer.conv.weight.flip(0)) if lag <= t), torch.zeros_like(raw[t]))
        for t in range(len(raw))
    ]


def heads_of(layer, mixed: Tensor, position: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (heads, D) of one token's projections (channels,)."""
    H, G, D = layer.heads, layer.kv_heads, layer.head_dim
    q, k, v = mixed.split([H * D, G * D, G * D])
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
    tokens = [heads_of(layer, mixed, None if t < P else t - P) for t, mixed in enumerate(convolved(layer, x))]
    outputs = []
    for t in range(len(x)):
        near = range(0 if layer.window is None else max(P, t - layer.window + 1), t + 1)
        seen = [j for j in range(t + 1) if j < P or j in near]
        outputs.append(look(layer, tokens[t][0], [tokens[j][1] for j in seen], [tokens[j][2] for j in seen]))
    return torch.stack(outputs)


def naive_segments(layer, x: Tensor, retrieved: Tensor, longterm: Tensor, persistent: int = 0) -> Tensor:
    """x, retrieved (P + T, dim), one row; longterm (segments, N, dim) -> (P + T, dim). The convolution is over x alone."""
    P, L, W = persistent, layer.segment_len, layer.qkv.weight
    row = convolved(layer, x)
    fixed = [heads_of(layer, row[t], None) for t in range(P)]
    outputs = []
    for t in range(P):
        seen = fixed[: t + 1]
        outputs.append(look(layer, fixed[t][0], [s[1] for s in seen], [s[2] for s in seen]))
    for t in range(P, len(x)):
        segment, i = divmod(t - P, L)
        begin = t - i
        seen = fixed + [heads_of(layer, W @ token, None) for token in longterm[segment]]
        seen = seen + [heads_of(layer, W @ retrieved[begin + j], j) for j in range(i + 1)]
        seen = seen + [heads_of(layer, row[begin + j], j) for j in range(i + 1)]
        outputs.append(look(layer, heads_of(layer, row[t], i)[0], [s[1] for s in seen], [s[2] for s in seen]))
    return torch.stack(outputs)


def naive_qk_projection(layer, q: Tensor, k: Tensor, gate: Tensor) -> Tensor:
    """q, k (T, H, D), gate (T, H), one row -> (T, H, D), with every M_t built."""
    T, H, D = q.shape
    y = torch.empty_like(q)
    unit = layer.normalise == "per_key"

    def outer(key: Tensor) -> Tensor:
        return torch.outer(key, key) / ((key @ key + layer.eps) if unit else 1.0)

    for h in range(H):
        decay = 1.0 if layer.decay is None else 1 / (1 + (1 / layer.decay - 1) * torch.exp(-layer.decay_offset[h]))
        keys = [] if layer.persistent_keys is None else list(layer.persistent_keys[h])
        for t in range(T):
            M = sum((outer(p) for p in keys), torch.zeros(D, D, dtype=q.dtype))
            norm = sum((p @ p for p in keys), torch.zeros((), dtype=q.dtype))
            for i in range(0 if layer.window is None else max(0, t - layer.window + 1), t + 1):
                weight = decay ** (t - i) * gate[i, h]
                M = M + weight * outer(k[i, h])
                norm = norm + weight * (k[i, h] @ k[i, h])
            y[t, h] = M @ q[t, h] / (1.0 if unit else norm + layer.eps)
    return y
