"""The fast engine: chains of fast maps under rule "gd", with a backward written by hand.

Same work as `autograd_engine`; docs/theory.md, section 4, line by line. Saved for backward: the inputs, the hidden
pre-activations, and the state at every few tiles; nothing of the size of the weights is kept per token.

N tiles, G = batch x heads, L tokens and E entries of a tile, J sub-chunks, n layers of the chain, m = 2 matrices per map
(W and S), or 1 without momentum. Capital D before a name is "gradient with respect to".
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from . import packed
from .ahead import GROUP, Ahead
from .anchors import Implied, Plain, keys_again, keys_again_at, run_keys, run_keys_backward
from .chain_coefficients import Coefs, key_rows_of, read_at, tile_coefficients
from .chain_plan import Plan, blocks, pack, plan_of, rows_of, unpack
from .derivatives import SCAN, first_order_only
from .mode import Mode, chain_kernel
from .packed import End, Rows
from .rules import Coefficients
from .spec import MemorySpec
from .tile import Maps, Tile
from .tiles import Piece
from .workspace import Workspace, without_autocast


def run(
    spec: MemorySpec,
    piece: Piece,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    coefficients: Coefficients,
    W: Maps,
    S: Maps,
    A: Maps,
    mode: Mode,
) -> tuple[Tensor | None, Maps, Maps]:
    """Run the tiles of one piece. q: (N, G, L, D) or None, k: (N, G, E, D), v: (N, G, E, V)."""
    chain = spec.network.chain
    assert chain is not None
    plan = plan_of(spec, piece, q is not None, bool(S), mode)
    form = chain.groups, plan.widens
    C, beta, f, n_end, m_end = coefficients
    C, n_end = -C, -n_end
    end = torch.stack([C[:, :, -1], n_end], -1) if S else C[:, :, -1].unsqueeze(-1)  # N G E m
    keep = torch.stack([beta[..., -1], m_end], -1) if S else beta[..., -1:]  # N G m
    state = pack(W, *form)
    if S:
        state = [torch.cat(pair, 1) for pair in zip(state, pack(S, *form))]
    given = [] if piece.fresh else pack(A, *form)
    query = k.new_zeros(0) if q is None else q
    y, *state = (chain_kernel() if mode.native else _Chain).apply(
        plan, query, k, v, C, beta, f, end, keep, *state, *given
    )
    W = unpack([x[:, : x.shape[1] // (2 if S else 1)] for x in state], *form)
    S = unpack([x[:, x.shape[1] // 2 :] for x in state], *form) if S else []
    return (None if q is None else y), W, S


def _ahead(plan: Plan, group: slice, q: Tensor, k: Tensor, co: Coefs, key_rows: Tensor | None) -> Ahead:
    reads = co.rows(plan, group, read_at(plan, co.C.shape[2] - 1)) if plan.reads else None
    anchors = None if key_rows is None else co.rows(plan, group, key_rows)
    runs = plan.l2 or len(plan.widens) > 1
    return Ahead(plan.ahead, q[group] if plan.reads else None, k[group], reads, anchors, co.end[group], runs)


def _ahead_backward(
    plan: Plan, ahead: Ahead, group: slice, Dq: Tensor, Dk: Tensor, D: Coefs, key_rows: Tensor | None
) -> None:
    reads = D.rows(plan, group, read_at(plan, D.C.shape[2] - 1))
    if ahead.of_k is None or ahead.anchors is None or key_rows is None:
        return ahead.backward(Dq[group], Dk[group], reads, reads, D.end[group])
    ahead.of_k.left[:, :, : ahead.k.shape[2] // plan.subchunks] = 0.0  # the first chunk is at the tile's start itself
    anchors = ahead.anchors.map(torch.zeros_like)
    ahead.backward(Dq[group], Dk[group], reads, anchors, D.end[group])
    D.C[group].index_add_(2, key_rows, anchors.C)
    D.beta[group].index_add_(2, key_rows, anchors.beta.squeeze(-1))
    if anchors.f is not None:
        D.f[group].index_add_(2, key_rows, anchors.f.squeeze(-1))


def _advance(tile: Tile, end: End, end_k: Tensor | None, ws: Workspace, following: Tile) -> None:
    """The state at the tile's end, into the next tile."""
    for l, thin in enumerate(tile.thin):
        T = end_k if l == 0 and end_k is not None else packed.weighed(thin, end, ws)
        packed.advance(tile.state[l], tile.wide[l], T, end, ws, following.state[l])


