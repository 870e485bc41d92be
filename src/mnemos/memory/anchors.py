"""The weights that a tile's keys meet, and the gradients that flow back to them.

Materialised: matrices at hand, for a tile with one chunk or the first of several. Implied: the anchor of a later chunk,
which is never built, in dual form over the entries of the chunks before it (docs/theory.md, section 4.4).

G = batch x heads, L tokens and E entries of a tile, J sub-chunks. Capital D before a name is "gradient with respect to".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import dual
from .dual import End, Entries, Rows
from .workspace import Workspace

Maps = list[Tensor]


class TileCoefficients(NamedTuple):
    """Views of one tile's coefficients, shaped for use."""

    reads: Rows
    end: End
    all: tuple[Tensor, Tensor, Tensor]  # C, beta, f with all their rows


class Grads:
    """Gradients of one tile while its backward runs: of W, S and the anchor, of the entries, and of C, beta, f."""

    def __init__(self, W: Maps, S: Maps, A: Maps, entries: list[Entries], C: Tensor, beta: Tensor, f: Tensor):
        self.W, self.S, self.A, self.entries, self.C, self.beta, self.f = W, S, A, entries, C, beta, f


def block(x: Tensor, j: int, J: int) -> Tensor:
    """Entries of sub-chunk j."""
    size = x.shape[1] // J
    return x[:, j * size : (j + 1) * size] if J > 1 else x


class Materialised:
    """An anchor whose weights are at hand."""

    def __init__(self, A: Maps, ws: Workspace):
        self.A, self.ws = A, ws

    def apply(self, l: int, x: Tensor) -> Tensor:
        return self.ws.mm(x, self.A[l], kept=True)

    def transposed(self, l: int, t: Tensor) -> Tensor:
        return self.ws.mm(t, self.A[l].mT, kept=True)

    def apply_backward(self, l: int, Dz: Tensor, x: Tensor, grads: Grads) -> Tensor:
        self.ws.add_mm(grads.A[l], x.mT, Dz)
        return self.ws.mm(Dz, self.A[l].mT)

    def transposed_backward(self, l: int, Du: Tensor, t: Tensor, grads: Grads) -> Tensor:
        self.ws.add_mm(grads.A[l], Du.mT, t)
        return self.ws.mm(Du, self.A[l])


class ImpliedAnchors:
    """All anchors of a tile of J chunks, and what their backward can do for all chunks at once."""

    def __init__(
        self, J: int, stride: int, W: Maps, S: Maps, co: TileCoefficients, entries: list[Entries], ws: Workspace
    ):
        self.J, self.stride, self.ws, self.entries = J, stride, ws, entries
        self.W, self.S = W, S or [None] * len(W)
        self.C, self.beta, self.f = co.all
        starts = slice(0, J * stride, stride)
        self.rows_beta = self.beta[:, starts, None].split(1, 1)
        self.rows_f = self.f[:, starts, None].split(1, 1) if S else [None] * J
        self.rows_C = self.C[:, starts].split(1, 1)
        k = entries[0].a
        self.kW, self.kS = ws.mm(k, W[0]), ws.mm(k, S[0]) if S else None
        self.kk = ws.mm(k, k.mT)
        G, E = k.shape[:2]
        self.Dz = [ws.empty(G, E, w.shape[2]) for w in W]  # gradients of the maps' outputs, kept for `settle`
        self.Du = [ws.empty(G, E, w.shape[1]) for w in W]

    def at(self, j: int) -> Implied:
        return Implied(self, j)

    def settle(self, grads: Grads) -> Tensor:
        """What is left once every chunk's backward has run: gradients of W, S and the coefficients. Returns Dk."""
        ws, E = self.ws, self.kk.shape[1]
        row = torch.arange(E, device=self.kk.device) // (E // self.J) * self.stride
        rows = Rows(self.beta[:, row, None], self.f[:, row, None] if grads.S else None, self.C[:, row])
        Dk = None
        for l, (a, d) in enumerate(self.entries):
            W, S, DW, DS = self.W[l], self.S[l], grads.W[l], grads.S[l] if grads.S else None
            M = self._settle(self.Dz[l], a, W, S, a, d, rows, DW, DS, grads)
            if l == 0:
                Q = ws.mul(rows.C, M)
                Dk = ws.mm(ws.mul(rows.beta, self.Dz[0]), W.mT)
                if S is not None and rows.f is not None:
                    ws.add_mm(Dk, ws.mul(rows.f, self.Dz[0]), S.mT)
                ws.add_mm(Dk, Q, a)
                ws.add_mm(Dk, Q.mT, a).add_(grads.entries[0].a)
            else:
                WT, ST = W.mT, None if S is None else S.mT
                self._settle(self.Du[l], d, WT, ST, d, a, rows, DW.mT, None if DS is None else DS.mT, grads)
        assert Dk is not None
        return Dk

    def _settle(self, Dz, x, W, S, a, d, rows: Rows, DW, DS, grads: Grads) -> Tensor:
        ws, J = self.ws, self.J
        starts = slice(0, J * self.stride, self.stride)

        def per_chunk(x: Tensor) -> Tensor:  # G E ... -> G J ...
            return x.unflatten(1, (J, -1)).sum(2)

        scaled = ws.mul(rows.beta, Dz)
        ws.add_mm(DW, x.mT, scaled)
        grads.beta[:, starts] += per_chunk(ws.mul(ws.mm(x, W), Dz).sum(-1))
        if S is not None and DS is not None and rows.f is not None:
            ws.add_mm(DS, x.mT, ws.mul(rows.f, Dz))
            grads.f[:, starts] += per_chunk(ws.mul(ws.mm(x, S), Dz).sum(-1))
        M = ws.mm(Dz, d.mT)
        grads.C[:, starts] += per_chunk(ws.mul(ws.mm(x, a.mT), M))
        return M


