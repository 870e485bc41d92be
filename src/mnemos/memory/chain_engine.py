"""The fast engine: chains of fast maps under rule "gd", with a backward written by hand.

Same work as `autograd_engine`; docs/theory.md, section 4, line by line. Saved for backward: the inputs, the hidden
pre-activations, and the state at every few tiles; nothing of the size of the weights is kept per token.

N tiles, G = batch x heads, L tokens and E entries of a tile, J sub-chunks, n layers of the chain.
Capital D before a name is "gradient with respect to".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import dual
from .anchors import Grads, Implied, ImpliedAnchors, Materialised, TileCoefficients, block
from .dual import End, Entries, Rows
from .joints import JOINTS
from .rules import Coefficients
from .spec import MemorySpec
from .tiles import Piece
from .workspace import Workspace, without_autocast

Maps = list[Tensor]


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
    W: Maps,
    S: Maps,
    A: Maps,
    low: torch.dtype | None,
) -> tuple[Tensor | None, Maps, Maps]:
    """Run the tiles of one piece. q: (N, G, L, D) or None, k: (N, G, E, D), v: (N, G, E, V)."""
    chain = spec.network.chain
    assert chain is not None
    groups = chain.groups
    plan = plan_of(spec, piece, q is not None, bool(S), low)
    given = [] if piece.fresh else fuse(A, groups)
    query = k.new_zeros(0) if q is None else q
    C, beta, f, n_end, m = coefficients
    y, *state = _Chain.apply(plan, query, k, v, -C, beta, f, -n_end, m, *fuse(W, groups), *fuse(S, groups), *given)
    n = len(groups)
    return (None if q is None else y), split(state[:n], groups), split(state[n:], groups)


def plan_of(spec: MemorySpec, piece: Piece, reads: bool, momentum: bool, low: torch.dtype | None) -> Plan:
    chain = spec.network.chain
    assert chain is not None
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
        reads=reads,
    )


def _save_every(spec: MemorySpec, piece: Piece) -> int:
    """Tiles between two saved states: few enough that the states do not outweigh the saved activations by much."""
    weights = sum(i * o for i, o in spec.shapes) * (2 if spec.momentum else 1)
    activations = (2 * piece.length + piece.subchunks * (spec.window - 1)) * sum(o for _, o in spec.shapes)
    return max(1, min(round(weights / (4 * activations)), int(piece.tiles**0.5)))


def fuse(maps: Maps, groups: tuple[tuple[int, ...], ...]) -> Maps:
    """Maps that share an input become one."""
    return (
        [torch.cat([maps[i] for i in group], -1) if len(group) > 1 else maps[group[0]] for group in groups]
        if maps
        else []
    )


def split(fused: Maps, groups: tuple[tuple[int, ...], ...]) -> Maps:
    return [part for x, group in zip(fused, groups) for part in (x.chunk(len(group), -1) if len(group) > 1 else (x,))]


class Store:
    """Results of all tiles in one block each."""

    def __init__(self):
        self.stacks: list[Tensor] = []

    def put(self, items: Sequence[Tensor], at: int, count: int) -> None:
        if not self.stacks:
            self.stacks = [x.new_empty(count, *x.shape) for x in items]
        for stack, x in zip(self.stacks, items):
            stack[at].copy_(x)


def _read_at(plan: Plan, L: int) -> slice:
    return slice(0, L) if plan.before else slice(1, L + 1)


def _tile_coefficients(plan: Plan, C: Tensor, beta: Tensor, f: Tensor, n: Tensor, m: Tensor) -> list[TileCoefficients]:
    at = _read_at(plan, C.shape[2] - 1)
    nothing = [None] * len(C)
    f_rows = f[:, :, at, None].unbind(0) if plan.momentum else nothing
    reads = map(Rows, beta[:, :, at, None].unbind(0), f_rows, C[:, :, at].unbind(0))
    ends = (
        x.unbind(0)
        for x in (*(x[..., None, None] for x in (beta[..., -1], f[..., -1], m)), C[:, :, -1, :, None], n.unsqueeze(-1))
    )
    whole = zip(C.unbind(0), beta.unbind(0), f.unbind(0))
    return [TileCoefficients(*tile) for tile in zip(reads, map(End, *ends), whole)]


def write_keys(plan: Plan, k: Tensor, v: Tensor, co: TileCoefficients, A: Maps, W: Maps, S: Maps, ws: Workspace):
    """Entries of every map at the anchors; and what backward needs: pre-activations z, back-propagated u."""
    J, n = plan.subchunks, len(W)
    first = keys_at(plan, Materialised(A, ws), block(k, 0, J), block(v, 0, J), n, ws)
    if J == 1:
        return first
    size, E = k.shape[1] // J, k.shape[1]

    def whole(part: Tensor) -> Tensor:
        x = ws.empty(part.shape[0], E, part.shape[2], kept=True)
        x[:, :size] = part
        return x

    entries = [Entries(k if l == 0 else whole(e.a), whole(e.d)) for l, e in enumerate(first[0])]
    z, u = ([whole(x) for x in xs] for xs in first[1:])
    tile = ImpliedAnchors(J, plan.stride, W, S, co, entries, ws)
    for j in range(1, J):
        part, z_part, u_part = keys_at(plan, tile.at(j), block(k, j, J), block(v, j, J), n, ws)
        for l in range(n):
            block(entries[l].d, j, J).copy_(part[l].d)
            if l:
                block(entries[l].a, j, J).copy_(part[l].a)
        for old, new in zip([*z, *u], [*z_part, *u_part]):
            block(old, j, J).copy_(new)
    return entries, z, u


def keys_at(
    plan: Plan, anchor: Materialised | Implied, k: Tensor, v: Tensor, n: int, ws: Workspace
) -> tuple[list[Entries], Maps, Maps]:
    a, z = [k], []
    for l in range(n if plan.l2 else n - 1):
        z.append(anchor.apply(l, a[l]))
        if l < n - 1:
            a.append(plan.joints[l].value(z[l], ws))
    d: list[Tensor] = [z.pop().sub_(v) if plan.l2 else -v]
    u: list[Tensor] = []
    for l in range(n - 1, 0, -1):
        u.insert(0, anchor.transposed(l, d[0]))
        d.insert(0, plan.joints[l - 1].pull(z[l - 1], u[0], ws))
    return [Entries(*pair) for pair in zip(a, d)], z, u


def keys_at_backward(
    plan: Plan, anchor, entries: list[Entries], at: list, u: Maps, D: list[Entries], grads: Grads
) -> tuple[Tensor, Tensor]:
    """Backward of `keys_at` from the gradients D of its entries. `at`: the joints at its pre-activations. Returns Dk and Dv.

    An implied anchor leaves Dk to be settled for all sub-chunks at once, and returns D[0].a as it is.
    """
    n = len(entries)
    Dz: list[Tensor] = []
    Dd = D[0].d
    for l in range(n - 1):
        Du, curve = at[l].second(u[l], Dd)
        Dz.append(curve)
        Dd = anchor.transposed_backward(l + 1, Du, entries[l + 1].d, grads).add_(D[l + 1].d)
    Dv = -Dd
    down = D[-1].a
    if plan.l2:
        down = anchor.apply_backward(n - 1, Dd, entries[-1].a, grads).add_(down)
    for l in range(n - 2, -1, -1):
        total = Dz[l].add_(at[l].pulled(down))
        down = anchor.apply_backward(l, total, entries[l].a, grads).add_(D[l].a)
    return down, Dv


def _read(
    plan: Plan, q: Tensor, rows: Rows, W: Maps, S: Maps, entries: list[Entries], ws: Workspace
) -> tuple[Tensor, Maps, list[Tensor]]:
    """y of every token of the tile; and the pre-activations and what the maps want kept."""
    x, z, kept = q, [], []
    for l in range(len(W)):
        out, keep = dual.apply(x, W[l], S[l] if S else None, rows, entries[l], ws, kept=True)
        kept += keep
        if l < len(W) - 1:
            z.append(out)
            x = plan.joints[l].value(out, ws)
    return out, z, kept


def _read_backward(
    plan: Plan, Dy: Tensor, q: Tensor, rows: Rows, W: Maps, S: Maps, entries, z, kept, grads: Grads, ws: Workspace
) -> tuple[Tensor, list[Tensor]]:
    """Returns Dq and the gradients of the rows: of C, beta and, with momentum, f."""
    Dz, kept, of = Dy, list(kept), []
    for l in range(len(W) - 1, -1, -1):
        x = plan.joints[l - 1].value(z[l - 1], ws) if l else q
        count = 1 if W[l].shape[1] <= W[l].shape[2] else 3 if S else 2
        mine, kept = tuple(kept[len(kept) - count :]), kept[: len(kept) - count]
        s, Ds = (S[l], grads.S[l]) if S else (None, None)
        Dx, Drows = dual.apply_backward(Dz, x, mine, W[l], s, rows, entries[l], grads.W[l], Ds, grads.entries[l], ws)
        mine = [Drows.C, Drows.beta] if Drows.f is None else [Drows.C, Drows.beta, Drows.f]
        of = [x.add_(y) for x, y in zip(of, mine)] if of else mine
        Dz = plan.joints[l - 1].pull(z[l - 1], Dx, ws) if l else Dx
    return Dz, of


def _advance(end: End, W: Maps, S: Maps, entries: list[Entries], ws: Workspace, into: Workspace) -> tuple[Maps, Maps]:
    """The state at the tile's end."""
    ends = [dual.advance(w, S[l] if S else None, end, entries[l], ws, into) for l, w in enumerate(W)]
    return [w for w, _ in ends], [s for _, s in ends if s is not None]


