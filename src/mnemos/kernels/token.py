"""One token in C++ (token.cpp): the fast maps of a chain, as `memory.step` has them in torch, and a linear map of one row.

B batch, H heads, G = B x H, c window, F lifted key dim, V value dim.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import deterministic

from ..memory.mode import MAPS
from ..memory.spec import MemorySpec
from .build import Unavailable, library

Many = ctypes.c_int64 * (2 * MAPS)
Pointers = ctypes.c_void_p * (2 * MAPS)
SERIAL = 1 << 20  # numbers of a state or matrix below which a second thread costs more than it saves


class Sizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("groups", "lanes", "entries", "l2", "before", "threads", "poison")),
        *((name, Many) for name in ("in", "out", "maps")),
    ]


class Arrays(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "weight", "momentum", "retain")),
        *((name, Pointers) for name in ("W", "S", "A", "newW", "newS")),
        ("y", ctypes.c_void_p),
    ]


@functools.cache
def why_not() -> str | None:
    """Why the kernel cannot be had here, or None where it can. The first call compiles it: some seconds, once per machine."""
    try:
        library("token")
    except Unavailable as reason:
        return str(reason)
    return None


@functools.cache
def _function(name: str, dtype: torch.dtype):
    function = getattr(library("token"), f"mnemos_{name}_{'float' if dtype == torch.float32 else 'double'}")
    if name == "linear":
        function.argtypes, function.restype = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3, None
    return function


@functools.lru_cache(maxsize=256)
def _sizes(spec: MemorySpec, lanes: int, threads: int, poison: bool) -> Sizes:
    chain = spec.network.chain
    assert chain is not None
    shapes = [spec.shapes[group[0]] for group in chain.groups]
    return Sizes(
        len(shapes),
        lanes,
        spec.window,
        spec.objective == "l2",
        spec.read == "before",
        threads,
        poison,
        Many(*(a for a, _ in shapes)),
        Many(*(b for _, b in shapes)),
        Many(*map(len, chain.groups)),
    )


def chain_step(
    spec: MemorySpec,
    query: Tensor,
    entries: tuple[Tensor, Tensor],
    weight: Tensor,
    gates: tuple[Tensor | None, Tensor | None],
    old: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
    new: tuple[Sequence[Tensor], Sequence[Tensor]],
) -> Tensor:
    """query (G, 1, F), entries (G, c, F) and (G, c, V), weight (G, c, 1), gates momentum and retain (G, 1, 1) -> y (G, 1, V).

    old: weights, momentum and anchor, (B, H, d_in, d_out) each and contiguous; new: where weights and momentum go to, which
    may be the old ones.
    """
    chain = spec.network.chain
    assert chain is not None
    order = [i for group in chain.groups for i in group]
    query, weight, k, v = (x.contiguous() for x in (query, weight, *entries))
    momentum, retain = (None if gate is None else gate.contiguous() for gate in gates)
    W, S, A = old
    y = v.new_empty(query.shape[0], 1, v.shape[-1])
    threads = torch.get_num_threads() if sum(w.numel() for w in W) >= SERIAL else 1
    poison = torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory  # ty: ignore[unresolved-attribute]
    arrays = Arrays(
        query.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        weight.data_ptr(),
        None if momentum is None else momentum.data_ptr(),
        None if retain is None else retain.data_ptr(),
        *(Pointers(*[xs[i].data_ptr() for i in order] if xs else ()) for xs in (W, S, A, *new)),
        y.data_ptr(),
    )
    sizes = _sizes(spec, query.shape[0], threads, poison)
    if not _function("step", v.dtype)(ctypes.byref(sizes), ctypes.byref(arrays)):
        raise MemoryError("there is no memory for the buffers of the memory's kernel")
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of one row, x (..., in) with in numbers in all, by the contiguous weight (out, in)."""
    out, n = weight.shape
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], out)
    threads = torch.get_num_threads() if out * n >= SERIAL else 1
    bias_at = None if bias is None else bias.data_ptr()
    _function("linear", x.dtype)(x.data_ptr(), weight.data_ptr(), bias_at, y.data_ptr(), n, out, threads)
    return y
