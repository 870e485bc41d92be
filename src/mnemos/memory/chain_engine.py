"""The fast engine: chains of fast maps under rule "gd", with a backward written by hand.

Same work as `autograd_engine`, section 4 of docs/theory.md line by line. Saved for backward: the inputs, the hidden
pre-activations, and the state at every few tiles; nothing of the size of the weights is kept per token.

N tiles, G = batch x heads, L tokens and E entries of a tile, J sub-chunks. The state of map l is stacked as
H = [W; S], (G, 2 d_in, d_out), or W alone without momentum. Capital D before a name is "gradient with respect to".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .joints import JOINTS
from .rules import Coefficients
from .spec import MemorySpec
from .tiles import Piece


class Plan(NamedTuple):
    """Everything about a run that is not a tensor."""

    joints: tuple
    l2: bool
    before: bool
    momentum: bool
    fresh: bool
    period: int
    subchunks: int
    stride: int
    save_every: int
    low: torch.dtype | None
    reads: bool


def run(
    spec: MemorySpec,
    piece: Piece,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    coefficients: Coefficients,
    W: list[Tensor],
    S: list[Tensor],
    A: list[Tensor],
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """Run the tiles of one piece. q: (N, G, L, D) or None, k: (N, G, E, D), v: (N, G, E, V)."""
    chain = spec.network.chain
    assert chain is not None
    groups = chain.groups
    plan = plan_of(spec, piece, q, k, momentum=bool(S))
    given = [] if piece.fresh else _fuse(A, groups)
    query = k.new_zeros(0) if q is None else q
    with torch.autocast(k.device.type, enabled=False):
        y, *state = _Chain.apply(plan, query, k, v, *coefficients, *_fuse(W, groups), *_fuse(S, groups), *given)
    D = len(groups)
    return (None if q is None else y), _split(state[:D], groups), _split(state[D:], groups)


def plan_of(spec: MemorySpec, piece: Piece, q: Tensor | None, k: Tensor, momentum: bool) -> Plan:
    chain = spec.network.chain
    assert chain is not None
    low = None
    if torch.is_autocast_enabled(k.device.type) and k.dtype == torch.float32:
        low = torch.get_autocast_dtype(k.device.type)
    return Plan(
        joints=tuple(JOINTS[name] for name in chain.joints),
        l2=spec.objective == "l2",
        before=spec.read == "before",
        momentum=momentum,
        fresh=piece.fresh,
        period=piece.period,
        subchunks=piece.subchunks,
        stride=piece.stride,
        save_every=_save_every(spec, piece),
        low=low,
        reads=q is not None,
    )


def _save_every(spec: MemorySpec, piece: Piece) -> int:
    """Tiles between two saved states: few enough that the states do not outweigh the saved activations by much."""
    weights = sum(i * o for i, o in spec.shapes) * (2 if spec.momentum else 1)
    activations = (2 * piece.length + piece.subchunks * (spec.window - 1)) * sum(o for _, o in spec.shapes)
    return max(1, min(round(weights / (4 * activations)), int(piece.tiles**0.5)))


def _fuse(maps: list[Tensor], groups: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """Maps that share an input become one."""
    return [torch.cat([maps[i] for i in group], -1) if len(group) > 1 else maps[group[0]] for group in groups] if maps else []


def _split(fused: list[Tensor], groups: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    return [part for x, group in zip(fused, groups) for part in (x.chunk(len(group), -1) if len(group) > 1 else (x,))]


def _mm(a: Tensor, b: Tensor, low: torch.dtype | None) -> Tensor:
    if low is None:
        return torch.bmm(a, b)
    return torch.bmm(a.to(low), b.to(low)).to(a.dtype)


def _add_mm(into: Tensor, a: Tensor, b: Tensor, low: torch.dtype | None, sign: int = 1) -> None:
    """into += sign * a @ b, in place."""
    if low is None:
        into.baddbmm_(a, b, alpha=sign)
    else:
        into.add_(torch.bmm(a.to(low), b.to(low)), alpha=sign)


class Rows(NamedTuple):
    """Coefficients of the rows a map is applied at: R = one per input, or 1 for all."""

    beta: Tensor  # G R 1
    f: Tensor | None  # G R 1
    C: Tensor  # G R E


def _dual(x: Tensor, H: Tensor, rows: Rows, a: Tensor, d: Tensor, low) -> tuple[Tensor, Tensor]:
    """x W_t = beta (x W) + f (x S) - (C * x aᵀ) d, without W_t. Returns it and x aᵀ."""
    z = _mm(_stack_rows(x, rows), H, low)
    P = _mm(x, a.mT, low)
    _add_mm(z, rows.C * P, d, low, -1)
    return z, P


def _stack_rows(x: Tensor, rows: Rows) -> Tensor:
    return rows.beta * x if rows.f is None else torch.cat([rows.beta * x, rows.f * x], -1)


def _weigh_rows(X: Tensor, rows: Rows, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Backward of `_stack_rows`: gradients of x, beta and f from that of the stacked rows."""
    if rows.f is None:
        return rows.beta * X, _reduce((X * x).sum(-1, keepdim=True), rows.beta), None
    X1, X2 = X.chunk(2, -1)
    Dx = torch.addcmul(rows.beta * X1, rows.f, X2)
    return Dx, _reduce((X1 * x).sum(-1, keepdim=True), rows.beta), _reduce((X2 * x).sum(-1, keepdim=True), rows.f)


