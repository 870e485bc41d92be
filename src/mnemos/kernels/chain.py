"""The chain engine's tiles in C++ (chain.cpp): same arguments and results as `memory.chain_engine`'s own loop.

N tiles, G = batch x heads, L tokens and E entries of a tile, m = 2 matrices per map (W and S), or 1 without momentum.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import deterministic

from ..memory.chain_plan import Plan
from ..memory.joints import GeGlu
from ..memory.mode import MAPS
from .build import Unavailable, gemm, library

Many = ctypes.c_int64 * MAPS
Pointers = ctypes.c_void_p * MAPS


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
        *((name, Many) for name in ("in", "out", "joint")),
    ]


class Arrays(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gemm", "q", "k", "v", "C", "beta", "f", "end", "keep")),
        *((name, Pointers) for name in ("start", "given")),
        *((name, ctypes.c_void_p) for name in ("y", "saved", "states")),
        ("last", Pointers),
        ("Dy", ctypes.c_void_p),
        ("Dlast", Pointers),
        *((name, ctypes.c_void_p) for name in ("Dq", "Dk", "Dv", "DC", "Dbeta", "Df", "Dend", "Dkeep")),
        *((name, Pointers) for name in ("Dstart", "Dgiven")),
    ]


@functools.cache
def why_not(dtype: torch.dtype) -> str | None:
    """Why the kernel cannot be had here, or None where it can. The first call compiles it: some seconds, once per machine."""
    try:
        library("chain"), library("decay"), gemm(dtype)
    except Unavailable as reason:
        return str(reason)
    return None


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None or x.numel() == 0 else x.data_ptr()


def _call(sizes: Sizes, dtype: torch.dtype, backward: bool, **arrays: Any) -> None:
    given = {name: Pointers(*map(_pointer, x)) if isinstance(x, list) else _pointer(x) for name, x in arrays.items()}
    kernel = library("chain")
    function = kernel.mnemos_chain_float if dtype == torch.float32 else kernel.mnemos_chain_double
    if not function(ctypes.byref(sizes), ctypes.byref(Arrays(gemm=gemm(dtype), **given)), ctypes.c_int(backward)):
        raise MemoryError(
            "there is no memory for the buffers of the memory's kernel: use shorter rows, or backend='torch'"
        )


def _sizes(plan: Plan, k: Tensor, v: Tensor, C: Tensor, state: list[Tensor], saving: bool) -> Sizes:
    m, n = 2 if plan.momentum else 1, len(state)
    narrow, wide = ([x.shape[1] // m for x in state], [x.shape[2] for x in state])
    ends = [(a, b) if up else (b, a) for a, b, up in zip(narrow, wide, plan.widens)]
    return Sizes(
        n,
        *k.shape[:2],
        C.shape[2] - 1,
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
        Many(*(int(joint is GeGlu) for joint in plan.joints)),
    )


NAMES = ("q", "k", "v", "C", "beta", "f", "end", "keep")


class Chain(torch.autograd.Function):
    """q, k, v, C, beta, f, end, keep, state, given -> y, state."""

    @staticmethod
    def forward(ctx, plan: Plan, q, k, v, C, beta, f, end, keep, *mats):
        n = len(plan.joints) + 1
        tensors = [x.contiguous() for x in (q, k, v, C, beta, f, end, keep)]
        state, given = ([x.contiguous() for x in xs] for xs in (mats[:n], mats[n:]))
        saving = plan.grad and any(ctx.needs_input_grad)
        sizes = _sizes(plan, k, v, C, state, saving)
        N, G = k.shape[:2]
        per_tile, per_state = ctypes.c_int64(), ctypes.c_int64()
        size = library("chain").mnemos_chain_sizes(ctypes.byref(sizes), ctypes.byref(per_tile), ctypes.byref(per_state))
        assert size == ctypes.sizeof(Arrays)
        y = k.new_empty(N, G, C.shape[2] - 1, v.shape[3]) if plan.reads else k.new_empty(0)
        saved = k.new_empty(N * G * per_tile.value if saving else 0)
        states = k.new_empty(-(-N // plan.save_every) * G * per_state.value if saving else 0)
        last = [torch.empty_like(x) for x in state]
        arrays = dict(zip(NAMES, tensors))
        _call(sizes, k.dtype, False, **arrays, start=state, given=given, y=y, saved=saved, states=states, last=last)
        if saving:
            ctx.sizes = sizes
            ctx.save_for_backward(*tensors, *given, saved, states)
        return y, *last

    @staticmethod
    @once_differentiable
    def backward(ctx, Dy, *Dlast):
        q, k, v, C, beta, f, end, keep, *given, saved, states = ctx.saved_tensors
        tensors = q, k, v, C, beta, f, end, keep
        made = {f"D{name}": torch.empty_like(x) for name, x in zip(NAMES[:3], (q, k, v))}
        made |= {f"D{name}": torch.zeros_like(x) for name, x in zip(NAMES[3:], (C, beta, f, end, keep))}
        Dy, Dlast = Dy.contiguous(), [x.contiguous() for x in Dlast]
        Dstart, Dgiven = [torch.empty_like(x) for x in Dlast], [torch.empty_like(x) for x in given]
        arrays = dict(zip(NAMES, tensors), saved=saved, states=states, Dy=Dy, Dlast=Dlast, **made)
        _call(ctx.sizes, k.dtype, True, **arrays, Dstart=Dstart, Dgiven=Dgiven)
        return (None, *made.values(), *Dstart, *Dgiven)