def _advance_backward(
    tile: Tile, end: End, end_k: Tensor | None, D: Tile, Ddecay: Tensor, Dentries: Tensor, ws: Workspace
) -> None:
    """D: with the gradient of the tile's end in its state; gets those of the tile's start and of its entries.

    end_k becomes its own gradient.
    """
    for l, thin in enumerate(tile.thin):
        ahead = l == 0 and end_k is not None
        T = end_k if ahead else packed.weighed(thin, end, ws)
        DT = packed.advance_backward(tile.state[l], tile.wide[l], T, end, D.state[l], D.wide[l], Ddecay, ws)
        if ahead:
            end_k.copy_(DT)
        else:
            Dentries += packed.weighed_backward(DT, thin, end, D.thin[l], ws)


def _read(plan: Plan, q: Tensor, left: Tensor | None, rows: Rows, tile: Tile, ws: Workspace, y: Tensor) -> Maps:
    """y of every token of the tile; returns the pre-activations and the scores, which the backward wants."""
    z: Maps = []
    kept: Maps = []
    x, last = q, len(tile.Z) - 1
    for l, Z in enumerate(tile.Z):
        out = y if l == last else None
        if left is not None and l == 0:
            out = ws.mm(left, Z, kept=True, out=out)
        else:
            move = packed.widen if plan.widens[l] else packed.narrow
            out, scores = move(Z, tile.thin[l], x, rows, ws, out, kept=True)
            kept.append(scores)
        if l < last:
            z.append(out)
            x = plan.joints[l].value(out, ws)
    return [*z, *kept]


def _read_backward(
    plan: Plan,
    Dy: Tensor,
    q,
    left: Tensor | None,
    rows: Rows,
    tile: Tile,
    kept: Maps,
    D: Tile,
    Drows: Rows,
    Dq,
    ws: Workspace,
) -> None:
    """Adds to the gradients of the tile and the rows; `left` becomes its own gradient, or Dq takes that of q where there is none."""
    n = len(tile.Z)
    z, kept, Dz = kept[: n - 1], kept[n - 1 :], Dy
    for l in range(n - 1, -1, -1):
        if left is not None and l == 0:
            ws.add_mm(D.Z[0], left.mT, Dz)
            ws.mm(Dz, tile.Z[0].mT, out=left)
            return
        x = plan.joints[l - 1].value(z[l - 1], ws) if l else q
        back = packed.widen_backward if plan.widens[l] else packed.narrow_backward
        Dx, of_rows = back(tile.Z[l], tile.thin[l], x, kept.pop(), rows, Dz, D.Z[l], D.thin[l], ws)
        Drows.add_(of_rows)
        Dz = plan.joints[l - 1].pull(z[l - 1], Dx, ws) if l else Dx
    Dq.copy_(Dz)


def _write_keys(
    plan: Plan, v: Tensor, left_k: Tensor | None, A: Maps, tile: Tile, anchors: list[Rows], z, u, ws
) -> None:
    """The entries of the tile, chunk by chunk; z and u are filled in too."""
    if plan.subchunks == 1:
        return run_keys(plan.joints, plan.l2, Plain(A, plan.widens, ws), v, tile.side, z, u, ws)
    for j, span in enumerate(blocks(plan, tile.entries)):
        left = None if left_k is None else left_k[:, span]
        anchor = Implied(tile, span.start, anchors[j - 1], left, ws) if j else Plain(A, plan.widens, ws)
        parts = ([x[:, span] for x in xs] for xs in (z, u))
        run_keys(plan.joints, plan.l2, anchor, v[:, span], tile.side.block(span), *parts, ws)


class Again(NamedTuple):
    """What the backward of a tile needs and the forward did not keep, or kept."""

    joints: list
    u: Maps
    scores: dict
    kept: Maps


