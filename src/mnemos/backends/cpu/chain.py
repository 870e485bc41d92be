"""Scan of chunks in C++ (chain.cpp) for networks that are chains of fast maps, rule "gd", with its own backward.

N tiles, G = batch x heads, L tokens and E window_tokens of a tile, m = 2 matrices per map (W and S), or 1 without momentum.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import deterministic

from ...memory.spec import MemorySpec
from ...nn.derivatives import SCAN, first_order_only
from ..torch.chunking import ChunkRun
from ..torch.coefficients import Coefficients
from .border import View, check, fields, view
from .build import Unavailable, gemm, library
from .structs import LOSSES, MAPS

Maps = list[Tensor]


class KernelPlan(NamedTuple):
    """Arguments of a kernel that are not tensors. widens: for each map, whether its output is at least as wide as its input."""

    activations: tuple[str, ...]
    widens: tuple[bool, ...]
    l2: bool
    before: bool
    momentum: bool
    fresh: bool
    period: int
    save_every: int
    reads: bool
    grad: bool


def plan_of(spec: MemorySpec, chunks: ChunkRun, reads: bool, momentum: bool) -> KernelPlan:
    chain = spec.network.chain
    assert chain is not None and chunks.subchunks == 1
    fused = [(spec.shapes[g[0]][0], sum(spec.shapes[i][1] for i in g)) for g in chain.groups]
    return KernelPlan(
        activations=chain.activations,
        widens=tuple(d_in <= d_out for d_in, d_out in fused),
        l2=LOSSES[type(spec.loss)],
        before=spec.read == "before",
        momentum=momentum,
        fresh=chunks.fresh,
        period=chunks.period,
        save_every=_save_every(chunks),
        reads=reads,
        grad=torch.is_grad_enabled(),
    )


def _save_every(chunks: ChunkRun) -> int:
    """Tiles between two saved states. About 256 tokens were the fastest; the backward holds the tiles in between at once, so
    there are never more of them than saved states."""
    return max(1, min(256 // chunks.length, 32, math.isqrt(chunks.tiles)))


def pack(maps: Maps, groups: tuple[tuple[int, ...], ...], widens: tuple[bool, ...]) -> Maps:
    """Maps that share an input become one; all get their narrow axis first."""
    fused = [torch.cat([maps[i] for i in g], -1) if len(g) > 1 else maps[g[0]] for g in groups] if maps else []
    return [w if up else w.mT.contiguous() for w, up in zip(fused, widens)]


def unpack(maps: Maps, groups: tuple[tuple[int, ...], ...], widens: tuple[bool, ...]) -> Maps:
    """Inverse of `pack`. Each map gets memory of its own, so that a state continues the same way whether it was saved or not."""
    fused = [w if up else w.mT for w, up in zip(maps, widens)]
    parts = [part for x, g in zip(fused, groups) for part in (x.chunk(len(g), -1) if len(g) > 1 else (x,))]
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def run(
    spec: MemorySpec,
    chunks: ChunkRun,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    coefficients: Coefficients,
    W: Maps,
    S: Maps,
    A: Maps,
) -> tuple[Tensor | None, Maps, Maps]:
    """Run the tiles of one chunks. q: (N, G, L, D) or None, k: (N, G, E, D), v: (N, G, E, V)."""
    assert spec.network.chain is not None
    plan = plan_of(spec, chunks, q is not None, bool(S))
    form = spec.network.chain.groups, plan.widens
    C, beta, f, n_end, m_end = coefficients
    C, n_end = -C, -n_end
    end = torch.stack([C[:, :, -1], n_end], -1) if S else C[:, :, -1].unsqueeze(-1)  # N G E m
    keep = torch.stack([beta[..., -1], m_end], -1) if S else beta[..., -1:]  # N G m
    state = pack(W, *form)
    if S:
        state = [torch.cat(pair, 1) for pair in zip(state, pack(S, *form))]
    given = [] if chunks.fresh else pack(A, *form)
    query = k.new_zeros(0) if q is None else q
    y, *state = Chain.apply(plan, query, k, v, C, beta, f, end, keep, *state, *given)
    W = unpack([x[:, : x.shape[1] // (2 if S else 1)] for x in state], *form)
    S = unpack([x[:, x.shape[1] // 2 :] for x in state], *form) if S else []
    return (None if q is None else y), W, S


Many = ctypes.c_int64 * MAPS
Views = View * MAPS


class Sizes(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "maps",
                "tiles",
                "lanes",
                "tokens",
                "entries",
                "matrices",
                "l2",
                "before",
                "fresh",
                "period",
                "save_every",
                "reads",
                "saving",
                "threads",
                "poison",
            )
        ),
        *((name, Many) for name in ("in", "out", "activation")),
    ]


class Arrays(ctypes.Structure):
    _fields_ = [
        ("gemm", ctypes.c_void_p),
        *fields("q", "k", "v", "C", "beta", "f", "end", "keep"),
        *((name, Views) for name in ("start", "given")),
        *fields("y", "saved", "states"),
        ("last", Views),
        *fields("Dy"),
        ("Dlast", Views),
        *fields("Dq", "Dk", "Dv", "DC", "Dbeta", "Df", "Dend", "Dkeep"),
        *((name, Views) for name in ("Dstart", "Dgiven")),
    ]


@functools.cache
def unavailable_reason(dtype: torch.dtype, name: str = "chain") -> str | None:
    """Why the kernel cannot be had here, or None where it can. The first call compiles it: some seconds, once per machine."""
    try:
        library(name), library("decay"), gemm(dtype)
    except Unavailable as reason:
        return str(reason)
    return None


def call(
    name: str, kind: type[ctypes.Structure], what: tuple, dtype: torch.dtype, backward: bool, **arrays: Any
) -> None:
    """Run kernel `name` forth or back on `arrays` (tensors, or lists of one per map), which make a structure of this kind."""
    given = {key: Views(*map(view, x)) if isinstance(x, list) else view(x) for key, x in arrays.items()}
    function = getattr(library(name), f"mnemos_{name}_{'float' if dtype == torch.float32 else 'double'}")
    pointers = map(ctypes.byref, (*what, kind(gemm=gemm(dtype), **given)))
    check(function(*pointers, ctypes.c_int(backward)), name)


def saved_sizes(name: str, kind: type[ctypes.Structure], *what: ctypes.Structure) -> tuple[int, int]:
    """How many numbers kernel `name` keeps for its backward: per tile, and per saved state."""
    per_tile, per_state = ctypes.c_int64(), ctypes.c_int64()
    size = getattr(library(name), f"mnemos_{name}_sizes")(*map(ctypes.byref, (*what, per_tile, per_state)))
    if size != ctypes.sizeof(kind):
        raise ValueError(f"kernel {name!r} refused its arguments: the sizes of a chunks do not fit each other")
    return per_tile.value, per_state.value


def sizes_of(plan: KernelPlan, k: Tensor, tokens: int, m: int, state: list[Tensor], saving: bool) -> Sizes:
    """state: one (G, m n, w) per map."""
    n = len(state)
    narrow, wide = ([x.shape[1] // m for x in state], [x.shape[2] for x in state])
    ends = [(a, b) if up else (b, a) for a, b, up in zip(narrow, wide, plan.widens)]
    return Sizes(
        n,
        *k.shape[:2],
        tokens,
        k.shape[2],
        m,
        plan.l2,
        plan.before,
        plan.fresh,
        plan.period,
        plan.save_every,
        plan.reads,
        saving,
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory,  # ty: ignore[missing-attribute]
        Many(*(a for a, _ in ends)),
        Many(*(b for _, b in ends)),
        Many(*(int(name == "geglu") for name in plan.activations)),
    )


NAMES = ("q", "k", "v", "C", "beta", "f", "end", "keep")


class Chain(torch.autograd.Function):
    """q, k, v, C, beta, f, end, keep, state, given -> y, state."""

    @staticmethod
    def forward(ctx, plan: KernelPlan, q, k, v, C, beta, f, end, keep, *mats):
        n = len(plan.widens)
        tensors = [x.contiguous() for x in (q, k, v, C, beta, f, end, keep)]
        state, given = ([x.contiguous() for x in xs] for xs in (mats[:n], mats[n:]))
        saving = plan.grad and any(ctx.needs_input_grad)
        sizes = sizes_of(plan, k, C.shape[2] - 1, 2 if plan.momentum else 1, state, saving)
        N, G = k.shape[:2]
        per_tile, per_state = saved_sizes("chain", Arrays, sizes)
        y = k.new_empty(N, G, C.shape[2] - 1, v.shape[3]) if plan.reads else k.new_empty(0)
        saved = k.new_empty(N * G * per_tile if saving else 0)
        states = k.new_empty(-(-N // plan.save_every) * G * per_state if saving else 0)
        last = [torch.empty_like(x) for x in state]
        arrays = dict(zip(NAMES, tensors))
        made = dict(y=y, saved=saved, states=states, last=last)
        call("chain", Arrays, (sizes,), k.dtype, False, **arrays, start=state, given=given, **made)
        if saving:
            ctx.sizes = sizes
            ctx.save_for_backward(*tensors, *given, saved, states)
        return y, *last

    @staticmethod
    @first_order_only(SCAN)
    def backward(ctx, Dy, *Dlast):
        q, k, v, C, beta, f, end, keep, *given, saved, states = ctx.saved_tensors
        tensors = q, k, v, C, beta, f, end, keep
        made = {f"D{name}": torch.empty_like(x) for name, x in zip(NAMES[:3], (q, k, v))}
        made |= {f"D{name}": torch.zeros_like(x) for name, x in zip(NAMES[3:], (C, beta, f, end, keep))}
        Dy, Dlast = Dy.contiguous(), [x.contiguous() for x in Dlast]
        Dstart, Dgiven = [torch.empty_like(x) for x in Dlast], [torch.empty_like(x) for x in given]
        arrays = dict(zip(NAMES, tensors), saved=saved, states=states, Dy=Dy, Dlast=Dlast, **made)
        call("chain", Arrays, (ctx.sizes,), k.dtype, True, **arrays, Dstart=Dstart, Dgiven=Dgiven)
        return (None, *made.values(), *Dstart, *Dgiven)
