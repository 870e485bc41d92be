"""One token in C++ (token.cpp): the fast maps of a chain, as `memory.step` has them in torch, a linear map of one row, and a block, which
also takes a piece of some tokens.

B batch, H heads, G = B x H, c window, F lifted key dim, V value dim.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...memory.config import NeuralMemoryConfig
from ...memory.features import FEATURES
from ...memory.gating import fixed_retain_logits, gate_logits
from ...memory.networks import Chain
from ...memory.spec import MemorySpec
from .build import gemm, library, poison
from .operators import DONE, check
from .structs import (
    LOSSES,
    MAPS,
    Arrays,
    Block,
    BlockSizes,
    Layer,
    LayerSizes,
    Many,
    Matrices,
    Mix,
    Ring,
    RingSizes,
    Sizes,
    WindowRule,
    schedule,
)


class Maps(NamedTuple):
    """Fast maps of a state, (B, H, d_in, d_out) each and contiguous: weights, momentum, anchor and initial weights (`shared_rows`) to read,
    and the weights and momentum to write, which may be those to read."""

    W: Sequence[Tensor]
    S: Sequence[Tensor]
    A: Sequence[Tensor]
    W0: Sequence[Tensor]
    new_W: Sequence[Tensor]
    new_S: Sequence[Tensor]

    def sizes(self, rows: int) -> tuple[int, int, bool]:
        """Rows of the initial weights (0 for none, 1 where all rows share them), threads, and whether kernels poison fresh memory."""
        shared = bool(self.W0) and self.W0[0].dim() == 3
        return (1 if shared else rows) if self.W0 else 0, torch.get_num_threads(), poison()


class Piece(NamedTuple):
    """Some tokens in a row. offset: of the first one in its chunk; chunk: tokens of a chunk. anchor: for the anchor after the last token,
    where a chunk ends before it and another one does not end with it; else nothing."""

    offset: int = 0
    chunk: int = 1
    anchor: Sequence[Tensor] = ()


ONE_TOKEN = Piece()


@dataclass
class Call:
    """A kernel for a part of a block, with all its arguments but x and y. held: what `structs` point to.

    x (B, 1, dim) -> y (B, 1, dim); None where a gate is not finite: nothing is written.
    """

    name: str
    structs: tuple[ctypes.Structure, ...]
    at: int  # where among them is the one that has x and y
    held: tuple
    piece: Piece = ONE_TOKEN  # of a block's memory

    def __call__(self, x: Tensor) -> Tensor | None:
        x = x.contiguous()
        y, to = torch.empty_like(x), self.structs[self.at]
        to.x, to.x_bytes, to.y, to.y_bytes = _at(x, y)
        return y if _run(self.name, x.dtype, *map(ctypes.addressof, self.structs)) else None


ARGUMENTS = {  # p: pointer, i: int64, d: double
    "step": "pp",
    "linear": "ppiiii",
    "norm": "piiidd",
    "range": "ppi",
    "layer": "ppppp",
    "attend": "pp",
    "block": "pp",
    "feed": "ppiiii",
    "join": "piiiid",
}


@functools.cache
def _function(name: str, dtype: torch.dtype):
    function = getattr(library("token"), f"mnemos_{name}_{'float' if dtype == torch.float32 else 'double'}")
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}
    function.argtypes = [kinds[letter] for letter in ARGUMENTS[name]]
    function.restype = ctypes.c_int
    return function


def share_from(serial: int = 1 << 20, shared: int = 1 << 15) -> None:
    """Set from how many numbers on a kernel wakes other threads for a loop, and shares a loop with those that are awake."""
    function = library("token").mnemos_share_from
    function.argtypes, function.restype = [ctypes.c_int64] * 2, None
    function(serial, shared)


def _run(name: str, dtype: torch.dtype, *arguments) -> bool:
    """Call a kernel. False: a gate is not finite, and nothing was written."""
    outcome = _function(name, dtype)(*arguments)
    return outcome == DONE or check(outcome, name)


@functools.lru_cache(maxsize=256)
def _sizes(spec: MemorySpec, rows: int, heads: int, starts: int, threads: int, fills: bool) -> Sizes:
    groups = _chain(spec).groups
    shapes = [spec.shapes[group[0]] for group in groups]
    return Sizes(
        len(shapes),
        rows * heads,
        heads,
        spec.window,
        LOSSES[type(spec.loss)],
        spec.read == "before",
        starts,
        threads,
        fills,
        Many(*(a for a, _ in shapes)),
        Many(*(b for _, b in shapes)),
        Many(*map(len, groups)),
        WindowRule.of(spec.window, spec.has_nuclear_step, schedule(spec)),
    )


def _chain(spec: MemorySpec) -> Chain:
    assert spec.chain is not None
    return spec.chain


_ring_sizes, _block_sizes = (functools.lru_cache(maxsize=256)(kind) for kind in (RingSizes, BlockSizes))


def _at(*tensors: Tensor | None) -> list[int]:
    """Views: the address of each tensor, which is contiguous, and how many bytes it has."""
    found = []
    for x in tensors:
        found += (0, 0) if x is None else (x.data_ptr(), x.nbytes)
    return found


def _run_on(name: str, tensors: Sequence[Tensor | None], dtype: torch.dtype, *arguments) -> bool:
    """`_run` of a kernel that takes its views as one array, before the other arguments."""
    views = array("q", _at(*tensors))
    return _run(name, dtype, views.buffer_info()[0], *arguments)


def shared_rows(W0: Sequence[Tensor], rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Initial weights (B, H, d_in, d_out) for a kernel to read: contiguous, and (H, d_in, d_out) where B > 1 rows share one tensor."""
    if rows > 1 and all(w.stride(0) == 0 and len(w) == rows for w in W0):
        W0 = [w[0] for w in W0]
    return [w if w.dtype == dtype and w.is_contiguous() else w.to(dtype).contiguous() for w in W0]