def _write_keys_backward(
    plan: Plan,
    left_k,
    A: Maps,
    tile: Tile,
    anchors: list[Rows],
    again: Again,
    D: Tile,
    DA: Maps,
    Danchors: list[Rows],
    ws,
) -> None:
    plain = Plain(A, plan.widens, ws, DA)
    if plan.subchunks == 1:
        return run_keys_backward(plan.l2, plain, tile.side, again.joints, again.u, D.side)
    for j, span in reversed(list(enumerate(blocks(plan, tile.entries)))):
        anchor: Plain | Implied = plain
        if j:
            left = None if left_k is None else left_k[:, span]
            anchor = Implied(tile, span.start, anchors[j - 1], left, ws).collect(D, Danchors[j - 1], again.scores, span)
        at, mine = [x.block(span) for x in again.joints], [x[:, span] for x in again.u]
        run_keys_backward(plan.l2, anchor, tile.side.block(span), at, mine, D.side.block(span))


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: Plan, q, k, v, C, beta, f, end, keep, *mats):
        n = len(plan.joints) + 1
        state, A = list(mats[:n]), list(mats[n:])
        saving = plan.grad and any(ctx.needs_input_grad)
        N, G, E, V = *k.shape[:3], v.shape[3]
        all_co = Coefs(C, beta, f, end, keep)
        co, key_rows = tile_coefficients(plan, all_co), key_rows_of(plan, E, k.device)
        ks, vs, qs = k.unbind(0), v.unbind(0), q.unbind(0)
        y = k.new_empty(N, G, C.shape[2] - 1, V) if plan.reads else k.new_zeros(0)
        ys = y.unbind(0)
        ws, room = Workspace(k, plan.low, keeping=saving), Workspace(k, plan.low)

        def new_tile() -> Tile:
            return Tile(state, E, plan.widens, plan.momentum, room)

        states, saved = [], []
        tile, other = new_tile().start(state), new_tile()  # a state lives in one, the next in the other
        for i in range(N):
            if i % GROUP == 0:
                ahead = _ahead(plan, slice(i, i + GROUP), q, k, all_co, key_rows)
            share = ahead.shares[i % GROUP]
            ws.reset()
            tile.keys(ks[i])
            if plan.fresh and i % plan.period == 0:
                A = tile.weights if plan.period == 1 else [x.clone() for x in tile.weights]
            if saving and i % plan.save_every == 0:
                copies = [x.clone() for x in tile.state]
                states.append(copies if plan.period == 1 else [*copies, *A])
            z = [ws.empty(*d.shape, kept=True) for d in tile.side.d[:-1]]
            u = [ws.empty(*a.shape) for a in tile.side.a[1:]]
            e = ws.empty(G, E, V, kept=True)
            if not plan.widens[-1]:
                tile.errors(e)
            _write_keys(plan, vs[i], share.left_k, A, tile, co[i].anchors, z, u, ws)
            if plan.widens[-1]:
                e.copy_(tile.wide[-1])
            kept = _read(plan, qs[i], share.left_q, co[i].reads, tile, ws, ys[i]) if plan.reads else []
            if saving:
                saved.append([*z, e, *kept])
            _advance(tile, co[i].end, share.end_k, ws, other)
            tile, other = other, tile if ws.reuse else new_tile()
        if saving:
            given = [] if plan.fresh else A
            ctx.plan = plan
            ctx.counts = (len(given), len(states[0]), len(saved[0]))
            ctx.save_for_backward(q, k, *all_co, *given, *itertools.chain(*states, *saved))
        return (y, *(x.clone() for x in tile.state))

    @staticmethod
    @first_order_only(SCAN)
    @without_autocast
    def backward(ctx, Dy, *Dend_state):
        plan = ctx.plan
        n, step = len(plan.joints) + 1, plan.save_every
        q, k, *rest = ctx.saved_tensors
        all_co, rest = Coefs(*rest[:5]), rest[5:]
        n_given, per_state, per_tile = ctx.counts
        given, rest = rest[:n_given], rest[n_given:]
        N, (G, E), m = len(k), k.shape[1:3], 2 if plan.momentum else 1
        n_states = len(rest) - N * per_tile
        states, saved = rows_of(rest[:n_states], per_state), rows_of(rest[n_states:], per_tile)
        D_co = Coefs(*(torch.zeros_like(x) for x in all_co))
        Dq, Dk, Ddecay = torch.empty_like(q), torch.zeros_like(k), k.new_zeros(N, G, m, m)
        Dv = k.new_empty(N, G, E, saved[0][n - 1].shape[2])
        co, Dco, key_rows = (
            tile_coefficients(plan, all_co),
            tile_coefficients(plan, D_co),
            key_rows_of(plan, E, k.device),
        )
        ks, qs, Dys, Dqs, Dks, Dvs, Ddecays, Dends = (x.unbind(0) for x in (k, q, Dy, Dq, Dk, Dv, Ddecay, D_co.end))
        ws, room = Workspace(k, plan.low), Workspace(k, plan.low)

        def new_tile() -> Tile:
            return Tile(list(Dend_state), E, plan.widens, plan.momentum, room)

        D, tiles = new_tile().start(list(Dend_state)), [new_tile() for _ in range(min(step, N))]
        DA: Maps | None = None
        for first in range((N - 1) // step * step, -1, -step):
            group = slice(first // GROUP * GROUP, first // GROUP * GROUP + GROUP)
            if first + step >= min(group.stop, N):
                ahead = _ahead(plan, group, q, k, all_co, key_rows)
            if not ws.reuse:
                tiles = [new_tile() for _ in tiles]
            ws.reset()
            last = min(first + step, N)
            replayed = _replay(plan, co, ks, ahead, states[first // step], saved, first, last, given, tiles, ws)
            marks = ws.mark()
            for i in range(last - 1, first - 1, -1):
                ws.reset(marks)
                tile, share = tiles[i - first], ahead.shares[i % GROUP]
                A, again = replayed.pop()
                if plan.ahead:
                    D.keys(Dks[i])
                _advance_backward(tile, co[i].end, share.end_k, D, Ddecays[i], Dends[i], ws)
                if plan.reads:
                    reads = co[i].reads, tile, again.kept, D, Dco[i].reads, Dqs[i]
                    _read_backward(plan, Dys[i], qs[i], share.left_q, *reads, ws)
                if (not plan.fresh or plan.period > 1) and DA is None:
                    DA = [torch.zeros_like(x) for x in A]
                into = D, D.weights if DA is None else DA, Dco[i].anchors
                _write_keys_backward(plan, share.left_k, A, tile, co[i].anchors, again, *into, ws)
                torch.neg(D.side.d[-1], out=Dvs[i]) if ws.reuse else Dvs[i].copy_(-D.side.d[-1])
                if not plan.ahead:
                    Dks[i].copy_(D.side.a[0])
                if plan.fresh and DA is not None and i % plan.period == 0:
                    for w, x in zip(D.weights, DA):
                        w.add_(x)
                    DA = None
            if first == group.start and plan.ahead:
                _ahead_backward(plan, ahead, group, Dq, Dk, D_co, key_rows)
        Dgiven = [] if plan.fresh or DA is None else DA
        D_co.keep.add_(Ddecay.diagonal(dim1=2, dim2=3))
        if plan.momentum:
            D_co.f[:, :, -1] += Ddecay[:, :, 0, 1]
        Dstate = [x.contiguous() for x in D.state]
        return (None, Dq, Dk, Dv, *D_co, *Dstate, *Dgiven)


def _replay(
    plan: Plan, co, ks, ahead: Ahead, state, saved, first: int, last: int, given, tiles: list[Tile], ws: Workspace
) -> list[tuple[Maps, Again]]:
    """Fill in tiles first..last-1, from the saved state and pre-activations; returns their anchors, and more of the entries."""
    n = len(plan.joints) + 1
    A = list(state[n:] if plan.fresh else given)
    tiles[0].start(state[:n])
    result = []
    for i, tile in zip(range(first, last), tiles):
        share = ahead.shares[i % GROUP]
        tile.keys(ks[i])
        if plan.fresh and i % plan.period == 0:
            A = tile.weights
        z, error, kept = saved[i][: n - 1], saved[i][n - 1], saved[i][n:]
        joints = [joint(x, ws, out) for joint, x, out in zip(plan.joints, z, tile.side.a[1:])]
        tile.errors(error)
        if share.anchors is None:
            u, scores = keys_again_at(Plain(A, plan.widens, ws), joints, tile, ws), {}
        else:
            u, scores = keys_again(joints, plan.l2, tile, share.anchors, ws)
        result.append((A, Again(joints, u, scores, list(kept))))
        if i + 1 < last:
            _advance(tile, co[i].end, share.end_k, ws, tiles[i + 1 - first])
    return result
