"""Fast weights at several positions of a text: norms, effective rank, singular values.

Shapes: H heads, N moments, k singular values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory.vitality import spectrum_rank


@dataclass
class Spectrum:
    """One fast map over time.

    norm: (N, H), Frobenius. moved: (N, H), Frobenius norm of W - W0. rank: (N, H), see `mnemos.memory.effective_rank`.
    values: (N, H, k), the largest singular values. A map that is a list of pairs (features "exp") has only a norm.
    """

    name: str
    shape: tuple[int, int] | None
    norm: Tensor
    moved: Tensor | None = None
    rank: Tensor | None = None
    values: Tensor | None = None


def look(W: Tensor, start: Tensor, count: int) -> dict[str, Tensor]:
    """A fast map W (H, d_in, d_out) with initial value `start` at one moment: norm, moved and rank (H,), and values (H, k)."""
    W = W.float()
    values = torch.linalg.svdvals(W)
    return {
        "norm": values.square().sum(-1).sqrt(),
        "moved": (W - start.float()).flatten(1).norm(dim=-1),
        "rank": spectrum_rank(values),
        "values": values[..., :count].contiguous(),
    }


def over_time(name: str, shape: tuple[int, int] | None, looks: list[dict[str, Tensor]]) -> Spectrum:
    """The moments of one map as a `Spectrum`, in order."""
    return Spectrum(name, shape, **{key: torch.stack([x[key] for x in looks]) for key in looks[0]})
