"""The coefficients of `rules` as the fast engine takes them: for a piece, and cut into tiles.

N tiles, G = batch x heads, L tokens and E entries of a tile, m = 2 matrices per map (W and S), or 1 without momentum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .chain_plan import Plan
from .packed import End, Rows


class Coefs(NamedTuple):
    """Coefficients of a piece, or gradients of them."""

    C: Tensor  # N G L+1 E
    beta: Tensor  # N G L+1
    f: Tensor  # N G L+1
    end: Tensor  # N G E m
    keep: Tensor  # N G m

    def rows(self, plan: Plan, group: slice, at: slice | Tensor) -> Rows:
        return _rows(self.beta[group], self.f[group] if plan.momentum else None, self.C[group], at)


def _rows(beta: Tensor, f: Tensor | None, C: Tensor, at: slice | Tensor) -> Rows:
    return Rows(beta[:, :, at, None], None if f is None else f[:, :, at, None], C[:, :, at])


def read_at(plan: Plan, L: int) -> slice:
    """The rows that a tile's L tokens read at."""
    return slice(0, L) if plan.before else slice(1, L + 1)


def key_rows_of(plan: Plan, E: int, device) -> Tensor | None:
    """The row of coefficients that each key of a tile has as its anchor, where they differ."""
    if plan.subchunks == 1:
        return None
    return torch.arange(E, device=device) // (E // plan.subchunks) * plan.stride


class TileCoefficients(NamedTuple):
    """Views of one tile's coefficients, or gradients of them, shaped for use."""

    reads: Rows
    anchors: list[Rows]  # of every sub-chunk but the first
    end: End


def tile_coefficients(plan: Plan, co: Coefs) -> list[TileCoefficients]:
    C, beta, f, end, keep = co
    N, J, size = len(C), plan.subchunks, C.shape[3] // plan.subchunks
    nothing = [None] * N

    momentum = f if plan.momentum else None
    starts = [slice(j * plan.stride, j * plan.stride + 1) for j in range(1, J)]
    anchors = [_rows(beta, momentum, C[..., : size * (j + 1)], at) for j, at in enumerate(starts)]
    reads = _rows(beta, momentum, C, read_at(plan, C.shape[2] - 1)).per_tile()
    f_end = nothing if momentum is None else f[:, :, -1, None, None].unbind(0)
    ends = map(End, keep[..., None, None].unbind(0), f_end, end.unsqueeze(-1).unbind(0))
    each = zip(*(rows.per_tile() for rows in anchors)) if anchors else [()] * N
    return [TileCoefficients(*tile) for tile in zip(reads, map(list, each), ends)]
