"""One fast map inside a tile, packed so that a few large matmuls do the work of many small ones.

The narrower side of a map W (d_in, d_out) has n dimensions, the wider one w. W is kept with the narrow axis first, that is
transposed where d_in > d_out, and stacked with its momentum and with the tile's entries of the wide side:

    Z = [W; S; wide]  (G, m n + E, w)       thin: (G, E, n), the entries of the narrow side       m = 2, or 1 without momentum

Where the map widens, thin are the inputs a and wide the errors d; where it narrows, the other way round. W_t is never built:

    widen:   x (n) -> w      [beta x, f x, C * x thinᵀ] Z
    narrow:  x (w) -> n      Y = x Zᵀ,   beta Y_W + f Y_S + (C * Y_E) thin
    advance:                 [W; S]_end = [beta W + f S; m S] + [C_end thin, n_end thin]ᵀ wide

A map that widens is applied by `widen` and transposed by `narrow`; one that narrows the other way round.
C and n carry the minus sign of the descent: they are those of `rules` negated. G = batch x heads, E entries, R rows.
Capital D before a name is "gradient with respect to"; gradients named in the arguments are added to in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .workspace import Workspace


class Rows(NamedTuple):
    """Coefficients of the rows a map is applied at: R = one per input, or 1 for all of them."""

    beta: Tensor  # G R 1
    f: Tensor | None  # G R 1; None without momentum
    C: Tensor  # G R E

    def map(self, function: Callable[[Tensor], Tensor]) -> Rows:
        return Rows(function(self.beta), None if self.f is None else function(self.f), function(self.C))

    def per_tile(self) -> list[Rows]:
        """Rows of all tiles, with an axis in front, one by one."""
        f = [None] * len(self.C) if self.f is None else self.f.unbind(0)
        return [Rows(*tile) for tile in zip(self.beta.unbind(0), f, self.C.unbind(0))]

    def add_(self, other: Rows) -> None:
        self.beta.add_(other.beta)
        self.C.add_(other.C)
        if self.f is not None and other.f is not None:
            self.f.add_(other.f)


class End(NamedTuple):
    """Coefficients of a tile's last token."""

    keep: Tensor  # G m 1 1: beta, and what the tile keeps of S
    f: Tensor | None  # G 1 1
    entries: Tensor  # G E m 1: C_end, n_end


def _left(x: Tensor, P: Tensor, rows: Rows, ws: Workspace) -> Tensor:
    """[beta x, f x, C * P], P = x thinᵀ: (G, R, n) -> (G, R, m n + E)."""
    (G, R, n), E = x.shape, P.shape[2]
    m = 1 if rows.f is None else 2
    left = ws.empty(G, R, m * n + E)
    ws.mul(rows.beta, x, out=left[:, :, :n])
    if rows.f is not None:
        ws.mul(rows.f, x, out=left[:, :, n : 2 * n])
    ws.mul(rows.C, P, out=left[:, :, m * n :])
    return left


def widen(
    Z: Tensor, thin: Tensor, x: Tensor, rows: Rows, ws: Workspace, out: Tensor | None = None, kept: bool = False
) -> tuple[Tensor, Tensor]:
    """The rows in the wide space, and P = x thinᵀ, which the backward wants."""
    P = ws.mm(x, thin.mT, kept)
    return ws.mm(_left(x, P, rows, ws), Z, kept, out), P


def widen_backward(
    Z: Tensor, thin: Tensor, x: Tensor, P: Tensor, rows: Rows, Dout: Tensor, DZ: Tensor, Dthin: Tensor, ws: Workspace
) -> tuple[Tensor, Rows]:
    """Returns Dx and the gradients of the rows."""
    n, Df = x.shape[2], None
    ws.add_mm(DZ, _left(x, P, rows, ws).mT, Dout)
    Dleft = ws.mm(Dout, Z.mT)
    first = Dleft[:, :, :n]
    Dx = ws.mul(rows.beta, first)
    Dbeta = (first * x).sum(-1, keepdim=True)
    if rows.f is not None:
        second = Dleft[:, :, n : 2 * n]
        Dx.addcmul_(second, rows.f)
        Df = (second * x).sum(-1, keepdim=True)
    Dscore = Dleft[:, :, Dleft.shape[2] - P.shape[2] :]
    Q = ws.mul(rows.C, Dscore)
    ws.add_mm(Dx, Q, thin)
    ws.add_mm(Dthin, Q.mT, x)
    return Dx, _sum_rows(Rows(Dbeta, Df, ws.mul(Dscore, P)), rows)