class Implied:
    """The anchor of chunk j of a tile."""

    def __init__(self, tile: ImpliedAnchors, j: int):
        self.tile, self.ws, self.j = tile, tile.ws, j
        self.size = tile.kk.shape[1] // tile.J
        self.seen = j * self.size
        self.rows = Rows(tile.rows_beta[j], tile.rows_f[j], tile.rows_C[j][:, :, : self.seen])

    def _seen(self, x: Tensor) -> Tensor:
        return x[:, : self.seen]

    def _own(self, x: Tensor) -> Tensor:
        return x[:, self.seen : self.seen + self.size]

    def apply(self, l: int, x: Tensor) -> Tensor:
        tile, ws, rows = self.tile, self.ws, self.rows
        a, d = tile.entries[l]
        if l:
            return dual.apply(x, tile.W[l], tile.S[l], rows, Entries(self._seen(a), self._seen(d)), ws)[0]
        z = ws.mul(rows.beta, self._own(tile.kW))
        if tile.kS is not None and rows.f is not None:
            z.addcmul_(rows.f, self._own(tile.kS))
        return ws.add_mm(z, ws.mul(rows.C, self._own(tile.kk)[:, :, : self.seen]), self._seen(d))

    def transposed(self, l: int, t: Tensor) -> Tensor:
        tile, (a, d) = self.tile, self.tile.entries[l]
        S = tile.S[l]
        flipped = Entries(self._seen(d), self._seen(a))
        return dual.apply(t, tile.W[l].mT, None if S is None else S.mT, self.rows, flipped, self.ws)[0]

    def apply_backward(self, l: int, Dz: Tensor, x: Tensor, grads: Grads) -> Tensor:
        """Dx, and the share of earlier entries; the rest is left to `ImpliedAnchors.settle`, and for l = 0 Dx too."""
        tile, ws = self.tile, self.ws
        self._own(tile.Dz[l]).copy_(Dz)
        D = grads.entries[l]
        if l:
            return self._pull(Dz, x, tile.W[l], tile.S[l], tile.entries[l], D)
        if self.seen:
            ws.add_mm(self._seen(D.d), ws.mul(self.rows.C, self._own(tile.kk)[:, :, : self.seen]).mT, Dz)
        return torch.zeros_like(x)

    def transposed_backward(self, l: int, Du: Tensor, t: Tensor, grads: Grads) -> Tensor:
        tile = self.tile
        self._own(tile.Du[l]).copy_(Du)
        S, D = tile.S[l], grads.entries[l]
        return self._pull(
            Du, t, tile.W[l].mT, None if S is None else S.mT, dual.transposed(tile.entries[l]), dual.transposed(D)
        )

    def _pull(self, Dz: Tensor, x: Tensor, W: Tensor, S: Tensor | None, entries: Entries, D: Entries) -> Tensor:
        """Gradient of x in x W_t, adding the share of the entries seen to D."""
        ws, rows = self.ws, self.rows
        if not self.seen:
            return ws.mm(Dz, W.mT)
        Dx = ws.mm(ws.mul(rows.beta, Dz), W.mT)
        if S is not None and rows.f is not None:
            ws.add_mm(Dx, ws.mul(rows.f, Dz), S.mT)
        a, d = self._seen(entries.a), self._seen(entries.d)
        Q = ws.mm(Dz, d.mT).mul_(rows.C)
        ws.add_mm(Dx, Q, a)
        ws.add_mm(self._seen(D.a), Q.mT, x)
        ws.add_mm(self._seen(D.d), ws.mm(x, a.mT).mul_(rows.C).mT, Dz)
        return Dx