def _reduce(grad: Tensor, like: Tensor) -> Tensor:
    return grad.sum(1, keepdim=True) if like.shape[1] < grad.shape[1] else grad


def _dual_backward(Dz: Tensor, x: Tensor, H: Tensor, rows: Rows, P: Tensor, a: Tensor, d: Tensor, DH: Tensor, Da: Tensor, Dd: Tensor, low):
    """Backward of `_dual`: adds to DH, Da and Dd, returns Dx and the gradients of the rows."""
    _add_mm(DH, _stack_rows(x, rows).mT, Dz, low)
    M = _mm(Dz, d.mT, low)
    _add_mm(Dd, (rows.C * P).mT, Dz, low, -1)
    Q = rows.C * M
    Dx, Dbeta, Df = _weigh_rows(_mm(Dz, H.mT, low), rows, x)
    _add_mm(Dx, Q, a, low, -1)
    _add_mm(Da, Q.mT, x, low, -1)
    return Dx, Rows(Dbeta, Df, _reduce(P.mul(M).neg_(), rows.C))


def _dual_transposed(t: Tensor, H: Tensor, rows: Rows, a: Tensor, d: Tensor, low) -> Tensor:
    """t W_tᵀ = beta (t Wᵀ) + f (t Sᵀ) - (C * t dᵀ) a."""
    Y = _mm(t, H.mT, low)
    if rows.f is None:
        u = rows.beta * Y
    else:
        Y1, Y2 = Y.chunk(2, -1)
        u = torch.addcmul(rows.beta * Y1, rows.f, Y2)
    _add_mm(u, rows.C * _mm(t, d.mT, low), a, low, -1)
    return u


def _dual_transposed_backward(Du: Tensor, t: Tensor, H: Tensor, rows: Rows, a: Tensor, d: Tensor, DH: Tensor, Da: Tensor, Dd: Tensor, low):
    """Backward of `_dual_transposed`: adds to DH, Da and Dd, returns Dt and the gradients of the rows."""
    stacked = _stack_rows(Du, rows)
    Dt = _mm(stacked, H, low)
    _add_mm(DH, stacked.mT, t, low)
    _, Dbeta, Df = _weigh_rows(_mm(t, H.mT, low), rows, Du)
    P, M = _mm(t, d.mT, low), _mm(Du, a.mT, low)
    Q = rows.C * M
    _add_mm(Dt, Q, d, low, -1)
    _add_mm(Dd, Q.mT, t, low, -1)
    _add_mm(Da, (rows.C * P).mT, Du, low, -1)
    return Dt, Rows(Dbeta, Df, _reduce(P.mul_(M).neg_(), rows.C))


