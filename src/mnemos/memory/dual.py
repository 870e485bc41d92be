"""The algebra of one fast map inside a tile: applied in dual form, moved to the tile's end, and the backward of both.

    x W_t  = beta (x W) + f (x S) - (C * x aᵀ) d              W_t is never built
    t W_tᵀ = beta (t Wᵀ) + f (t Sᵀ) - (C * t dᵀ) a
    W_end  = beta W + f S - aᵀ (C d),   S_end = m S - aᵀ (n d)

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


def add_mm(into: Tensor, a: Tensor, b: Tensor, low: torch.dtype | None, sign: int = 1) -> Tensor:
    """into += sign * a @ b, in place."""
    if low is None:
        return into.baddbmm_(a, b, alpha=sign)
    return into.add_(torch.bmm(a.to(low), b.to(low)), alpha=sign)


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
    return add_mm(z, rows.C * P, entries.d, low, -1), kept


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
    add_mm(Dx, Q, entries.a, low, -1)
    add_mm(D.a, Q.mT, x, low, -1)
    add_mm(D.d, (rows.C * P).mT, Dz, low, -1)
    return Dx, Rows(Dbeta, Df, _sum_to(M.mul_(P).neg_(), rows.C))


def transposed(entries: Entries) -> Entries:
    """Entries of the transposed map: inputs and errors change places."""
    return Entries(entries.d, entries.a)


def advance(W: Tensor, S: Tensor | None, beta: Tensor, f: Tensor, m: Tensor, C: Tensor, n: Tensor, entries: Entries, low) -> tuple[Tensor, Tensor | None]:
    """W and S at the tile's end. beta, f, m: (G,); C, n: (G, E)."""
    new = W * beta[:, None, None]
    if S is not None:
        new.addcmul_(S, f[:, None, None])
        S = add_mm(S * m[:, None, None], *weighed(entries, n), low, -1)
    return add_mm(new, *weighed(entries, C), low, -1), S


def weighed(entries: Entries, weight: Tensor) -> tuple[Tensor, Tensor]:
    """aᵀ and d with the weight of each entry on the narrower of the two."""
    a, d = entries
    if a.shape[2] <= d.shape[2]:
        return (weight.unsqueeze(-1) * a).mT, d
    return a.mT, weight.unsqueeze(-1) * d


def advance_backward(
    DW: Tensor, DS: Tensor | None, W: Tensor, S: Tensor | None, beta: Tensor, f: Tensor, m: Tensor, C: Tensor, n: Tensor, entries: Entries, low
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None], Entries]:
    """Backward of `advance`. DW and DS become those of the tile's start, in place (they may be new tensors: use the result).

    Returns (DW, DS), the gradients of (beta, f, m, C, n), and those of the entries.
    """
    Da, Dd, DC = weighed_backward(DW, entries, C, None, low)
    Dbeta, Df, Dm, Dn = (DW * W).sum((1, 2)), None, None, None
    if S is not None and DS is not None:
        Da, Dd, Dn = weighed_backward(DS, entries, n, (Da, Dd), low)
        Df, Dm = (DW * S).sum((1, 2)), (DS * S).sum((1, 2))
        DS.mul_(m[:, None, None]).addcmul_(DW, f[:, None, None])
    DW.mul_(beta[:, None, None])
    return DW, DS, (Dbeta, Df, Dm, DC, Dn), Entries(Da, Dd)


def weighed_backward(DW: Tensor, entries: Entries, weight: Tensor, into: tuple[Tensor, Tensor] | None, low):
    """Backward of -aᵀ diag(weight) d: gradients of a and d (added to `into`), and of the weight."""
    a, d = entries
    w = weight.unsqueeze(-1)
    if a.shape[2] <= d.shape[2]:
        raw, scaled, other = mm(d, DW.mT, low), w * a, DW
        Dw, narrow = (raw * a).sum(-1).neg_(), raw.mul_(w).neg_()
    else:
        raw, scaled, other = mm(a, DW, low), w * d, DW.mT
        Dw, narrow = (raw * d).sum(-1).neg_(), raw.mul_(w).neg_()
    if into is None:
        wide = mm(scaled, other, low).neg_()
        return (narrow, wide, Dw) if a.shape[2] <= d.shape[2] else (wide, narrow, Dw)
    Da, Dd = into
    if a.shape[2] <= d.shape[2]:
        return Da.add_(narrow), add_mm(Dd, scaled, other, low, -1), Dw
    return add_mm(Da, scaled, other, low, -1), Dd.add_(narrow), Dw
