"""The weights that keys meet: how a chain runs at them, forth and back, and the gradients that flow to them.

`Plain`: matrices at hand. `Implied`: the anchor of a later chunk of a tile, which is never built; it is taken in packed
form over the entries of the chunks before it (docs/theory.md, section 4.4).

Maps are kept narrow axis first (see `packed`); `widens[l]` tells which way map l goes. G = batch x heads, E entries.
Capital D before a name is "gradient with respect to"; gradients named in the arguments are added to in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import packed
from .packed import Rows
from .tile import Maps, Side, Tile
from .workspace import Workspace


class Plain:
    """An anchor whose weights A are at hand. DA: their gradients, for the backward."""

    def __init__(self, A: Maps, widens: tuple[bool, ...], ws: Workspace, DA: Maps | None = None):
        self.A, self.widens, self.ws, self.DA = A, widens, ws, DA or []

    def apply(self, l: int, x: Tensor, out: Tensor) -> None:
        self.ws.mm(x, self.A[l] if self.widens[l] else self.A[l].mT, out=out)

    def transposed(self, l: int, t: Tensor, out: Tensor) -> None:
        self.ws.mm(t, self.A[l].mT if self.widens[l] else self.A[l], out=out)

    def apply_backward(self, l: int, Dz: Tensor, x: Tensor, Dx: Tensor) -> None:
        self._collect(l, x, Dz)
        self.ws.add_mm(Dx, Dz, self.A[l].mT if self.widens[l] else self.A[l])

    def transposed_backward(self, l: int, Du: Tensor, t: Tensor, Dt: Tensor) -> None:
        self._collect(l, Du, t)
        self.ws.add_mm(Dt, Du, self.A[l] if self.widens[l] else self.A[l].mT)

    def _collect(self, l: int, at_in: Tensor, at_out: Tensor) -> None:
        if self.widens[l]:
            self.ws.add_mm(self.DA[l], at_in.mT, at_out)
        else:
            self.ws.add_mm(self.DA[l], at_out.mT, at_in)


def keys_again_at(anchor: Plain, joints: list, tile: Tile, ws: Workspace) -> Maps:
    """u of the keys, from inputs and errors; fills in d. For a tile at one anchor."""
    u: Maps = []
    for l in range(len(tile.Z) - 1, 0, -1):
        u.insert(0, ws.empty(*tile.side.a[l].shape))
        anchor.transposed(l, tile.side.d[l], u[0])
        joints[l - 1].pulled(u[0], tile.side.d[l - 1])
    return u


def keys_again(
    joints: list, l2: bool, tile: Tile, rows: Rows, ws: Workspace
) -> tuple[Maps, dict[tuple[int, bool], Tensor]]:
    """d and u of all keys of a tile of several chunks, from inputs and errors: (u, scores for `Implied.collect`).

    All chunks at once, because a row of coefficients is 0 where it has not seen. rows: one per key.
    """
    n, u, scores = len(tile.Z), [], {}
    for l in range(1 if tile.widens[0] else 0, n):
        if l2 or l < n - 1:
            scores[l, tile.widens[l]] = ws.mm(tile.side.a[l], (tile.thin if tile.widens[l] else tile.Z)[l].mT)
    for l in range(n - 1, 0, -1):
        wider = not tile.widens[l]
        move = packed.widen if wider else packed.narrow
        back, scores[l, wider] = move(tile.Z[l], tile.thin[l], tile.side.d[l], rows, ws)
        u.insert(0, back)
        joints[l - 1].pulled(back, tile.side.d[l - 1])
    return u, scores


class Implied:
    """The anchor of a later chunk of a tile: what is seen of `tile` with `rows`, a single row of coefficients.

    `left`: the left side of `widen` for the keys in map 0, made in advance where that map widens.
    """

    def __init__(self, tile: Tile, entries: int, rows: Rows, left: Tensor | None, ws: Workspace):
        self.Z, self.thin = tile.seen(entries)
        self.widens, self.entries, self.rows, self.ws = tile.widens, entries, rows, ws
        self.left = None if left is None else left[:, :, : self.Z[0].shape[1]]

    def collect(self, D: Tile, Drows: Rows, scores: dict, span: slice) -> Implied:
        """For the backward: where gradients go, and the `scores` of all keys of the tile, this anchor's in `span`."""
        self.DZ, self.Dthin = D.seen(self.entries)
        self.Drows, self.scores, self.span = Drows, scores, span
        return self

    def apply(self, l: int, x: Tensor, out: Tensor) -> None:
        if l == 0 and self.left is not None:
            self.ws.mm(self.left, self.Z[0], out=out)
        else:
            self._forth(l, x, self.widens[l], out)

    def transposed(self, l: int, t: Tensor, out: Tensor) -> None:
        self._forth(l, t, not self.widens[l], out)

    def _forth(self, l: int, x: Tensor, wider: bool, out: Tensor) -> None:
        (packed.widen if wider else packed.narrow)(self.Z[l], self.thin[l], x, self.rows, self.ws, out)

    def apply_backward(self, l: int, Dz: Tensor, x: Tensor, Dx: Tensor) -> None:
        if l == 0 and self.left is not None:
            self.ws.add_mm(self.DZ[0], self.left.mT, Dz)
            self.ws.mm(Dz, self.Z[0].mT, out=self.left)  # no longer needed: becomes its own gradient
        else:
            self._back(l, Dz, x, Dx, self.widens[l])

    def transposed_backward(self, l: int, Du: Tensor, t: Tensor, Dt: Tensor) -> None:
        self._back(l, Du, t, Dt, not self.widens[l])

    def _back(self, l: int, Dout: Tensor, x: Tensor, Dx: Tensor, wider: bool) -> None:
        ws, Z, thin = self.ws, self.Z[l], self.thin[l]
        scores = self.scores[l, wider][:, self.span, : (thin if wider else Z).shape[1]]
        back = packed.widen_backward if wider else packed.narrow_backward
        more, Drows = back(Z, thin, x, scores, self.rows, Dout, self.DZ[l], self.Dthin[l], ws)
        Dx.add_(more)
        self.Drows.add_(Drows)


