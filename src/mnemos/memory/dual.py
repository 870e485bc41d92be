"""The algebra of one fast map inside a tile: applied in dual form, moved to the tile's end, and the backward of both.

    x W_t  = beta (x W) + f (x S) + (C * x aᵀ) d              W_t is never built
    t W_tᵀ = beta (t Wᵀ) + f (t Sᵀ) + (C * t dᵀ) a
    W_end  = beta W + f S + aᵀ (C d),   S_end = m S + aᵀ (n d)

C and n carry the minus sign of the descent: they are those of `rules` negated.
W, S: (G, d_in, d_out), S None without momentum. a, d: (G, E, d_in), (G, E, d_out), the entries. x: (G, R, d_in).
Row weights multiply whichever side is narrower. Capital D before a name is "gradient with respect to"; gradients of
W, S, a and d are added in place, the others are returned.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .workspace import Workspace


class Rows(NamedTuple):
    """Coefficients of the rows a map is applied at: R = one per input, or 1 for all."""

    beta: Tensor  # G R 1
    f: Tensor | None  # G R 1
    C: Tensor  # G R E


class Entries(NamedTuple):
    a: Tensor  # G E d_in
    d: Tensor  # G E d_out


def _sum_to(grad: Tensor, like: Tensor) -> Tensor:
    """Undo the broadcast of a single row."""
    return grad.sum(1, keepdim=True) if like.shape[1] < grad.shape[1] else grad


def _dot(x: Tensor, y: Tensor, like: Tensor, ws: Workspace) -> Tensor:
    return _sum_to(ws.mul(x, y).sum(-1, keepdim=True), like)


def apply(
    x: Tensor, W: Tensor, S: Tensor | None, rows: Rows, entries: Entries, ws: Workspace, kept: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x W_t, and what its backward wants kept: x aᵀ, and x W and x S where they are the narrow side."""
    P = ws.mm(x, entries.a.mT, kept)
    if W.shape[1] <= W.shape[2]:
        z = ws.mm(ws.mul(rows.beta, x), W, kept)
        if S is not None and rows.f is not None:
            ws.add_mm(z, ws.mul(rows.f, x), S)
        saved: tuple[Tensor, ...] = (P,)
    else:
        Y = ws.mm(x, W, kept)
        z, saved = ws.mul(rows.beta, Y, kept), (P, Y)
        if S is not None and rows.f is not None:
            Y = ws.mm(x, S, kept)
            z.addcmul_(rows.f, Y)
            saved = (*saved, Y)
    return ws.add_mm(z, ws.mul(rows.C, P), entries.d), saved


def apply_backward(
    Dz: Tensor,
    x: Tensor,
    kept: tuple[Tensor, ...],
    W: Tensor,
    S: Tensor | None,
    rows: Rows,
    entries: Entries,
    DW: Tensor,
    DS: Tensor | None,
    D: Entries,
    ws: Workspace,
) -> tuple[Tensor, Rows]:
    """Backward of `apply`: returns Dx and the gradients of the rows."""
    P = kept[0]
    Df = None
    if W.shape[1] <= W.shape[2]:
        back = ws.mm(Dz, W.mT)
        Dbeta, Dx = _dot(back, x, rows.beta, ws), ws.mul(rows.beta, back)
        ws.add_mm(DW, ws.mul(rows.beta, x).mT, Dz)
        if S is not None and DS is not None and rows.f is not None:
            back = ws.mm(Dz, S.mT)
            Df = _dot(back, x, rows.f, ws)
            Dx.addcmul_(rows.f, back)
            ws.add_mm(DS, ws.mul(rows.f, x).mT, Dz)
    else:
        scaled = ws.mul(rows.beta, Dz)
        Dbeta, Dx = _dot(Dz, kept[1], rows.beta, ws), ws.mm(scaled, W.mT)
        ws.add_mm(DW, x.mT, scaled)
        if S is not None and DS is not None and rows.f is not None:
            scaled = ws.mul(rows.f, Dz)
            Df = _dot(Dz, kept[2], rows.f, ws)
            ws.add_mm(Dx, scaled, S.mT)
            ws.add_mm(DS, x.mT, scaled)
    M = ws.mm(Dz, entries.d.mT)
    Q = ws.mul(rows.C, M)
    ws.add_mm(Dx, Q, entries.a)
    ws.add_mm(D.a, Q.mT, x)
    ws.add_mm(D.d, ws.mul(rows.C, P).mT, Dz)
    return Dx, Rows(Dbeta, Df, _sum_to(M.mul_(P), rows.C))


