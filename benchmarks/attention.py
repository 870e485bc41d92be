"""Sliding-window attention: block sizes against dense causal attention, and the time of one decoded token.

python benchmarks/attention.py [--length 4096] [--dim 256] [--heads 4]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from harness import machine, median, table, times
from mnemos.nn import Attention, QKProjection, SegmentAttention
from mnemos.nn.attention import block_size, sliding_attention
from mnemos.nn.heads import attend


def blocks(T: int, dim: int, heads: int) -> str:
    q, k, v = (torch.randn(1, T, heads, dim // heads, requires_grad=True) for _ in range(3))

    def forward_backward(function: Callable, **options) -> float:
        return median(times(lambda: function(q, k, v, **options).sum().backward(), runs=5)) * 1e3

    dense = forward_backward(attend, causal=True)
    rows = [["all", "dense causal", f"{dense:.0f}", "1.0"]]
    for window in (64, 256, 512, 1024):
        chosen = block_size(window)
        for block in sorted({window // 4, window // 2, window, 2 * window, chosen}):
            ms = forward_backward(sliding_attention, window=window, block=block)
            name = f"{block} (chosen)" if block == chosen else str(block)
            rows.append([str(window), name, f"{ms:.0f}", f"{dense / ms:.1f}"])
    return table(["window", "block", "forward + backward ms", "times as fast as dense"], rows)


@torch.no_grad()
def decoding(dim: int, heads: int) -> str:
    rows = []
    for window in (64, 512, None):
        layer = Attention(dim, heads, window)
        rows += [[f"attention, window {window}", str(n), f"{token_cost(layer, n):.0f}"] for n in (1, 1000, 10000)]
    layer = SegmentAttention(dim, heads, 128)
    rows += [["segments of 128", str(n), f"{token_cost(layer, n, twice=True):.0f}"] for n in (1, 1000, 10000)]
    layer = QKProjection(dim, heads)
    rows += [["Q-K projection", str(n), f"{token_cost(layer, n):.0f}"] for n in (1, 1000, 10000)]
    return table(["layer", "tokens before", "µs per token"], rows)


def token_cost(layer, before: int, twice: bool = False) -> float:
    """µs of one token after `before` others, written in place; twice: a layer that takes (x, retrieved)."""
    cache = None
    for part in torch.randn(1, before, layer.dim).split(128, 1):
        _, cache = layer(part, part, cache=cache) if twice else layer(part, cache)
    if hasattr(cache, "inplace"):
        cache.inplace = True
    x = torch.randn(1, 1, layer.dim)

    def token() -> None:
        nonlocal cache
        _, cache = layer(x, x, cache=cache) if twice else layer(x, cache)

    return median(times(token, runs=200, warm=20)) * 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    given = parser.parse_args()
    print(machine())
    print(f"\nT = {given.length}, dim {given.dim}, {given.heads} heads, attention without its projections\n")
    print(blocks(given.length, given.dim, given.heads))
    print("\nOne token, the whole layer\n")
    print(decoding(given.dim, given.heads))
