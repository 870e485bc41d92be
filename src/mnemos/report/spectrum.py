"""Fast weights at several positions of a text: norms, effective rank, singular values.

Shapes: H heads, N moments, k singular values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Spectrum:
    """One fast map over time.

    norm: (N, H), Frobenius. moved: (N, H), Frobenius norm of W - W0. rank: (N, H), see `effective_rank`.
    values: (N, H, k), the largest singular values. A map that is a list of pairs (features "exp") has only a norm.
    """

    name: str
    shape: tuple[int, int] | None
    norm: Tensor
    moved: Tensor | None = None
    rank: Tensor | None = None
    values: Tensor | None = None


def effective_rank(values: Tensor) -> Tensor:
    """exp of the entropy of singular values (..., n), normalised to a sum of 1 (Roy and Vetterli 2007): 1 for one direction, n for n equal ones.

    >>> effective_rank(torch.tensor([1.0, 1.0, 0.0]))
    tensor(2.)
    """
    p = values / values.sum(-1, keepdim=True).clamp(min=1e-30)
    return torch.special.entr(p).sum(-1).exp()


def look(W: Tensor, start: Tensor, count: int) -> dict[str, Tensor]:
    """A fast map W (H, d_in, d_out) with initial value `start` at one moment: norm, moved and rank (H,), and values (H, k)."""
    W = W.float()
    values = torch.linalg.svdvals(W)
    return {
        "norm": values.square().sum(-1).sqrt(),
        "moved": (W - start.float()).flatten(1).norm(dim=-1),
        "rank": effective_rank(values),
        "values": values[..., :count].contiguous(),
    }


def over_time(name: str, shape: tuple[int, int] | None, looks: list[dict[str, Tensor]]) -> Spectrum:
    """The moments of one map as a `Spectrum`, in order."""
    return Spectrum(name, shape, **{key: torch.stack([x[key] for x in looks]) for key in looks[0]})