def _advance_backward(
    DW: Maps, DS: Maps, end: End, W: Maps, S: Maps, entries: list[Entries], ws: Workspace
) -> tuple[list[Entries], list[Tensor]]:
    """Backward of `_advance`: DW and DS become those of the tile's start. Returns the gradients of the entries and of `end`."""
    result, of = [], []
    for l, w in enumerate(W):
        s, Ds = (S[l], DS[l]) if S else (None, None)
        mine, D = dual.advance_backward(DW[l], Ds, w, s, end, entries[l], ws)
        of = [x.add_(y) for x, y in zip(of, mine)] if of else mine
        result.append(D)
    return result, of


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: Plan, q, k, v, C, beta, f, n, m, *mats):
        layers = len(plan.joints) + 1
        W, S, A = list(mats[:layers]), list(mats[layers : 2 * layers]) if plan.momentum else [], list(mats[-layers:])
        keep = any(ctx.needs_input_grad)
        outputs, states, saved = Store(), [], []
        co = _tile_coefficients(plan, C, beta, f, n, m)
        ks, vs, qs = k.unbind(0), v.unbind(0), q.unbind(0) if plan.reads else ()
        ws = Workspace(k, plan.low, keeping=keep)
        turns = (Workspace(k, keeping=keep), Workspace(k, keeping=keep))  # a state lives in one, the next in the other
        for i in range(len(ks)):
            ws.reset()
            turns[i % 2].reset()
            if plan.fresh and i % plan.period == 0:
                A = W if plan.period == 1 or keep else [w.clone() for w in W]
            if keep and i % plan.save_every == 0:
                states.append([*W, *S] if plan.period == 1 else [*W, *S, *A])
            entries, z, u = write_keys(plan, ks[i], vs[i], co[i], A, W, S, ws)
            zq, kept = [], []
            if plan.reads:
                y, zq, kept = _read(plan, qs[i], co[i].reads, W, S, entries, ws)
                outputs.put([y], i, len(ks))
            if keep:
                saved.append([*z, *u, entries[-1].d, *zq, *kept])
            W, S = _advance(co[i].end, W, S, entries, ws, turns[i % 2])
        if keep:
            given = [] if plan.fresh else A
            ctx.plan = plan
            ctx.counts = (len(given), len(states[0]), len(saved[0]))
            ctx.save_for_backward(q, k, C, beta, f, n, m, *given, *itertools.chain(*states, *saved))
        y = outputs.stacks[0] if plan.reads else k.new_zeros(0)
        return (y, *(W + S if keep else [x.clone() for x in (*W, *S)]))

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, Dy, *Dend):
        plan = ctx.plan
        layers, step = len(plan.joints) + 1, plan.save_every
        q, k, C, beta, f, n, m, *rest = ctx.saved_tensors
        n_given, per_state, per_tile = ctx.counts
        given, rest = rest[:n_given], rest[n_given:]
        n_states = len(rest) - k.shape[0] * per_tile
        states = rows_of(rest[:n_states], per_state)
        saved = rows_of(rest[n_states:], per_tile)
        co = _tile_coefficients(plan, C, beta, f, n, m)
        DC, Dbeta, Df = (torch.zeros_like(x) for x in (C, beta, f))
        ks, qs, Dys = k.unbind(0), q.unbind(0), Dy.unbind(0)
        N, ws = len(ks), Workspace(k, plan.low)
        inputs, of_rows, of_end = Store(), Store(), Store()
        DW, DS = [x.clone() for x in Dend[:layers]], [x.clone() for x in Dend[layers:]]
        DA: Maps | None = None
        for first in range((N - 1) // step * step, -1, -step):
            last = min(first + step, N)
            ws.reset()
            group = _replay(plan, co, ks, states[first // step], saved, first, last, given, ws)
            marks = ws.mark()
            for i in range(last - 1, first - 1, -1):
                ws.reset(marks)
                W, S, A, entries, at, u, zq, kept = group.pop()
                D, of = _advance_backward(DW, DS, co[i].end, W, S, entries, ws)
                of_end.put(of, i, N)
                if not plan.fresh or plan.period > 1:
                    DA = [torch.zeros_like(x) for x in A] if DA is None else DA
                grads = Grads(DW, DS, DW if DA is None else DA, D, DC[i], Dbeta[i], Df[i])
                if plan.reads:
                    Dq, of = _read_backward(plan, Dys[i], qs[i], co[i].reads, W, S, entries, zq, kept, grads, ws)
                    of_rows.put([*of, Dq], i, N)
                inputs.put(_write_keys_backward(plan, A, W, S, co[i], entries, at, u, grads, ws), i, N)
                if plan.fresh and DA is not None and i % plan.period == 0:
                    for w, x in zip(DW, DA):
                        w.add_(x)
                    DA = None
        Dgiven = [] if plan.fresh or DA is None else DA
        Dq = of_rows.stacks.pop() if plan.reads else None
        Dn, Dm = _collect(plan, of_rows.stacks, of_end.stacks, DC, Dbeta, Df)
        return (None, Dq, *inputs.stacks, DC, Dbeta, Df, Dn, Dm, *DW, *DS, *Dgiven)


def rows_of(flat: list[Tensor], width: int) -> list[list[Tensor]]:
    return [flat[i : i + width] for i in range(0, len(flat), width)]


def _collect(
    plan: Plan, rows: Maps, end: Maps, DC: Tensor, Dbeta: Tensor, Df: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Add the coefficient gradients of all tiles to DC, Dbeta and Df. Returns Dn and Dm."""
    if rows:
        at = _read_at(plan, DC.shape[2] - 1)
        DC[:, :, at] += rows[0]
        Dbeta[:, :, at] += rows[1].squeeze(-1)
        if plan.momentum:
            Df[:, :, at] += rows[2].squeeze(-1)
    Dbeta[:, :, -1] += end[0]
    DC[:, :, -1] += end[1]
    if not plan.momentum:
        return None, None
    Df[:, :, -1] += end[2]
    return end[4], end[3]


def _write_keys_backward(
    plan: Plan, A: Maps, W: Maps, S: Maps, co, entries, at, u, grads: Grads, ws: Workspace
) -> tuple[Tensor, Tensor]:
    J = plan.subchunks
    if J == 1:
        return keys_at_backward(plan, Materialised(A, ws), entries, at[0], u, grads.entries, grads)
    tile = ImpliedAnchors(J, plan.stride, W, S, co, entries, ws)
    if not plan.l2:
        tile.Dz[-1].zero_()  # the error does not look at the last map's output
    Dv = ws.empty(*entries[-1].d.shape)
    for j in range(J - 1, -1, -1):
        mine, D = ([Entries(block(e.a, j, J), block(e.d, j, J)) for e in es] for es in (entries, grads.entries))
        _, Dv_part = keys_at_backward(plan, tile.at(j), mine, at[j], [block(x, j, J) for x in u], D, grads)
        block(Dv, j, J).copy_(Dv_part)
    return tile.settle(grads), Dv


def _replay(plan: Plan, co, ks, state, saved, first: int, last: int, given, ws: Workspace) -> list[tuple]:
    """States, anchors, entries and joints of the tiles first..last-1, from the saved state and pre-activations."""
    n, J = len(plan.joints) + 1, plan.subchunks
    W, S = list(state[:n]), list(state[n : 2 * n]) if plan.momentum else []
    A = given if plan.period == 1 or not plan.fresh else state[len(state) - n :]
    tiles = []
    for i in range(first, last):
        if plan.fresh and i % plan.period == 0:
            A = W
        mine = saved[i]
        z, u, error = mine[: n - 1], mine[n - 1 : 2 * n - 2], mine[2 * n - 2]
        reads = n - 1 if plan.reads else 0
        zq, kept = mine[2 * n - 1 : 2 * n - 1 + reads], mine[2 * n - 1 + reads :]
        joints = [joint(x, ws) for joint, x in zip(plan.joints, z)]
        a = [ks[i], *(joint.u for joint in joints)]
        d = [*(joint.pulled(x) for joint, x in zip(joints, u)), error]
        entries = [Entries(*pair) for pair in zip(a, d)]
        at = [[joint.block(j, J) for joint in joints] for j in range(J)] if J > 1 else [joints]
        tiles.append((W, S, A, entries, at, u, zq, kept))
        if i + 1 < last:
            W, S = _advance(co[i].end, W, S, entries, ws, ws)
    return tiles
