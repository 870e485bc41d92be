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

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Coefficients of the rows a map is applied at: R = one per input, or 1 for all."""

    beta: Tensor  # G R 1
    f: Tensor | None  # G R 1
    C: Tensor  # G R E


class Entries(NamedTuple):
    a: Tensor  # G E d_in
    d: Tensor  # G E d_out


def mm(a: Tensor, b: Tensor, low: torch.dtype | None) -> Tensor:
    """a @ b, in `low` precision where there is one."""
    if low is None:
        return torch.bmm(a, b)
    return torch.bmm(a.to(low), b.to(low)).to(a.dtype)


def add_mm(into: Tensor, a: Tensor, b: Tensor, low: torch.dtype | None) -> Tensor:
    """into += a @ b, in place."""
    if low is None:
        return into.baddbmm_(a, b)
    return into.add_(torch.bmm(a.to(low), b.to(low)))


def _sum_to(grad: Tensor, like: Tensor) -> Tensor:
    """Undo the broadcast of a single row."""
    return grad.sum(1, keepdim=True) if like.shape[1] < grad.shape[1] else grad


def _dot(x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    return _sum_to((x * y).sum(-1, keepdim=True), like)


def apply(x: Tensor, W: Tensor, S: Tensor | None, rows: Rows, entries: Entries, low) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x W_t, and what its backward wants kept: x aᵀ, and x W and x S where they are the narrow side."""
    P = mm(x, entries.a.mT, low)
    if W.shape[1] <= W.shape[2]:
        z = mm(rows.beta * x, W, low)
        if S is not None and rows.f is not None:
            add_mm(z, rows.f * x, S, low)
        kept: tuple[Tensor, ...] = (P,)
    else:
        Y = mm(x, W, low)
        z, kept = rows.beta * Y, (P, Y)
        if S is not None and rows.f is not None:
            Y = mm(x, S, low)
            z.addcmul_(rows.f, Y)
            kept = (*kept, Y)
    return add_mm(z, rows.C * P, entries.d, low), kept


def apply_backward(
    Dz: Tensor, x: Tensor, kept: tuple[Tensor, ...], W: Tensor, S: Tensor | None, rows: Rows, entries: Entries, DW: Tensor, DS: Tensor | None, D: Entries, low
) -> tuple[Tensor, Rows]:
    """Backward of `apply`: returns Dx and the gradients of the rows."""
    P = kept[0]
    Df = None
    if W.shape[1] <= W.shape[2]:
        back = mm(Dz, W.mT, low)
        Dbeta, Dx = _dot(back, x, rows.beta), rows.beta * back
        add_mm(DW, (rows.beta * x).mT, Dz, low)
        if S is not None and DS is not None and rows.f is not None:
            back = mm(Dz, S.mT, low)
            Df = _dot(back, x, rows.f)
            Dx.addcmul_(rows.f, back)
            add_mm(DS, (rows.f * x).mT, Dz, low)
    else:
        scaled = rows.beta * Dz
        Dbeta, Dx = _dot(Dz, kept[1], rows.beta), mm(scaled, W.mT, low)
        add_mm(DW, x.mT, scaled, low)
        if S is not None and DS is not None and rows.f is not None:
            scaled = rows.f * Dz
            Df = _dot(Dz, kept[2], rows.f)
            add_mm(Dx, scaled, S.mT, low)
            add_mm(DS, x.mT, scaled, low)
    M = mm(Dz, entries.d.mT, low)
    Q = rows.C * M
    add_mm(Dx, Q, entries.a, low)
    add_mm(D.a, Q.mT, x, low)
    add_mm(D.d, (rows.C * P).mT, Dz, low)
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


def advance(W: Tensor, S: Tensor | None, end: End, entries: Entries, low) -> tuple[Tensor, Tensor | None]:
    """W and S at the tile's end."""
    new = W * end.beta
    if S is not None:
        new.addcmul_(S, end.f)
        S = add_mm(S * end.m, *weighed(entries, end.n), low)
    return add_mm(new, *weighed(entries, end.C), low), S


def weighed(entries: Entries, weight: Tensor) -> tuple[Tensor, Tensor]:
    """aᵀ and d with the weight of each entry (G, E, 1) on the narrower of the two."""
    a, d = entries
    return ((weight * a).mT, d) if a.shape[2] <= d.shape[2] else (a.mT, weight * d)


def advance_backward(
    DW: Tensor, DS: Tensor | None, W: Tensor, S: Tensor | None, end: End, entries: Entries, low
) -> tuple[list[Tensor], Entries]:
    """Backward of `advance`: DW and DS become those of the tile's start, in place.

    Returns the gradients of beta, C, f, m, n, (G,) or (G, E) each (the last three with momentum alone), and of the entries.
    """
    Da, Dd, DC = weighed_backward(DW, entries, end.C, None, low)
    grads = [(DW * W).sum((1, 2)), DC]
    if S is not None and DS is not None:
        Da, Dd, Dn = weighed_backward(DS, entries, end.n, (Da, Dd), low)
        grads += [(DW * S).sum((1, 2)), (DS * S).sum((1, 2)), Dn]
        DS.mul_(end.m).addcmul_(DW, end.f)
    DW.mul_(end.beta)
    return grads, Entries(Da, Dd)


def weighed_backward(DW: Tensor, entries: Entries, weight: Tensor, into: tuple[Tensor, Tensor] | None, low):
    """Backward of aᵀ diag(weight) d: gradients of a and d (added to `into`), and of the weight (G, E)."""
    a, d = entries
    if a.shape[2] <= d.shape[2]:
        raw = mm(d, DW.mT, low)
        Dw = (raw * a).sum(-1)
        if into is None:
            return raw.mul_(weight), mm(weight * a, DW, low), Dw
        return into[0].addcmul_(raw, weight), add_mm(into[1], weight * a, DW, low), Dw
    raw = mm(a, DW, low)
    Dw = (raw * d).sum(-1)
    if into is None:
        return mm(weight * d, DW.mT, low), raw.mul_(weight), Dw
    return add_mm(into[0], weight * d, DW.mT, low), into[1].addcmul_(raw, weight), Dw
