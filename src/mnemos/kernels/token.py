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

from ..memory.config import NeuralMemoryConfig
from ..memory.mode import MAPS
from ..memory.spec import MemorySpec
from .build import Unavailable, gemm, library

Many = ctypes.c_int64 * (2 * MAPS)
Pointers = ctypes.c_void_p * (2 * MAPS)
Matrices = Sequence[Sequence[Tensor]]
SERIAL = 1 << 20  # numbers of a state or matrix below which a second thread costs more than it saves


class Sizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("groups", "lanes", "entries", "l2", "before", "threads", "poison")),
        *((name, Many) for name in ("in", "out", "maps")),
    ]


class Mix(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "H", "K", "V", "width", "qk_norm")),
        *((name, ctypes.c_double) for name in ("eps", "bound")),
    ]


class Arrays(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "weight", "momentum", "retain")),
        *((name, Pointers) for name in ("W", "S", "A", "newW", "newS")),
        ("y", ctypes.c_void_p),
    ]


class LayerSizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("dim", "momentum", "retain", "residual")),
        ("lr_ceiling", ctypes.c_double),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "gemm",
            "x",
            "tail",
            "qkv",
            "conv",
            "gates",
            "gates_bias",
            "retain",
            "norm",
            "output_gate",
            "out",
            "y",
            "new_tail",
        )
    ]


class RingSizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "dim", "H", "G", "D", "window", "persistent", "threads", "poison")),
        *((name, ctypes.c_double) for name in ("theta", "eps")),
    ]


class Ring(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("gemm", "x", "qkv", "q_norm", "k_norm", "out", "position", "key", "value", "y")
    ]


@functools.cache
def why_not() -> str | None:
    """Why the kernel cannot be had here, or None where it can. The first call compiles it: some seconds, once per machine."""
    try:
        library("token"), gemm(torch.float32), gemm(torch.float64)
    except Unavailable as reason:
        return str(reason)
    return None


ARGUMENTS = {  # p: pointer, i: int64, d: double
    "step": "pp",
    "linear": "ppppiii",
    "norm": "pppiiidd",
    "range": "ppi",
    "layer": "ppppp",
    "attend": "pp",
    "feed": "pppppiiii",
    "join": "ppppppiiii",
}
GIVES = ("step", "layer", "attend", "feed")  # whether there was memory for their buffers


@functools.cache
def _function(name: str, dtype: torch.dtype):
    function = getattr(library("token"), f"mnemos_{name}_{'float' if dtype == torch.float32 else 'double'}")
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}
    function.argtypes = [kinds[letter] for letter in ARGUMENTS[name]]
    function.restype = ctypes.c_int if name in GIVES else None
    return function


@functools.lru_cache(maxsize=256)
def _sizes(spec: MemorySpec, lanes: int, threads: int, poison: bool) -> Sizes:
    chain = spec.chain
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


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _poison() -> bool:
    return torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory  # ty: ignore[missing-attribute]


def _check_room(done: int) -> None:
    if not done:
        raise MemoryError("there is no memory for the buffers of a kernel")


def _arrays(spec: MemorySpec, old: Matrices, new: Matrices, *vectors: Tensor | None) -> tuple[Sizes, Arrays]:
    chain, W = spec.chain, old[0]
    assert chain is not None
    order = [i for group in chain.groups for i in group]
    mats = [Pointers(*[xs[i].data_ptr() for i in order] if xs else ()) for xs in (*old, *new)]
    threads = torch.get_num_threads() if sum(w.numel() for w in W) >= SERIAL else 1
    sizes = _sizes(spec, W[0].shape[0] * W[0].shape[1], threads, _poison())
    return sizes, Arrays(*map(_at, vectors[:6]), *mats, *map(_at, vectors[6:]))


def chain_step(
    spec: MemorySpec,
    query: Tensor,
    entries: tuple[Tensor, Tensor],
    weight: Tensor,
    gates: tuple[Tensor | None, Tensor | None],
    old: Matrices,
    new: Matrices,
) -> Tensor:
    """query (G, 1, F), entries (G, c, F) and (G, c, V), weight (G, c, 1), gates momentum and retain (G, 1, 1) -> y (G, 1, V).

    old: weights, momentum and anchor, (B, H, d_in, d_out) each and contiguous; new: where weights and momentum go to, which
    may be the old ones.
    """
    given = [None if x is None else x.contiguous() for x in (query, *entries, weight, *gates)]
    y = query.new_empty(query.shape[0], 1, spec.value_dim)
    sizes, arrays = _arrays(spec, old, new, *given, y)
    _check_room(_function("step", y.dtype)(ctypes.addressof(sizes), ctypes.addressof(arrays)))
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