def _arrays(spec: MemorySpec, maps: Maps, branch: Sequence[Tensor] = (), vectors: Sequence[int] = (0,) * 16) -> Arrays:
    """branch: maps of the static branch. vectors: views of query, keys, values, the gates and y."""
    order = [i for group in _chain(spec).groups for i in group]
    matrices = Matrices()
    for kind, xs in enumerate((*maps[:3], maps.new_W, maps.new_S, branch, maps.W0)):
        if xs:
            at = kind * 4 * MAPS
            matrices[at : at + 2 * len(order)] = _at(*[xs[i] for i in order])
    return Arrays(gemm(maps.W[0].dtype), *vectors[:14], matrices, *vectors[14:])


def chain_step(
    spec: MemorySpec, query: Tensor, window: tuple[Tensor, Tensor, Tensor], gates: Sequence[Tensor | None], maps: Maps
) -> Tensor:
    """query (G, 1, F) -> y (G, 1, V). window: keys (G, c, F), values (G, c, V) and weights (G, c, 1).

    gates: momentum, retain, and the rate of a windowed rule, (G, 1, 1) each.
    """
    given = [None if x is None else x.contiguous() for x in (query, *window, *gates)]
    y = query.new_empty(query.shape[0], 1, spec.value_dim)
    heads = maps.W[0].shape[1]
    rows = query.shape[0] // heads
    sizes, arrays = _sizes(spec, rows, heads, *maps.sizes(rows)), _arrays(spec, maps, (), _at(*given, y))
    _run("step", y.dtype, ctypes.addressof(sizes), ctypes.addressof(arrays))
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of few rows, x (..., in), by the contiguous weight (out, in)."""
    out, n = weight.shape
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], out)
    views = x, weight, bias, y
    _run_on("linear", views, x.dtype, gemm(x.dtype), x.numel() // x.shape[-1], n, out, torch.get_num_threads())
    return y


def norm(x: Tensor, weight: Tensor | None, factor: float, eps: float) -> Tensor:
    """x / sqrt(factor Σ x² + eps) over the last axis, times the contiguous weight, which has x's last axes."""
    x = x.contiguous()
    y, n = torch.empty_like(x), x.shape[-1]
    period = n if weight is None else weight.numel()
    _run_on("norm", (x, weight, y), x.dtype, x.numel() // n, n, period, factor, eps)
    return y


QK_NORMS = {"none": 0, "l2": 1, "rms": 2}


def ends(x: Tensor) -> tuple[float, float]:
    """The smallest and the largest number of x, NaN where one is among them."""
    x, found = x.contiguous(), (ctypes.c_double * 2)()
    _run_on("range", (x,), x.dtype, ctypes.addressof(found), x.numel())
    return found[0], found[1]


@functools.lru_cache(maxsize=256)
def _layer_sizes(
    config: NeuralMemoryConfig, width: int, B: int, starts: int, threads: int, fills: bool
) -> tuple[LayerSizes, Mix, Sizes]:
    spec, H = config.spec, config.head_count
    retain = bool(config.retain) and config.retain != "fixed"
    bound = config.value_bound or 0.0
    logits = gate_logits(config)
    start = [logits["lr"]] * H + [logits["momentum"]] * (H if config.momentum else 0)
    start += fixed_retain_logits(config) if not retain else [logits["retain"]] * H
    return (
        LayerSizes(
            config.dim,
            config.momentum,
            retain,
            spec.has_residual,
            config.effective_max_lr,
            (ctypes.c_double * len(start))(*start),
            8 * len(start),
            0 if FEATURES[spec.features].is_identity else spec.degree,
            config.gate_hidden if "token" in config.gate_parts else 0,
            "per-lag" in config.gate_parts,
            "decay" in config.gate_parts,
            spec.commits and spec.lr_position == "inside",
            *(logits[name] for name in ("lag", "token", "decay")),
            spec.step_size,
        ),
        Mix(B, H, spec.key_dim, spec.value_dim, width, QK_NORMS[config.qk_norm], config.eps, bound),
        _sizes(spec, B, H, starts, threads, fills),
    )


def layer(
    rows: int,
    tail: Tensor | None,
    window: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    config: NeuralMemoryConfig,
    maps: Maps,
) -> tuple[Call, Tensor | None, Sequence[Tensor]]:
    """A memory layer at one token, to be called or given to `block`, and where the new tail and the new window buffers will be.

    window: the last keys (B, c-1, H, K), values (B, c-1, H, V) and gates (B, c-1, H). parameters: as `decode.memory_parameters` returns
    them, all contiguous.
    """
    conv, branch = parameters[1], [x for x in parameters[13:] if x is not None]
    width = 0 if conv is None else conv.shape[0]
    tail = None if tail is None else tail.contiguous()
    new_tail = None if tail is None else torch.empty_like(tail)
    window = [x.contiguous() for x in window]
    new_window = [torch.empty_like(x) for x in window] if config.window > 1 else window
    sizes = _layer_sizes(config, width, rows, *maps.sizes(rows))
    arrays = _arrays(config.spec, maps, branch)  # the kernel makes the vectors itself
    views = _at(None, tail, *parameters[:9], None, new_tail, *parameters[9:13], *window, *new_window)
    structs = (*sizes, Layer(gemm(maps.W[0].dtype), *views), arrays)
    return Call("layer", structs, 3, (tail, new_tail, window, new_window, parameters, maps)), new_tail, new_window


def attend(
    parameters: Sequence[Tensor | None],
    cache: tuple[Tensor, Tensor, Tensor],
    tail: Tensor | None,
    heads: int,
    window: int,
    persistent: int,
    theta: float,
    eps: float,
) -> tuple[Call, Tensor | None]:
    """Sliding-window attention at one token, to be called or given to `block`, and the tensor for the new tail.

    cache: position (B,), and keys and values (B, P + window, G, D), which are written into. tail: (B, width - 1, C) of the
    convolution, if any, which is only read. parameters: qkv, norms of queries and keys, out, convolution. All contiguous."""
    position, key, value = cache
    *maps, conv = parameters
    assert maps[3] is not None
    B, _, G, D = key.shape
    threads, width = torch.get_num_threads(), 0 if conv is None else conv.shape[0]
    sizes = _ring_sizes(B, maps[3].shape[0], heads, G, D, window, persistent, threads, poison(), theta, eps, width)
    new_tail = None if tail is None else torch.empty_like(tail)
    pointers = Ring(gemm(key.dtype), *_at(None, *maps, position, key, value, None, conv, tail, new_tail))
    return Call("attend", (sizes, pointers), 1, (parameters, cache, tail, new_tail)), new_tail


def block(
    x: Tensor,
    norms: Sequence[Tensor | None],
    eps: tuple[float, float, float],
    gate: Sequence[Tensor],
    gate_start: float,
    additive: bool,
    feed: tuple[Tensor, Tensor],
    memory: Call | None = None,
    attention: Call | None = None,
    piece: Piece = ONE_TOKEN,
) -> Tensor | None:
    """A residual block, x (B, T, dim) -> y (B, T, dim); None where a gate of its memory is not finite: nothing is written.

    With T > 1, windows of memories have one token, their rules are gradient descent, and their keys are not lifted.
    norms: before the mixer, between memory and attention (which then follow each other), before the feed-forward part; with their eps.
    gate: weight and offset of what joins attention and memory, or none; gate_start: its initial logit. feed: gate_up and down. All contiguous.
    """
    x = x.contiguous()
    y, (B, time, dim), hidden = torch.empty_like(x), x.shape, feed[1].shape[1]
    weight, offset = gate or (None, None)
    gates = 0 if weight is None else weight.shape[0]
    flags = additive, torch.get_num_threads(), poison()
    sizes = _block_sizes(B, dim, hidden, gates, *flags, *eps, gate_start, time, piece.offset, piece.chunk)
    parts = [None] * 5 if memory is None else map(ctypes.addressof, memory.structs)
    rings = [None] * 2 if attention is None else map(ctypes.addressof, attention.structs)
    anchors = array("q", _at(*piece.anchor))
    views = _at(x, *norms[:2], weight, offset, norms[2], *feed, y)
    pointers = Block(gemm(x.dtype), *views, *parts, *rings, anchors.buffer_info()[0] if anchors else None)
    return y if _run("block", x.dtype, ctypes.addressof(sizes), ctypes.addressof(pointers)) else None


def feed(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU of few rows, x (..., dim) -> (..., dim), by the contiguous weights gate_up (2 hidden, dim) and down (dim, hidden)."""
    x = x.contiguous()
    y, (dim, hidden) = torch.empty_like(x), down.shape
    views = x, gate_up, down, y
    _run_on("feed", views, x.dtype, gemm(x.dtype), x.numel() // dim, dim, hidden, torch.get_num_threads())
    return y


def join(x: Tensor, y: Tensor, m: Tensor, weight: Tensor, offset: Tensor, logit: float, additive: bool) -> Tensor:
    """g y + (1 - g) m, or y + g m: g = sigmoid(weight x + offset + logit), each of its outputs for as many channels; y, m (..., dim)."""
    x, y, m = x.contiguous(), y.contiguous(), m.contiguous()
    z, (gates, dim) = torch.empty_like(y), weight.shape
    _run_on("join", (x, y, m, weight, offset, z), x.dtype, x.numel() // dim, dim, gates, additive, logit)
    return z
