"""What does not depend on the state, for a group of tiles at once: map 0 of a chain at keys and queries, where it widens.

N tiles of the group, G = batch x heads, L tokens and E entries of a tile. Capital D before a name is "gradient with respect to".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .packed import Rows

GROUP = 8  # tiles: enough to make few calls of it, few enough to stay in the cache


class Share(NamedTuple):
    """One tile's share of `Ahead`."""

    left_q: Tensor | None = None  # G L m n + E
    left_k: Tensor | None = None  # G E m n + E
    end_k: Tensor | None = None  # G E m n
    anchors: Rows | None = None


class Ahead:
    """Left sides of `packed.widen` for queries and keys, and `packed.weighed` keys: of map 0, where that map `widens`.

    reads: rows of the queries, None without; anchors: rows of the keys, None where every key is at the tile's start.
    runs: keys are applied to map 0 at all; with the dot objective, the error does not look at the last map's output.
    end: (N, G, E, m). In the backward each of left_q, left_k and end_k is overwritten, tile by tile, by its own gradient;
    then `backward` carries these to what they were made of.
    """

    def __init__(
        self,
        widens: bool,
        q: Tensor | None,
        k: Tensor,
        reads: Rows | None,
        anchors: Rows | None,
        end: Tensor,
        runs: bool,
    ):
        self.k, self.anchors, self.end = k, anchors, end
        self.of_q = Left(q, k, reads) if widens and q is not None and reads is not None else None
        self.of_k = Left(k, k, anchors) if widens and runs and anchors is not None else None
        self.end_k = (end.unsqueeze(-1) * k.unsqueeze(-2)).flatten(-2) if widens else None
        parts = [None if x is None else x.left for x in (self.of_q, self.of_k)]
        each = [(None,) * len(k) if x is None else x.unbind(0) for x in (*parts, self.end_k)]
        rows = [None] * len(k) if anchors is None else anchors.per_tile()
        self.shares = [Share(*tile) for tile in zip(*each, rows)]

    def backward(self, Dq: Tensor, Dk: Tensor, Dreads: Rows, Danchors: Rows, Dend: Tensor) -> None:
        """Dq takes its gradient, the others are added to. Danchors has one row per key, like `anchors`."""
        if self.end_k is None:
            return
        parts = self.end_k.unflatten(-1, (-1, self.k.shape[3]))
        Dk += (parts * self.end.unsqueeze(-1)).sum(-2)
        Dend += (parts * self.k.unsqueeze(-2)).sum(-1)
        if self.of_q is not None:
            Dx, more = self.of_q.backward(Dreads)
            Dq.copy_(Dx)
            Dk += more
        if self.of_k is not None:
            for more in self.of_k.backward(Danchors):
                Dk += more


class Left:
    """[beta x, f x, C * x kᵀ] of all tiles: (N, G, R, n) -> (N, G, R, m n + E)."""

    def __init__(self, x: Tensor, k: Tensor, rows: Rows):
        self.x, self.k, self.rows = x, k, rows
        self.P = x @ k.mT
        scaled = [rows.beta * x] if rows.f is None else [rows.beta * x, rows.f * x]
        self.left = torch.cat([*scaled, rows.C * self.P], -1)

    def backward(self, Drows: Rows) -> tuple[Tensor, Tensor]:
        """From the gradient of `left` in its own place: returns Dx and Dk, adds to Drows."""
        x, rows, n = self.x, self.rows, self.x.shape[3]
        Dscore = self.left[..., self.left.shape[-1] - self.k.shape[2] :]
        Q = rows.C * Dscore
        first = self.left[..., :n]
        Dx = torch.addcmul(Q @ self.k, first, rows.beta)
        Drows.beta.add_((first * x).sum(-1, keepdim=True))
        if rows.f is not None and Drows.f is not None:
            second = self.left[..., n : 2 * n]
            Dx.addcmul_(second, rows.f)
            Drows.f.add_((second * x).sum(-1, keepdim=True))
        Drows.C.addcmul_(Dscore, self.P)
        return Dx, Q.mT @ x
