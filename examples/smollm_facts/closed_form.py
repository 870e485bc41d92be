"""Closed forms for the output of the memory, before it is trained: an open gate, and a read that raises the token that was written.

Least squares on the tokens of texts and dialogues: the value of a token is mapped to the direction of its own row in the output
embedding, in which a stream raises its logit.
"""

from __future__ import annotations

import torch
from torch import Tensor

OPEN = 1.5  # what the output gate sees of every token
SHARE = 2.0  # norm of what a read adds, as a share of the norm of the stream


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
def speak(trained, streams, tokens: int = 120_000) -> float:
    """Set the output gate and the output map of the highest memory. Returns the cosine of what values are mapped to with their rows."""
    segments = [told for told, _ in streams.entries] + streams.texts
    segments = segments[:: max(1, sum(len(s.ids) for s in segments) // tokens)]
    ids = torch.tensor([i for s in segments for i in s.ids])
    x = trained.input(torch.cat([s.source for s in segments]))
    memory, config = trained.added.memory, trained.added.memory.config
    opening = solve(x, torch.full((len(x), 1), OPEN), 1e-4)  # D 1
    memory.output_gate.weight.copy_(opening.T.expand_as(memory.output_gate.weight))
    counts = torch.bincount(ids)[ids].float()
    weight = counts.rsqrt().unsqueeze(1)  # frequent tokens count less
    (q, k, rows_v), width = memory.splits, x.shape[1]
    random = torch.nn.init.orthogonal_(torch.empty(max(rows_v, width), width))[:rows_v]
    memory.qkv.weight[q + k :] = (
        random * (rows_v / width) ** 0.5 @ whitening(x * weight / weight.square().mean().sqrt())
    )
    _, _, v = trained.project(x.unsqueeze(0), torch.ones(1, len(x), dtype=torch.bool))
    z = v[0] * torch.rsqrt(v[0].square().mean(-1, keepdim=True) + config.eps) * memory.norm.weight
    rows = trained.head.weight.float()
    rows = (rows - rows.mean(0)) * trained.body.norm.weight.float()
    asked = [s.states for _, some in streams.entries for s in some if s.states is not None][:200]
    stream = torch.cat(asked).float().norm(dim=1).median()
    target = SHARE * stream * torch.nn.functional.normalize(rows[ids], dim=1)
    z = z.flatten(1) * torch.nn.functional.silu(torch.tensor(OPEN))  # N HV
    found = solve(z * weight, target * weight, 1e-2)  # HV D
    memory.out.weight.copy_(found.T)
    trained.added.gate.fill_(1.0)
    if memory.start_norm is not None:
        memory.start_norm.weight.zero_()  # the static branch begins silent
    return torch.cosine_similarity(z @ found, target, dim=1).mean().item()