def norm(x: Tensor, weight: Tensor | None, factor: float, eps: float) -> Tensor:
    """x / sqrt(factor Σ x² + eps) over the last axis, times the contiguous weight, which has x's last axes."""
    x = x.contiguous()
    y, n = torch.empty_like(x), x.shape[-1]
    w, period = (None, n) if weight is None else (weight.data_ptr(), weight.numel())
    _function("norm", x.dtype)(x.data_ptr(), w, y.data_ptr(), x.numel() // n, n, period, factor, eps)
    return y


QK_NORMS = {"none": 0, "l2": 1, "rms": 2}


@functools.lru_cache(maxsize=256)
def _mix(*sizes) -> Mix:
    return Mix(*sizes)


def ends(x: Tensor) -> tuple[float, float]:
    """The smallest and the largest number of x, NaN where one is among them."""
    x, found = x.contiguous(), (ctypes.c_double * 2)()
    _function("range", x.dtype)(x.data_ptr(), ctypes.addressof(found), x.numel())
    return found[0], found[1]


@functools.lru_cache(maxsize=256)
def _layer_sizes(*sizes) -> LayerSizes:
    return LayerSizes(*sizes)


def layer(
    x: Tensor,
    tail: Tensor | None,
    parameters: Sequence[Tensor | None],
    config: NeuralMemoryConfig,
    old: Matrices,
    new: Matrices,
) -> tuple[Tensor, Tensor | None] | None:
    """A memory layer at one token, x (B, 1, dim) -> y (B, 1, dim), new tail; None where a gate is not finite: nothing is written.

    parameters: qkv, convolution, gates and their bias, fixed retain, norm, output gate, out; all contiguous. old, new: as in `chain_step`.
    """
    spec, B = config.spec, x.shape[0]
    x, tail = x.contiguous(), None if tail is None else tail.contiguous()
    y, new_tail = torch.empty_like(x), None if tail is None else torch.empty_like(tail)
    conv = parameters[1]
    width = 0 if conv is None else conv.shape[0]
    qk_norm, bound = QK_NORMS[config.qk_norm], config.value_bound or 0.0
    mixing = _mix(B, config.head_count, spec.key_dim, spec.value_dim, width, qk_norm, config.eps, bound)
    token_retain = bool(config.retain) and config.retain != "fixed"
    given = _layer_sizes(config.dim, config.momentum, token_retain, spec.residual, config.lr_ceiling)
    sizes, arrays = _arrays(spec, old, new, *[None] * 7)  # the kernel makes the vectors itself
    pointers = Layer(gemm(x.dtype), *map(_at, (x, tail, *parameters, y, new_tail)))
    done = _function("layer", x.dtype)(*map(ctypes.addressof, (given, mixing, sizes, pointers, arrays)))
    _check_room(done)
    return (y, new_tail) if done == 1 else None


@functools.lru_cache(maxsize=256)
def _ring_sizes(*sizes) -> RingSizes:
    return RingSizes(*sizes)


def attend(
    x: Tensor,
    parameters: Sequence[Tensor | None],
    cache: tuple[Tensor, Tensor, Tensor],
    heads: int,
    window: int,
    persistent: int,
    theta: float,
    eps: float,
) -> Tensor:
    """Sliding-window attention at one token, x (B, 1, dim) -> y (B, 1, dim). cache: position (B,), and keys and values
    (B, P + window, G, D), which are written into. parameters: qkv, norms of queries and keys, out; all contiguous."""
    x = x.contiguous()
    y, (position, key, value) = torch.empty_like(x), cache
    B, G, D, dim = x.shape[0], key.shape[2], key.shape[3], x.shape[2]
    sizes = _ring_sizes(B, dim, heads, G, D, window, persistent, torch.get_num_threads(), _poison(), theta, eps)
    pointers = Ring(gemm(x.dtype), *map(_at, (x, *parameters, position, key, value, y)))
    _check_room(_function("attend", x.dtype)(ctypes.addressof(sizes), ctypes.addressof(pointers)))
    return y


def feed(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU of few rows, x (..., dim) -> (..., dim), by the contiguous weights gate_up (2 hidden, dim) and down (dim, hidden)."""
    x = x.contiguous()
    y, (dim, hidden) = torch.empty_like(x), down.shape
    pointers = gemm(x.dtype), *map(_at, (x, gate_up, down, y))
    _check_room(_function("feed", x.dtype)(*pointers, x.numel() // dim, dim, hidden, torch.get_num_threads()))
    return y


def join(x: Tensor, y: Tensor, m: Tensor, weight: Tensor, bias: Tensor, additive: bool) -> Tensor:
    """g y + (1 - g) m, or y + g m: g = sigmoid of a linear map of x, each of its outputs for as many channels; y, m (..., dim)."""
    x, y, m = x.contiguous(), y.contiguous(), m.contiguous()
    z, (gates, dim) = torch.empty_like(y), weight.shape
    pointers = map(_at, (x, y, m, weight, bias, z))
    _function("join", x.dtype)(*pointers, x.numel() // dim, dim, gates, additive)
    return z