def run_keys(joints, l2: bool, anchor: Plain | Implied, v: Tensor, side: Side, z: Maps, u: Maps, ws: Workspace) -> None:
    """Entries of every map. side.a[0] holds the keys and side.d[-1] takes the errors; the rest of `side`, z (pre-activations)
    and u (back-propagated, before the joint) is filled in."""
    n = len(side.a)
    for l in range(n - 1):
        anchor.apply(l, side.a[l], z[l])
        joints[l].value(z[l], ws, side.a[l + 1])
    if l2:
        anchor.apply(n - 1, side.a[-1], side.d[-1])
        side.d[-1].sub_(v)
    else:
        torch.neg(v, out=side.d[-1]) if ws.reuse else side.d[-1].copy_(-v)
    for l in range(n - 1, 0, -1):
        anchor.transposed(l, side.d[l], u[l - 1])
        joints[l - 1].pull(z[l - 1], u[l - 1], ws, side.d[l - 1])


def run_keys_backward(l2: bool, anchor: Plain | Implied, side: Side, at: list, u: Maps, D: Side) -> None:
    """Backward of `run_keys` from the gradients D of its entries. `at`: the joints at its pre-activations.

    Leaves the gradient of the keys in D.a[0] and, up to the sign, that of the values in D.d[-1].
    """
    n, Dz = len(side.a), []
    for l in range(n - 1):
        Du, curve = at[l].second(u[l], D.d[l])
        Dz.append(curve)
        anchor.transposed_backward(l + 1, Du, side.d[l + 1], D.d[l + 1])
    if l2:
        anchor.apply_backward(n - 1, D.d[-1], side.a[-1], D.a[-1])
    for l in range(n - 2, -1, -1):
        anchor.apply_backward(l, at[l].add_pulled(Dz[l], D.a[l + 1]), side.a[l], D.a[l])
