"""Kind "stability": a memory is driven with inputs that are hard on it. Where does it leave all bounds? Nothing is trained.

Inputs, T tokens each: one key for ever; two in turn; a key in bursts, absent between; every key new. H heads have their own start and keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mnemos.memory import Gates, MemorySpec, scan
from mnemos.memory.config import NeuralMemoryConfig

LIMIT = 100.0  # a weight norm that no bounded memory of unit values comes near
HEADS, DIM = 8, 16


def inputs(length: int, generator: torch.Generator) -> Tensor:
    """Keys (4, T, H, D), unit length."""
    few = F.normalize(torch.randn(3, HEADS, DIM, generator=generator), dim=-1)
    fresh = F.normalize(torch.randn(length, HEADS, DIM, generator=generator), dim=-1)
    t = torch.arange(length)
    burst = torch.where((t % 640 < 64)[:, None, None], few[0], fresh)
    return torch.stack([few[t * 0], few[t % 2], burst, fresh])


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """diverged: the share of heads, over all inputs, whose weights became larger than `LIMIT` or not finite, where lr is `lr_scale` times the
    bound that a layer keeps to, and every map of the start is `start_scale` times its usual size. step: lr · window · chunk / (1 − momentum),
    which docs/theory.md, section 9.1, wants below 2."""
    momentum, chunk, window = cell["momentum"], cell["chunk"], cell.get("window", 1)
    config = NeuralMemoryConfig(
        dim=HEADS * DIM,
        heads=HEADS,
        structure="linear" if cell["depth"] == 1 else "mlp",
        depth=max(2, cell["depth"]),
        chunk_size=chunk,
        window=window,
        momentum=momentum > 0,
    )
    spec: MemorySpec = config.spec
    ceiling = config.effective_max_lr * cell["lr_scale"]
    generator = torch.Generator().manual_seed(cell["seed"])
    k = inputs(cell["length"], generator)
    v = F.normalize(torch.randn(k.shape, generator=generator), dim=-1)
    start = [
        cell["start_scale"] * torch.randn(HEADS, *shape, generator=generator) / shape[0] ** 0.5 for shape in spec.shapes
    ]
    one = k.new_ones(k.shape[:3])
    effective = ceiling * (1 - momentum)  # a layer scales its rate so
    gates = Gates(lr=effective * one, momentum=momentum * one if momentum > 0 else None)
    with torch.no_grad():
        _, state = scan(None, k, v, gates, spec.initial_state(start, batch=len(k)), spec)
    norms = torch.stack([w.flatten(2).norm(dim=-1) for w in state.weights]).amax(0)  # inputs, heads
    return {
        "diverged": (~(norms < LIMIT)).float().mean().item(),
        "largest": norms.nan_to_num(torch.inf).max().item(),
        "step": effective * window * chunk / (1 - momentum),
    }
