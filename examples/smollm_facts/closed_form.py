"""Closed forms for the output of the memory, before it is trained: an open gate, and a read that raises the token that was written.

Least squares on the tokens of texts and dialogues: the value of a token is mapped to the direction of its own row in the output
embedding, in which a stream raises its logit.
"""

from __future__ import annotations

import torch
from torch import Tensor

OPEN = 1.5  # what the output gate sees of every token
SHARE = 1.5  # norm of what a read adds, as a share of the norm of the stream


def solve(inputs: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """The map (I, O) with the least squared error of inputs (N, I) @ map = targets (N, O)."""
    gram = inputs.T @ inputs
    return torch.linalg.solve(gram + ridge * gram.diagonal().mean() * torch.eye(len(gram)), inputs.T @ targets)


def whitening(x: Tensor, shrink: float = 0.05) -> Tensor:
    """The map (D, D) after which x (N, D) has no mean and about equal variance in all directions: values of two tokens are then
    nearly orthogonal, and a sum of values is read as the larger one of them."""
    mean = x.mean(0)
    mean = mean / mean.norm()
    flat = x - (x @ mean).unsqueeze(1) * mean
    sizes, directions = torch.linalg.eigh(flat.T @ flat / len(x))
    scaled = directions * (sizes + shrink * sizes.mean()).rsqrt() @ directions.T
    return scaled - (scaled @ mean).unsqueeze(1) * mean


@torch.no_grad()
def speak(keeper, streams, tokens: int = 120_000) -> float:
    """Set the output gate and the output map of the memory. Returns the cosine of what values are mapped to with their rows."""
    segments = [told for told, _ in streams.entries] + streams.texts
    segments = segments[:: max(1, sum(len(s.ids) for s in segments) // tokens)]
    ids = torch.tensor([i for s in segments for i in s.ids])
    memory = keeper.memory
    x = keeper.normed(torch.cat([s.source for s in segments]))
    v = keeper.values(x)
    memory.output_gate.weight.copy_(
        solve(x, torch.full((len(x), 1), OPEN), 1e-4).T.expand_as(memory.output_gate.weight)
    )
    weight = torch.bincount(ids)[ids].float().rsqrt().unsqueeze(1)  # frequent tokens count less
    z = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + memory.config.eps) * memory.norm.weight
    rows = keeper.head.weight.float()
    rows = (rows - rows.mean(0)) * keeper.body.norm.weight.float()
    asked = [s.states for _, some in streams.entries for s in some if s.states is not None][:200]
    stream = torch.cat(asked).float().norm(dim=1).median()
    target = SHARE * stream * torch.nn.functional.normalize(rows[ids], dim=1)
    z = z.flatten(1) * torch.nn.functional.silu(torch.tensor(OPEN))  # N HV
    found = solve(z * weight, target * weight, 1e-4)  # HV D
    memory.out.weight.copy_(found.T)
    return torch.cosine_similarity(z @ found, target, dim=1).mean().item()