def transposed(entries: Entries) -> Entries:
    """Entries of the transposed map: inputs and errors change places."""
    return Entries(entries.d, entries.a)


class End(NamedTuple):
    """Coefficients of the tile's last token, shaped to multiply weights (G, 1, 1) and entries (G, E, 1)."""

    beta: Tensor
    f: Tensor
    m: Tensor
    C: Tensor
    n: Tensor


def advance(
    W: Tensor, S: Tensor | None, end: End, entries: Entries, ws: Workspace, into: Workspace
) -> tuple[Tensor, Tensor | None]:
    """W and S at the tile's end, in buffers of `into`."""
    new = into.mul(end.beta, W, kept=True)
    if S is not None:
        new.addcmul_(S, end.f)
        S = ws.add_mm(into.mul(end.m, S, kept=True), *weighed(entries, end.n, ws))
    return ws.add_mm(new, *weighed(entries, end.C, ws)), S


def weighed(entries: Entries, weight: Tensor, ws: Workspace) -> tuple[Tensor, Tensor]:
    """aᵀ and d with the weight of each entry (G, E, 1) on the narrower of the two."""
    a, d = entries
    return (ws.mul(weight, a).mT, d) if a.shape[2] <= d.shape[2] else (a.mT, ws.mul(weight, d))


def advance_backward(
    DW: Tensor, DS: Tensor | None, W: Tensor, S: Tensor | None, end: End, entries: Entries, ws: Workspace
) -> tuple[list[Tensor], Entries]:
    """Backward of `advance`: DW and DS become those of the tile's start, in place.

    Returns the gradients of beta, C, f, m, n, (G,) or (G, E) each (the last three with momentum alone), and of the entries.
    """
    Da, Dd, DC = weighed_backward(DW, entries, end.C, None, ws)
    grads = [ws.mul(DW, W).sum((1, 2)), DC]
    if S is not None and DS is not None:
        Da, Dd, Dn = weighed_backward(DS, entries, end.n, (Da, Dd), ws)
        grads += [ws.mul(DW, S).sum((1, 2)), ws.mul(DS, S).sum((1, 2)), Dn]
        DS.mul_(end.m).addcmul_(DW, end.f)
    DW.mul_(end.beta)
    return grads, Entries(Da, Dd)


def weighed_backward(DW: Tensor, entries: Entries, weight: Tensor, into: tuple[Tensor, Tensor] | None, ws: Workspace):
    """Backward of aᵀ diag(weight) d: gradients of a and d (added to `into`), and of the weight (G, E)."""
    a, d = entries
    if a.shape[2] <= d.shape[2]:
        raw = ws.mm(d, DW.mT)
        Dw = ws.mul(raw, a).sum(-1)
        if into is None:
            return raw.mul_(weight), ws.mm(ws.mul(weight, a), DW), Dw
        return into[0].addcmul_(raw, weight), ws.add_mm(into[1], ws.mul(weight, a), DW), Dw
    raw = ws.mm(a, DW)
    Dw = ws.mul(raw, d).sum(-1)
    if into is None:
        return ws.mm(ws.mul(weight, d), DW.mT), raw.mul_(weight), Dw
    return ws.add_mm(into[0], ws.mul(weight, d), DW.mT), into[1].addcmul_(raw, weight), Dw