def narrow(
    Z: Tensor, thin: Tensor, x: Tensor, rows: Rows, ws: Workspace, out: Tensor | None = None, kept: bool = False
) -> tuple[Tensor, Tensor]:
    """The rows in the narrow space, and Y = x Zᵀ, which the backward wants."""
    n = thin.shape[2]
    Y = ws.mm(x, Z.mT, kept)
    z = ws.mul(rows.beta, Y[:, :, :n], kept, out)
    if rows.f is not None:
        z.addcmul_(Y[:, :, n : 2 * n], rows.f)
    return ws.add_mm(z, ws.mul(rows.C, _scores(Y, thin)), thin), Y


def _scores(Y: Tensor, thin: Tensor) -> Tensor:
    return Y[:, :, Y.shape[2] - thin.shape[1] :]


def narrow_backward(
    Z: Tensor, thin: Tensor, x: Tensor, Y: Tensor, rows: Rows, Dout: Tensor, DZ: Tensor, Dthin: Tensor, ws: Workspace
) -> tuple[Tensor, Rows]:
    """Returns Dx and the gradients of the rows."""
    n, scores = thin.shape[2], _scores(Y, thin)
    M = ws.mm(Dout, thin.mT)
    DY = _left(Dout, M, rows, ws)
    ws.add_mm(Dthin, ws.mul(rows.C, scores).mT, Dout)
    ws.add_mm(DZ, DY.mT, x)
    Dbeta = (Y[:, :, :n] * Dout).sum(-1, keepdim=True)
    Df = None if rows.f is None else (Y[:, :, n : 2 * n] * Dout).sum(-1, keepdim=True)
    return ws.mm(DY, Z), _sum_rows(Rows(Dbeta, Df, M.mul_(scores)), rows)


def _sum_rows(grads: Rows, like: Rows) -> Rows:
    """Undo the broadcast of a single row."""
    if like.C.shape[1] == grads.C.shape[1]:
        return grads
    return grads.map(lambda x: x.sum(1, keepdim=True))


def weighed(thin: Tensor, end: End, ws: Workspace) -> Tensor:
    """[C_end thin, n_end thin]: (G, E, m n)."""
    G, E, n = thin.shape
    return ws.mul(end.entries, thin.unsqueeze(2), shape=(G, E, end.entries.shape[2], n)).flatten(2)


def weighed_backward(DT: Tensor, thin: Tensor, end: End, Dthin: Tensor, ws: Workspace) -> Tensor:
    """Dthin takes the gradient of thin. Returns that of end.entries, (G, E, m)."""
    G, E, n = thin.shape
    parts = DT.view(G, E, -1, n)
    ws.mul(end.entries[:, :, 0], parts[:, :, 0], out=Dthin)
    if end.f is not None:
        Dthin.addcmul_(parts[:, :, 1], end.entries[:, :, 1])
    return ws.mul(thin.unsqueeze(2), parts).sum(-1)


def advance(state: Tensor, wide: Tensor, T: Tensor, end: End, ws: Workspace, out: Tensor) -> None:
    """[W; S] of the tile's end, into `out` (G, m n, w). T: `weighed` entries."""
    G, mn, w = out.shape
    form = G, end.keep.shape[1], mn // end.keep.shape[1], w
    written = ws.mm(T.mT, wide).view(form)
    if ws.reuse:
        torch.addcmul(written, state.view(form), end.keep, out=out.view(form))
    else:
        out.copy_(torch.addcmul(written, state.view(form), end.keep).flatten(1, 2))
    if end.f is not None:
        out[:, : mn // 2].addcmul_(state[:, mn // 2 :], end.f)


def advance_backward(
    state: Tensor, wide: Tensor, T: Tensor, end: End, Dstate: Tensor, Dwide: Tensor, Ddecay: Tensor, ws: Workspace
) -> Tensor:
    """Dstate comes as the gradient of the tile's end and leaves as that of its start; Dwide takes the gradient of `wide`.

    Ddecay (G, m, m): [0, 0] of beta, [0, 1] of f, [1, 1] of m. Returns the gradient of T.
    """
    G, m = Ddecay.shape[:2]
    ws.mm(T, Dstate, out=Dwide)
    DT = ws.mm(wide, Dstate.mT)
    Ddecay.baddbmm_(Dstate.view(G, m, -1), state.view(G, m, -1).mT)
    if end.f is None:
        Dstate.mul_(end.keep[:, 0])
        return DT
    half = T.shape[2] // 2
    DW, DS = Dstate[:, :half], Dstate[:, half:]
    DS.mul_(end.keep[:, 1]).addcmul_(DW, end.f)
    DW.mul_(end.keep[:, 0])
    return DT
