"""The fast engine of rule "muon": chains, one Newton–Schulz step per commit interval, a backward written by hand.

Keys are the same as in `chain_engine`; reads need no dual form, because the weights only decay between commits.
N tiles (commit intervals, or a part of one), G = batch x heads, L tokens and E entries of a tile.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from .anchors import Plain, run_keys, run_keys_backward
from .chain_plan import Plan, pack, plan_of, rows_of, unpack
from .derivatives import SCAN, first_order_only
from .mode import Mode, muon_kernel
from .newton_schulz import Polynomial, orthogonalise, orthogonalise_backward, polynomials
from .rules import Coefficients
from .spec import NS_COEFFICIENTS, MemorySpec
from .tile import Side
from .tiles import Piece
from .workspace import Workspace, without_autocast

TOKENS_PER_STATE = 64  # states are saved at least this many tokens apart,
LARGE_STATE = (
    1 << 20
)  # and twice as many where a head's weights have so many numbers: there memory is the scarcer thing


class MuonPlan(NamedTuple):
    chain: Plan
    commit: bool
    parts: tuple[int, ...]  # matrices side by side in each fused map
    coefficients: tuple[Polynomial, ...]  # of each iteration


def run(
    spec: MemorySpec,
    piece: Piece,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    coefficients: Coefficients,
    lr: Tensor,
    W: list[Tensor],
    S: list[Tensor],
    A: list[Tensor],
    mode: Mode,
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """Run the tiles of one piece. q: (N, G, L, D) or None, k: (N, G, E, D), v: (N, G, E, V), lr: (N, G, L)."""
    chain = spec.network.chain
    assert chain is not None
    apart = TOKENS_PER_STATE * (2 if sum(i * o for i, o in spec.shapes) >= LARGE_STATE else 1)
    save_every = max(1, min(apart // piece.stride, int(piece.tiles**0.5)))
    plan = MuonPlan(
        chain=plan_of(spec, piece, q is not None, bool(S), mode)._replace(save_every=save_every),
        commit=piece.commit,
        parts=tuple(len(group) for group in chain.groups),
        coefficients=polynomials(NS_COEFFICIENTS[spec.ns_coefficients], spec.ns_steps),
    )
    form = chain.groups, plan.chain.widens
    given = [] if piece.fresh else pack(A, *form)
    fused = pack(W, *form)
    momenta = pack(S, *form) if S else [torch.zeros_like(w) for w in fused]
    query = k.new_zeros(0) if q is None else q
    _, beta, _, n, m = coefficients
    y, *state = (muon_kernel() if mode.native else _Muon).apply(
        plan, query, k, v, beta, -n, m, lr[..., -1], *fused, *momenta, *given
    )
    D = len(fused)
    return (None if q is None else y), unpack(state[:D], *form), unpack(state[D:], *form) if S else []


def _stack(plan: MuonPlan, fused: list[Tensor]) -> list[Tensor]:
    """All matrices by themselves, wide, those of one shape stacked: what Newton–Schulz runs on."""
    single = [part for x, n, up in zip(fused, plan.parts, plan.chain.widens) for part in x.chunk(n, 2 if up else 1)]
    shapes: dict[torch.Size, list[Tensor]] = {}
    for x in single:
        x = x.mT if x.shape[1] > x.shape[2] else x
        shapes.setdefault(x.shape, []).append(x)
    return [torch.cat(xs) for xs in shapes.values()]


def _unstack(plan: MuonPlan, stacks: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Inverse of `_stack`."""
    G = like[0].shape[0]
    shapes = {stack.shape[1:]: iter(stack.split(G)) for stack in stacks}
    fused = []
    for x, n, up in zip(like, plan.parts, plan.chain.widens):
        rows, columns = (x.shape[1], x.shape[2] // n) if up else (x.shape[1] // n, x.shape[2])
        tall = rows > columns
        wide = torch.Size((columns, rows) if tall else (rows, columns))
        parts = [next(shapes[wide]) for _ in range(n)]
        parts = [part.mT if tall else part for part in parts]
        fused.append(torch.cat(parts, 2 if up else 1) if n > 1 else parts[0])
    return fused


def _gather_momentum(plan: Plan, n: Tensor, m: Tensor, S: list[Tensor], side: Side, ws: Workspace) -> list[Tensor]:
    result = []
    for s, a, d, up in zip(S, *side, plan.widens):
        thin, wide = (a, d) if up else (d, a)
        # exact: Newton-Schulz makes the smallest directions of S as large as all others, and with them what rounding has added
        result.append(ws.add_mm(m[:, None, None] * s, ws.mul(n.unsqueeze(-1), thin).mT, wide, exact=True))
    return result


def _new_side(plan: Plan, k: Tensor, W: list[Tensor], ws: Workspace) -> tuple[Side, list[Tensor], list[Tensor]]:
    """Room for the entries of a tile, with the keys in place, and for z and u of its joints."""
    G, E, _ = k.shape
    sizes = [tuple(w.shape[1:]) if up else tuple(w.shape[:0:-1]) for w, up in zip(W, plan.widens)]
    a = [k, *(ws.empty(G, E, d_in) for d_in, _ in sizes[1:])]
    d = [ws.empty(G, E, d_out, kept=l == len(W) - 1) for l, (_, d_out) in enumerate(sizes)]
    z = [ws.empty(G, E, d_out, kept=True) for _, d_out in sizes[:-1]]
    u = [ws.empty(G, E, d_in, kept=True) for d_in, _ in sizes[1:]]
    return Side(a, d), z, u


def _apply(plan: Plan, l: int, x: Tensor, w: Tensor, ws: Workspace, kept: bool = False) -> Tensor:
    return ws.mm(x, w if plan.widens[l] else w.mT, kept)


def _read(plan: Plan, q: Tensor, beta: Tensor, W: list[Tensor], ws: Workspace) -> tuple[Tensor, list[Tensor]]:
    """Reads of tokens whose weights are beta W. beta: (G, R, 1)."""
    x, z = q, []
    for l, w in enumerate(W):
        out = _apply(plan, l, ws.mul(beta, x), w, ws, kept=True)
        if l < len(W) - 1:
            z.append(out)
            x = plan.joints[l].value(out, ws)
    return out, z


def _read_backward(
    plan: Plan, Dy: Tensor, q: Tensor, beta: Tensor, W, z, DW: list[Tensor], ws: Workspace
) -> tuple[Tensor, Tensor]:
    """Backward of `_read`: adds to DW, returns Dq and Dbeta (G, R)."""
    Dz, Dbeta = Dy, torch.zeros_like(beta)
    anchor = Plain(W, plan.widens, ws, DW)
    for l in range(len(W) - 1, -1, -1):
        x = plan.joints[l - 1].value(z[l - 1], ws) if l else q
        back = ws.empty(*x.shape).zero_()
        anchor.apply_backward(l, Dz, ws.mul(beta, x), back)
        Dbeta += ws.mul(back, x).sum(-1, keepdim=True)
        Dx = ws.mul(beta, back)
        Dz = plan.joints[l - 1].pull(z[l - 1], Dx, ws) if l else Dx
    return Dz, Dbeta.squeeze(-1)


def _read_spans(plan: MuonPlan, L: int) -> tuple[slice | None, bool]:
    """Which tokens read the old weights, and whether the last one reads the new."""
    if plan.commit and not plan.chain.before:
        return (slice(0, L - 1) if L > 1 else None), True
    return slice(0, L), False


def _old_beta(plan: MuonPlan, beta: Tensor, span: slice) -> Tensor:
    shift = 0 if plan.chain.before else 1
    return beta[:, span.start + shift : span.stop + shift, None]


def _commit(plan: MuonPlan, beta: Tensor, lr: Tensor, W: list[Tensor], moved: list[Tensor]):
    """Weights at the tile's end, and the Gram matrices of the Newton–Schulz step."""
    new = [beta[:, -1, None, None] * w for w in W]
    if not plan.commit:
        return new, []
    steps, grams = [], []
    for stack in _stack(plan, moved):
        step, gram = orthogonalise(stack, plan.coefficients)
        steps.append(step)
        grams += gram
    for w, step in zip(new, _unstack(plan, steps, W)):
        w.addcmul_(step, lr[:, None, None])
    return new, grams


class _Muon(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: MuonPlan, q, k, v, beta, n, m, lr, *mats):
        chain = plan.chain
        D = len(chain.joints) + 1
        W, S, A = list(mats[:D]), list(mats[D : 2 * D]), list(mats[-D:])
        keep = chain.grad and any(ctx.needs_input_grad)
        ys, states, saved = [], [], []
        N, ws = k.shape[0], Workspace(k, chain.low, keeping=keep)
        for i in range(N):
            ws.reset()
            if chain.fresh and i % chain.period == 0:
                A = W
            if keep and i % chain.save_every == 0:
                states.append([*W, *S, *A])
            side, z, u = _new_side(chain, k[i], W, ws)
            run_keys(chain.joints, chain.l2, Plain(A, chain.widens, ws), v[i], side, z, u, ws)
            moved = _gather_momentum(chain, n[i], m[i], S, side, ws)
            new, grams = _commit(plan, beta[i], lr[i], W, moved)
            zq: list[Tensor] = []
            if chain.reads:
                L = q.shape[2]
                span, last = _read_spans(plan, L)
                parts = []
                if span is not None:
                    y, zq = _read(chain, q[i][:, span], _old_beta(plan, beta[i], span), W, ws)
                    parts.append(y)
                if last:
                    y, zl = _read(chain, q[i][:, L - 1 :], beta[i][:, :1, None], new, ws)
                    parts.append(y)
                    zq = [torch.cat([x, y], 1) for x, y in zip(zq, zl)] if span is not None else zl
                ys.append(torch.cat(parts, 1))
            if keep:
                saved.append([*z, *u, side.d[-1], *zq, *(grams if chain.save_every == 1 else [])])
            W, S = new, moved
        if keep:
            ctx.plan, ctx.layers = plan, D
            ctx.per_tile = len(saved[0])
            ctx.save_for_backward(q, k, v, beta, n, m, lr, *W, *itertools.chain(*states, *saved))
        y = torch.stack(ys) if chain.reads else k.new_zeros(0)
        return (y, *W, *S)

    @staticmethod
    @first_order_only(SCAN)
    @without_autocast
    def backward(ctx, Dy, *Dend):
        plan, D = ctx.plan, ctx.layers
        chain = plan.chain
        q, k, v, beta, n, m, lr, *rest = ctx.saved_tensors
        end, rest = rest[:D], rest[D:]
        n_states = len(rest) - k.shape[0] * ctx.per_tile
        states, saved = rows_of(rest[:n_states], 3 * D), rows_of(rest[n_states:], ctx.per_tile)
        Dq, Dk, Dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        Dbeta, Dn, Dm, Dlr = (torch.zeros_like(x) for x in (beta, n, m, lr))
        DW, DS = [x.clone() for x in Dend[:D]], [x.clone() for x in Dend[D:]]
        DA: list[Tensor] | None = None
        following = end
        N, step, ws = k.shape[0], chain.save_every, Workspace(k, chain.low)
        for first in range((N - 1) // step * step, -1, -step):
            last = min(first + step, N)
            ws.reset()
            group = _replay(plan, beta, n, m, lr, k, states[first // step], saved, first, last, D, ws)
            marks = ws.mark()
            for i in range(last - 1, first - 1, -1):
                ws.reset(marks)
                W, S, A, moved, grams, side, at, u, zq = group[i - first]
                new = group[i + 1 - first][0] if i + 1 < last else following
                if DA is None:
                    DA = [torch.zeros_like(x) for x in A]
                if chain.reads:
                    _new_read_backward(plan, Dy[i], q[i], beta[i], new, zq, DW, Dq[i], ws)
                DW_old = [beta[i][:, -1, None, None] * x for x in DW]
                Dbeta[i][:, -1] += sum((x * w).sum((1, 2)) for x, w in zip(DW, W))
                if plan.commit:
                    for x, y in zip(DS, _commit_backward(plan, moved, grams, DW, Dlr[i])):
                        x.addcmul_(y, lr[i][:, None, None])
                if chain.reads:
                    _old_reads_backward(plan, Dy[i], q[i], beta[i], W, zq, DW_old, Dq[i], Dbeta[i], ws)
                Dside = _momentum_backward(chain, n[i], m[i], S, side, DS, Dn[i], Dm[i], ws)
                run_keys_backward(chain.l2, Plain(A, chain.widens, ws, DA), side, at, u, Dside)
                Dk[i], Dv[i] = Dside.a[0], -Dside.d[-1]
                DW = DW_old
                if chain.fresh and i % chain.period == 0:
                    for w, x in zip(DW, DA):
                        w.add_(x)
                    DA = None
            following = group[0][0]
        Dgiven = [] if chain.fresh or DA is None else DA
        return (None, Dq if chain.reads else None, Dk, Dv, Dbeta, Dn, Dm, Dlr, *DW, *DS, *Dgiven)


def _replay(
    plan: MuonPlan, beta, n, m, lr, k, state, saved, first: int, last: int, D: int, ws: Workspace
) -> list[tuple]:
    """States, anchors, momenta and entries of the tiles first..last-1."""
    chain = plan.chain
    W, S, A = list(state[:D]), list(state[D : 2 * D]), list(state[2 * D :])
    tiles = []
    for i in range(first, last):
        if chain.fresh and i % chain.period == 0:
            A = W
        mine = list(saved[i])
        z, u, error = mine[: D - 1], mine[D - 1 : 2 * D - 2], mine[2 * D - 2]
        reads = D - 1 if chain.reads else 0
        zq, grams = mine[2 * D - 1 : 2 * D - 1 + reads], mine[2 * D - 1 + reads :]
        joints = [joint(x, ws) for joint, x in zip(chain.joints, z)]
        a = [k[i], *(joint.u for joint in joints)]
        d = [*(joint.pulled(x) for joint, x in zip(joints, u)), error]
        side = Side(a, d)
        moved = _gather_momentum(chain, n[i], m[i], S, side, ws)
        new = W
        if chain.save_every > 1:
            new, grams = _commit(plan, beta[i], lr[i], W, moved)
        tiles.append((W, S, A, moved, grams, side, joints, u, zq))
        W, S = new, moved
    return tiles


def _new_read_backward(plan: MuonPlan, Dy, q, beta, new, zq, DW, Dq: Tensor, ws: Workspace) -> None:
    """Backward of the committing token's read of the new weights, where there is one."""
    _, last = _read_spans(plan, q.shape[1])
    if last:
        at = slice(q.shape[1] - 1, None)
        z = [x[:, at] for x in zq]
        Dq[:, at], _ = _read_backward(plan.chain, Dy[:, at], q[:, at], beta[:, :1, None], new, z, DW, ws)


def _old_reads_backward(plan: MuonPlan, Dy, q, beta, W, zq, DW, Dq: Tensor, Dbeta: Tensor, ws: Workspace) -> None:
    """Backward of the reads of the weights before the commit."""
    span, _ = _read_spans(plan, q.shape[1])
    if span is not None:
        shift = 0 if plan.chain.before else 1
        z = [x[:, span] for x in zq]
        part = _read_backward(plan.chain, Dy[:, span], q[:, span], _old_beta(plan, beta, span), W, z, DW, ws)
        Dq[:, span] = part[0]
        Dbeta[:, span.start + shift : span.stop + shift] += part[1]


def _commit_backward(plan: MuonPlan, moved, grams, DW, Dlr: Tensor) -> list[Tensor]:
    """Gradient of the momentum, for lr 1, from that of the weights; adds to Dlr."""
    grads = []
    for index, (stack, D_stack) in enumerate(zip(_stack(plan, moved), _stack(plan, DW))):
        steps = len(plan.coefficients)
        mine = list(grams[index * steps : (index + 1) * steps])
        inner, grad = orthogonalise_backward(stack, mine, plan.coefficients, D_stack)
        Dlr += inner.view(-1, len(Dlr)).sum(0)
        grads.append(grad)
    return _unstack(plan, grads, DW)


def _momentum_backward(
    plan: Plan, n: Tensor, m: Tensor, S, side: Side, DS, Dn: Tensor, Dm: Tensor, ws: Workspace
) -> Side:
    """Backward of `_gather_momentum`: DS becomes the gradient of the momentum before the tile; returns that of the entries."""
    result = Side([], [])
    for s, a, d, Ds, up in zip(S, *side, DS, plan.widens):
        thin, wide = (a, d) if up else (d, a)
        Dwide = ws.mm(ws.mul(n.unsqueeze(-1), thin), Ds)
        raw = ws.mm(wide, Ds.mT)
        Dn += ws.mul(raw, thin).sum(-1)
        Dthin = raw.mul_(n.unsqueeze(-1))
        Dm += ws.mul(Ds, s).sum((1, 2))
        Ds.mul_(m[:, None, None])
        result.a.append(Dthin if up else Dwide)
        result.d.append(Dwide if up else Dthin)
    return result
