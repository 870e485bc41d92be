"""Sliding-window attention: block sizes against dense causal attention, and the time of one decoded token.

python benchmarks/attention.py [--length 4096] [--dim 256] [--heads 4]
"""

from __future__ import annotations

import argparse

import torch

from harness import machine, median, table, times
from mnemos.nn import Attention, QKProjection, SegmentAttention
from mnemos.nn.heads import attend
from mnemos.nn.sliding import block_size, sliding_attention


def blocks(T: int, dim: int, heads: int) -> str:
    q, k, v = (torch.randn(1, T, heads, dim // heads, requires_grad=True) for _ in range(3))

    def forward_backward(function):
        return median(times(lambda: function().sum().backward(), runs=5)) * 1e3

    dense = forward_backward(lambda: attend(q, k, v, causal=True))
    rows = [["all", "dense causal", f"{dense:.0f}", "1.0"]]
    for window in (64, 256, 512, 1024):
        chosen = block_size(window)
        for block in sorted({window // 4, window // 2, window, 2 * window, chosen}):
            ms = forward_backward(lambda: sliding_attention(q, k, v, window, block=block))
            name = f"{block} (chosen)" if block == chosen else str(block)
            rows.append([str(window), name, f"{ms:.0f}", f"{dense / ms:.1f}"])
    return table(["window", "block", "forward + backward ms", "times as fast as dense"], rows)


@torch.no_grad()
def decoding(dim: int, heads: int) -> str:
    x, rows = torch.randn(1, 1, dim), []
    layers = [("attention", Attention(dim, heads, window)) for window in (64, 512, None)]
    layers += [("segment", SegmentAttention(dim, heads, 128)), ("qk projection", QKProjection(dim, heads))]
    for name, layer in layers:
        for start in (1, 1000, 10000):
            cache, prompt = None, torch.randn(1, start, dim)
            if isinstance(layer, SegmentAttention):
                for part in prompt.split(layer.segment_len, 1):
                    _, cache = layer(part, part, cache=cache)
                cost = times(lambda: layer(x, x, cache=cache), runs=300, warm=20)
            else:
                _, cache = layer(prompt)
                cost = times(lambda: layer(x, cache), runs=300, warm=20)
            rows.append([name, str(getattr(layer, "window", "-")), str(start), f"{median(cost) * 1e6:.0f}"])
    return table(["layer", "window", "tokens before", "µs per token"], rows)


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
