"""Scan of commit intervals of rule "muon" in C++ (muon.cpp), for networks that are chains of fast maps, with its own backward.

N tiles, G = batch x heads, L tokens and E window_tokens of a tile.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ...memory.newton_schulz import FLOOR, NS_COEFFICIENTS, STAGE, WIDE, Polynomial, polynomials
from ...memory.spec import MemorySpec
from ...nn.derivatives import SCAN, first_order_only
from ..torch.chunking import ChunkRun
from ..torch.coefficients import Coefficients
from .border import fields
from .chain import KernelPlan, Many, Maps, Views, call, pack, plan_of, saved_sizes, sizes_of, unpack

TOKENS_PER_STATE = 64  # between two saved states, at least
LARGE_STATE_NUMEL = 1 << 20  # of a head's weights, from which on twice as many: memory is scarcer than time there


class MuonPlan(NamedTuple):
    chain: KernelPlan
    commit: bool
    parts: tuple[int, ...]  # matrices side by side in each fused map
    coefficients: tuple[Polynomial, ...]  # of each iteration


def run(
    spec: MemorySpec,
    chunks: ChunkRun,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    coefficients: Coefficients,
    lr: Tensor,
    W: Maps,
    S: Maps,
    A: Maps,
) -> tuple[Tensor | None, Maps, Maps]:
    """Run the tiles of one chunks. q: (N, G, L, D) or None, k: (N, G, E, D), v: (N, G, E, V), lr: (N, G, L)."""
    chain = spec.network.chain
    assert chain is not None
    apart = TOKENS_PER_STATE * (2 if sum(i * o for i, o in spec.shapes) >= LARGE_STATE_NUMEL else 1)
    save_every = max(1, min(apart // chunks.stride, int(chunks.tiles**0.5)))
    plan = MuonPlan(
        chain=plan_of(spec, chunks, q is not None, bool(S))._replace(save_every=save_every),
        commit=chunks.commit,
        parts=tuple(len(group) for group in chain.groups),
        coefficients=polynomials(NS_COEFFICIENTS[spec.ns_coefficients], spec.ns_steps),
    )
    form = chain.groups, plan.chain.widens
    given = [] if chunks.fresh else pack(A, *form)
    fused = pack(W, *form)
    momenta = pack(S, *form) if S else [torch.zeros_like(w) for w in fused]
    query = k.new_zeros(0) if q is None else q
    _, beta, _, n, m = coefficients
    y, *state = Muon.apply(plan, query, k, v, beta, -n, m, lr[..., -1], *fused, *momenta, *given)
    D = len(fused)
    return (None if q is None else y), unpack(state[:D], *form), unpack(state[D:], *form) if S else []


class Rule(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("commit", "steps", "stage")),
        ("parts", Many),
        *((name, ctypes.c_double) for name in ("wide", "a", "b", "c", "floor")),
    ]


class Arrays(ctypes.Structure):
    _fields_ = [
        ("gemm", ctypes.c_void_p),
        *fields("q", "k", "v", "beta", "n", "m", "lr"),
        *((name, Views) for name in ("W", "S", "given")),
        *fields("y", "saved", "states"),
        *((name, Views) for name in ("last_W", "last_S")),
        *fields("Dy"),
        *((name, Views) for name in ("Dlast_W", "Dlast_S")),
        *fields("Dq", "Dk", "Dv", "Dbeta", "Dn", "Dm", "Dlr"),
        *((name, Views) for name in ("DW", "DS", "Dgiven")),
    ]


NAMES = ("q", "k", "v", "beta", "n", "m", "lr")


class Muon(torch.autograd.Function):
    """q, k, v, beta, n, m, lr, W, S, given -> y, W, S."""

    @staticmethod
    def forward(ctx, plan: MuonPlan, q, k, v, beta, n, m, lr, *mats):
        chain, D = plan.chain, len(plan.parts)
        tensors = [x.contiguous() for x in (q, k, v, beta, n, m, lr)]
        W, S, given = ([x.contiguous() for x in xs] for xs in (mats[:D], mats[D : 2 * D], mats[2 * D :]))
        saving = chain.grad and any(ctx.needs_input_grad)
        (N, G), L = k.shape[:2], beta.shape[2] - 1
        assert len(set(plan.coefficients)) == 1  # mode.py keeps other schedules from here
        steps, polynomial = len(plan.coefficients), plan.coefficients[0]
        rule = Rule(plan.commit, steps, STAGE, Many(*plan.parts), WIDE, *polynomial, FLOOR)
        what = sizes_of(chain, k, L, 1, W, saving), rule
        per_tile, per_state = saved_sizes("muon", Arrays, *what)
        y = k.new_empty(N, G, L, v.shape[3]) if chain.reads else k.new_empty(0)
        saved = k.new_empty(N * G * per_tile if saving else 0)
        states = k.new_empty(-(-N // chain.save_every) * G * per_state if saving else 0)
        last_W, last_S = ([torch.empty_like(x) for x in xs] for xs in (W, S))
        arrays = dict(zip(NAMES, tensors), W=W, S=S, given=given)
        arrays |= dict(y=y, saved=saved, states=states, last_W=last_W, last_S=last_S)
        call("muon", Arrays, what, k.dtype, False, **arrays)
        if saving:
            ctx.what = what
            ctx.save_for_backward(*tensors, *last_W, *given, saved, states)
        return y, *last_W, *last_S

    @staticmethod
    @first_order_only(SCAN)
    def backward(ctx, Dy, *Dlast):
        D = len(Dlast) // 2
        *rest, saved, states = ctx.saved_tensors
        tensors, last_W, given = rest[:7], rest[7 : 7 + D], rest[7 + D :]
        made = {f"D{name}": torch.empty_like(x) for name, x in zip(NAMES[:3], tensors[:3])}
        made |= {f"D{name}": torch.zeros_like(x) for name, x in zip(NAMES[3:], tensors[3:])}
        Dlast = [x.contiguous() for x in Dlast]
        DW, DS, Dgiven = ([torch.empty_like(x) for x in xs] for xs in (Dlast[:D], Dlast[D:], given))
        arrays = dict(zip(NAMES, tensors), last_W=last_W, given=given, saved=saved, states=states, **made)
        arrays |= dict(Dy=Dy.contiguous(), Dlast_W=Dlast[:D], Dlast_S=Dlast[D:], DW=DW, DS=DS, Dgiven=Dgiven)
        call("muon", Arrays, ctx.what, tensors[1].dtype, True, **arrays)
        return (None, *made.values(), *DW, *DS, *Dgiven)