class _Anchor:
    """The weights that the keys of sub-chunk j meet: materialised matrices for the first, dual form for the others."""

    def __init__(self, plan: Plan, j: int, A: list[Tensor], H: list[Tensor], co: list[Tensor], a: list[Tensor], d: list[Tensor]):
        self.plan, self.j, self.A, self.H = plan, j, A, H
        if j:
            C, beta, f = co[:3]
            seen = j * (C.shape[-1] // plan.subchunks)
            row = slice(j * plan.stride, j * plan.stride + 1)
            self.seen, self.row = seen, row
            self.rows = Rows(beta[:, row, None], f[:, row, None] if plan.momentum else None, C[:, row, :seen])
            self.a, self.d = [x[:, :seen] for x in a], [x[:, :seen] for x in d]

    def apply(self, l: int, x: Tensor) -> Tensor:
        low = self.plan.low
        return _dual(x, self.H[l], self.rows, self.a[l], self.d[l], low)[0] if self.j else _mm(x, self.A[l], low)

    def transposed(self, l: int, t: Tensor) -> Tensor:
        low = self.plan.low
        return _dual_transposed(t, self.H[l], self.rows, self.a[l], self.d[l], low) if self.j else _mm(t, self.A[l].mT, low)

    def apply_backward(self, l: int, Dz: Tensor, x: Tensor, grads: _Grads) -> Tensor:
        low = self.plan.low
        if not self.j:
            _add_mm(grads.A[l], x.mT, Dz, low)
            return _mm(Dz, self.A[l].mT, low)
        P = _mm(x, self.a[l].mT, low)
        Da, Dd = grads.a[l][:, : self.seen], grads.d[l][:, : self.seen]
        Dx, rows = _dual_backward(Dz, x, self.H[l], self.rows, P, self.a[l], self.d[l], grads.H[l], Da, Dd, low)
        grads.add_rows(rows, self.row, self.seen)
        return Dx

    def transposed_backward(self, l: int, Du: Tensor, t: Tensor, grads: _Grads) -> Tensor:
        low = self.plan.low
        if not self.j:
            _add_mm(grads.A[l], Du.mT, t, low)
            return _mm(Du, self.A[l], low)
        Da, Dd = grads.a[l][:, : self.seen], grads.d[l][:, : self.seen]
        Dt, rows = _dual_transposed_backward(Du, t, self.H[l], self.rows, self.a[l], self.d[l], grads.H[l], Da, Dd, low)
        grads.add_rows(rows, self.row, self.seen)
        return Dt


class _Grads:
    """Gradients of one tile while its backward runs."""

    def __init__(self, H: list[Tensor], A: list[Tensor], a: list[Tensor], d: list[Tensor], C: Tensor, beta: Tensor, f: Tensor):
        self.H, self.A, self.a, self.d, self.C, self.beta, self.f = H, A, a, d, C, beta, f

    def add_rows(self, rows: Rows, at: slice, seen: int) -> None:
        self.C[:, at, :seen] += rows.C
        self.beta[:, at] += rows.beta.squeeze(-1)
        if rows.f is not None:
            self.f[:, at] += rows.f.squeeze(-1)


def _block(x: Tensor, j: int, J: int) -> Tensor:
    """Entries of sub-chunk j."""
    size = x.shape[1] // J
    return x[:, j * size : (j + 1) * size] if J > 1 else x


def _write_keys(plan: Plan, k: Tensor, v: Tensor, co: list[Tensor], A: list[Tensor], H: list[Tensor]):
    """Inputs a and errors d of every map at the anchors; and what backward needs: pre-activations z, back-propagated u."""
    J, D = plan.subchunks, len(H)
    if J == 1:
        anchor = _Anchor(plan, 0, A, H, co, [], [])
        return _keys_at(plan, anchor, k, v, D)
    joined: list[list[Tensor]] = [[], [], [], []]
    for j in range(J):
        anchor = _Anchor(plan, j, A, H, co, joined[0], joined[1])
        parts = _keys_at(plan, anchor, _block(k, j, J), _block(v, j, J), D)
        for old, new in zip(joined, parts):
            old[:] = [torch.cat([x, y], 1) for x, y in zip(old, new)] if j else new
    return tuple(joined)


def _keys_at(plan: Plan, anchor: _Anchor, k: Tensor, v: Tensor, D: int):
    a, z = [k], []
    for l in range(D):
        if l == D - 1 and not plan.l2:
            break
        z.append(anchor.apply(l, a[l]))
        if l < D - 1:
            a.append(plan.joints[l].value(z[l]))
    d: list[Tensor] = [z.pop() - v if plan.l2 else -v]
    u: list[Tensor] = []
    for l in range(D - 1, 0, -1):
        u.insert(0, anchor.transposed(l, d[0]))
        d.insert(0, plan.joints[l - 1].pull(z[l - 1], u[0]))
    return a, d, z, u


def _keys_at_backward(plan: Plan, anchor: _Anchor, a, d, z, u, Da, Dd, grads: _Grads) -> tuple[Tensor, Tensor]:
    """Backward of `_keys_at` from the gradients Da, Dd of its results. Returns Dk and Dv."""
    D = len(a)
    Dz: list[Tensor] = []
    for l in range(D - 1):
        Du, curve = plan.joints[l].second(z[l], u[l], Dd[l])
        Dz.append(curve)
        Dd[l + 1] = Dd[l + 1] + anchor.transposed_backward(l + 1, Du, d[l + 1], grads)
    Dv = -Dd[-1]
    down = Da[-1]
    if plan.l2:
        down = down + anchor.apply_backward(D - 1, Dd[-1], a[-1], grads)
    for l in range(D - 2, -1, -1):
        total = Dz[l].add_(plan.joints[l].pull(z[l], down))
        down = Da[l] + anchor.apply_backward(l, total, a[l], grads)
    return down, Dv


def _read_rows(plan: Plan, co: list[Tensor]) -> tuple[Rows, slice]:
    C, beta, f = co[:3]
    at = slice(0, C.shape[1] - 1) if plan.before else slice(1, C.shape[1])
    return Rows(beta[:, at, None], f[:, at, None] if plan.momentum else None, C[:, at]), at


def _read(plan: Plan, q: Tensor, co: list[Tensor], H: list[Tensor], a: list[Tensor], d: list[Tensor]):
    """y of every token of the tile; and the pre-activations and scores for backward."""
    rows, _ = _read_rows(plan, co)
    x, z, P = q, [], []
    for l in range(len(H)):
        out, scores = _dual(x, H[l], rows, a[l], d[l], plan.low)
        P.append(scores)
        if l < len(H) - 1:
            z.append(out)
            x = plan.joints[l].value(out)
    return out, z, P


def _read_backward(plan: Plan, Dy: Tensor, q: Tensor, co, H, a, d, z, P, grads: _Grads) -> Tensor:
    rows, at = _read_rows(plan, co)
    Dz, E = Dy, rows.C.shape[-1]
    for l in range(len(H) - 1, -1, -1):
        x = plan.joints[l - 1].value(z[l - 1]) if l else q
        Dx, Drows = _dual_backward(Dz, x, H[l], rows, P[l], a[l], d[l], grads.H[l], grads.a[l], grads.d[l], plan.low)
        grads.add_rows(Drows, at, E)
        Dz = plan.joints[l - 1].pull(z[l - 1], Dx) if l else Dx
    return Dz


def _advance(plan: Plan, co: list[Tensor], H: list[Tensor], a: list[Tensor], d: list[Tensor]) -> list[Tensor]:
    """State at the tile's end: W = beta W + f S - (C a)ᵀ d, S = m S - (n a)ᵀ d."""
    return [_end_mm(plan, co, a[l], d[l], _decay(plan, co, h)) for l, h in enumerate(H)]


def _decay(plan: Plan, co: list[Tensor], h: Tensor) -> Tensor:
    beta = co[1][:, -1, None, None]
    if not plan.momentum:
        return beta * h
    f, m = co[2][:, -1, None, None], co[4][:, None, None]
    half = h.shape[1] // 2
    new = torch.empty_like(h)
    torch.mul(h[:, :half], beta, out=new[:, :half])
    new[:, :half].addcmul_(h[:, half:], f)
    torch.mul(h[:, half:], m, out=new[:, half:])
    return new


def _end_rows(plan: Plan, co: list[Tensor], a: Tensor) -> Tensor:
    last = co[0][:, -1, :, None] * a
    return torch.cat([last, co[3].unsqueeze(-1) * a], -1) if plan.momentum else last


def _end_mm(plan: Plan, co: list[Tensor], a: Tensor, d: Tensor, new: Tensor) -> Tensor:
    _add_mm(new, _end_rows(plan, co, a).mT, d, plan.low, -1)
    return new


def _advance_backward(plan: Plan, DH: list[Tensor], co: list[Tensor], H, a, d, Dco: list[Tensor]):
    """Backward of `_advance`. DH becomes the gradient of the state before the tile, in place; returns Da and Dd."""
    C, beta, f, n, m = co
    DC, Dbeta, Df, Dn, Dm = Dco
    Da, Dd = [], []
    for l, h in enumerate(H):
        DX = _mm(d[l], DH[l].mT, plan.low).neg_()  # G E 2d_in
        Dd.append(_mm(_end_rows(plan, co, a[l]), DH[l], plan.low).neg_())
        last = C[:, -1, :, None]
        if not plan.momentum:
            Da.append(last * DX)
            DC[:, -1] += (DX * a[l]).sum(-1)
            Dbeta[:, -1] += _inner(DH[l], h)
            DH[l].mul_(beta[:, -1, None, None])
            continue
        DX1, DX2 = DX.chunk(2, -1)
        Da.append(torch.addcmul(last * DX1, n.unsqueeze(-1), DX2))
        DC[:, -1] += (DX1 * a[l]).sum(-1)
        Dn += (DX2 * a[l]).sum(-1)
        half = h.shape[1] // 2
        DW, DS, W, S = DH[l][:, :half], DH[l][:, half:], h[:, :half], h[:, half:]
        Dbeta[:, -1] += _inner(DW, W)
        Df[:, -1] += _inner(DW, S)
        Dm += _inner(DS, S)
        DS.mul_(m[:, None, None]).addcmul_(DW, f[:, -1, None, None])
        DW.mul_(beta[:, -1, None, None])
    return Da, Dd


def _inner(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum((1, 2))


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: Plan, q, k, v, C, beta, f, n, m, *mats):
        D = len(plan.joints) + 1
        co = [C, beta, f, n, m]
        H = [torch.cat([mats[l], mats[D + l]], 1) for l in range(D)] if plan.momentum else list(mats[:D])
        A = list(mats[-D:])
        keep = any(ctx.needs_input_grad)
        outputs, states, saved = [], [], []
        for i in range(k.shape[0]):
            if plan.fresh and i % plan.period == 0:
                A = _weights(plan, H)
            if keep and i % plan.save_every == 0:
                states += H if plan.period == 1 else [*H, *A]
            tile = [x[i] for x in co]
            a, d, z, u = _write_keys(plan, k[i], v[i], tile, A, H)
            zq, P = [], []
            if plan.reads:
                y, zq, P = _read(plan, q[i], tile, H, a, d)
                outputs.append(y)
            if keep:
                saved += [*z, *u, d[-1], *zq, *P]
            H = _advance(plan, tile, H, a, d)
        if keep:
            given = [] if plan.fresh else A
            ctx.plan, ctx.layers = plan, D
            ctx.counts = (len(states), len(saved) // max(1, k.shape[0]), len(given))
            ctx.save_for_backward(q, k, v, *co, *given, *states, *saved)
        y = torch.stack(outputs) if plan.reads else k.new_zeros(0)
        weights = [w.contiguous() for w in _weights(plan, H)]
        momenta = [h[:, h.shape[1] // 2 :].contiguous() for h in H] if plan.momentum else []
        return (y, *weights, *momenta)

    @staticmethod
    @once_differentiable
    def backward(ctx, Dy, *Dend):
        plan, D = ctx.plan, ctx.layers
        q, k, v, C, beta, f, n, m, *rest = ctx.saved_tensors
        states_count, per_tile, given_count = ctx.counts
        given, states, saved = rest[:given_count], rest[given_count : given_count + states_count], rest[given_count + states_count :]
        co = [C, beta, f, n, m]
        Dco = [torch.zeros_like(x) for x in co]
        Dq, Dk, Dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        DH = [torch.cat([Dend[l], Dend[D + l]], 1) for l in range(D)] if plan.momentum else [x.clone() for x in Dend[:D]]
        DA = None
        N, J, step = k.shape[0], plan.subchunks, plan.save_every
        width = D if plan.period == 1 else 2 * D
        for first in range((N - 1) // step * step, -1, -step):
            last = min(first + step, N)
            at = first // step * width
            group = _replay(plan, co, k, states[at : at + width], saved, per_tile, first, last, given, D)
            for i in range(last - 1, first - 1, -1):
                H, A, a, d, z, u, zq, P = group[i - first]
                tile, Dtile = [x[i] for x in co], [x[i] for x in Dco]
                Da, Dd = _advance_backward(plan, DH, tile, H, a, d, Dtile)
                if plan.fresh and plan.period == 1:
                    DA_tile = _weights(plan, DH)
                else:
                    DA = [torch.zeros_like(x) for x in A] if DA is None else DA
                    DA_tile = DA
                grads = _Grads(DH, DA_tile, Da, Dd, *Dtile[:3])
                if plan.reads:
                    Dq[i] = _read_backward(plan, Dy[i], q[i], tile, H, a, d, zq, P, grads)
                for j in range(J - 1, -1, -1):
                    anchor = _Anchor(plan, j, A, H, tile, a, d)
                    parts = [[_block(x, j, J) for x in xs] for xs in (a, d, z, u, grads.a, grads.d)]
                    Dk_part, Dv_part = _keys_at_backward(plan, anchor, *parts, grads)
                    _block(Dk[i], j, J).copy_(Dk_part)
                    _block(Dv[i], j, J).copy_(Dv_part)
                if plan.fresh and plan.period > 1 and i % plan.period == 0:
                    for w, x in zip(_weights(plan, DH), DA):
                        w.add_(x)
                    DA = None
        DW = _weights(plan, DH)
        DS = [h[:, h.shape[1] // 2 :] for h in DH] if plan.momentum else []
        Dgiven = [] if plan.fresh else DA
        return (None, Dq if plan.reads else None, Dk, Dv, *Dco, *DW, *DS, *Dgiven)


def _weights(plan: Plan, H: list[Tensor]) -> list[Tensor]:
    """The W halves of the stacked states, as views."""
    return [h[:, : h.shape[1] // 2] for h in H] if plan.momentum else list(H)


def _replay(plan: Plan, co, k, H, saved, per_tile: int, first: int, last: int, given, D: int) -> list[tuple]:
    """States, anchors and entries of the tiles first..last-1, from the saved state and pre-activations."""
    tiles = []
    A = given if plan.period == 1 else H[D:]
    H = H[:D]
    for i in range(first, last):
        if plan.fresh and i % plan.period == 0:
            A = _weights(plan, H)
        mine = list(saved[i * per_tile : (i + 1) * per_tile])
        z, u, error = mine[: D - 1], mine[D - 1 : 2 * D - 2], mine[2 * D - 2]
        zq, P = mine[2 * D - 1 : 3 * D - 2], mine[3 * D - 2 :]
        a = [k[i], *(joint.value(x) for joint, x in zip(plan.joints, z))]
        d = [*(joint.pull(x, y) for joint, x, y in zip(plan.joints, z, u)), error]
        tiles.append((H, A, a, d, z, u, zq, P))
        if i + 1 < last:
            H = _advance(plan, [x[i] for x in co], H, a, d)
    return tiles
