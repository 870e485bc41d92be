"""Attention over a sliding window in plain torch: blocks of queries, each with the keys inside its windows.

The work grows with T x window. All blocks share one mask.
Shapes: B batch, T time, H query heads, G key-value heads, D head dim, P persistent, W window, N blocks, C block size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .heads import attend


def sliding_attention(q: Tensor, k: Tensor, v: Tensor, window: int, persistent: int = 0, block: int = 0) -> Tensor:
    """Token t sees tokens t-window+1..t and the first `persistent` ones, which see each other causally.

    q (B, T, H, D), k and v (B, T, G, D), the persistent tokens first and not counted by the window -> (B, T, H, D).
    block: queries per block, 0 for a size that depends on the window.

    >>> q, k, v = torch.randn(3, 1, 100, 2, 8)
    >>> y = sliding_attention(q, k, v, window=5)
    >>> torch.allclose(y[:, -1:], attend(q[:, -1:], k[:, -5:], v[:, -5:]), atol=1e-6)
    True
    """
    first = min(q.shape[1], persistent + window)  # these see all tokens before them
    y = attend(q[:, :first], k[:, :first], v[:, :first], causal=True)
    if first == q.shape[1]:
        return y
    rest = full_windows(
        q[:, first:], k[:, persistent:], v[:, persistent:], k[:, :persistent], v[:, :persistent], window, block
    )
    return torch.cat((y, rest), dim=1)


def full_windows(
    q: Tensor, k: Tensor, v: Tensor, persistent_k: Tensor, persistent_v: Tensor, window: int, block: int = 0
) -> Tensor:
    """Attention of the queries from position `window` on, whose windows lie within the given keys.

    q (B, R, H, D) at positions W..W+R-1; k, v (B, W+R, G, D) from position 0; persistent (B, P, G, D) -> (B, R, H, D).
    """
    B, R = q.shape[:2]
    W, P = window, persistent_k.shape[1]
    C = min(block or block_size(W), R)
    N, last = divmod(R, C)
    query = torch.arange(C, device=q.device).unsqueeze(1)
    key = torch.arange(-P, W + C, device=q.device)  # of a block, counted from W tokens before its first query
    mask = (key < 0) | ((key > query) & (key <= query + W))  # C P+W+C

    keys, values = reach(k, persistent_k, N, C, W), reach(v, persistent_v, N, C, W)
    blocks = q[:, : N * C].unflatten(1, (N, C)).flatten(0, 1)  # B*N C H D
    y = attend(blocks, keys, values, mask).unflatten(0, (B, N)).flatten(1, 2)
    if last == 0:
        return y
    keys, values = (torch.cat((p, x[:, N * C :]), 1) for p, x in ((persistent_k, k), (persistent_v, v)))
    return torch.cat((y, attend(q[:, N * C :], keys, values, mask[:last, : P + W + last])), dim=1)


def block_size(window: int) -> int:
    """Queries per block: half a window, which wastes a third of the scores (a whole one: half), within limits set by overhead."""
    return min(128, max(32, window // 2))


def reach(x: Tensor, persistent: Tensor, N: int, C: int, W: int) -> Tensor:
    """Tokens that each of N blocks sees: persistent, the W before it, its own C. (B, W+R, ...) -> (B*N, P+W+C, ...)."""
    B, P = persistent.shape[:2]

    def shifted(start: int, width: int) -> Tensor:
        return x[:, start : start + N * C].unflatten(1, (N, C))[:, :, :width]  # B N width G D

    parts = [shifted(start, min(C, W - start)) for start in range(0, W, C)]
    if P:
        parts.insert(0, persistent.unsqueeze(1).expand(B, N, *persistent.shape[1:]))
    return torch.cat((*parts, shifted(W, C)), dim=2).flatten(0, 1)
