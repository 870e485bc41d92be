"""The torch engine: chunks in ordinary operations for every memory, device and type, differentiated by autograd.

Groups of tiles are recomputed in the backward pass: memory holds the inputs and one state per group.
N tiles, G = batch x heads, L tokens and E window tokens of a tile, D lifted key dim, V value dim.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...memory.retention import decayed
from ...memory.spec import MemorySpec
from ...nn.checkpoint import recomputed
from .chunking import ChunkRun
from .coefficients import Coefficients, decay_products
from .inner_grads import Uses, as_entries, by_pair, errors_at_anchor
from .windowed import windowed_tile


class Engine:
    """Runs of chunks in torch operations. low: the type of matmuls, None for that of the inputs."""

    joins_chunks = True  # whether small chunks may share a tile

    def __init__(self, low: torch.dtype | None = None):
        self.low = low

    def decay_products(self, x: Tensor) -> Tensor:
        return decay_products(x)

    def open(self, spec: MemorySpec, W: list[Tensor], S: list[Tensor]) -> Any:
        """W and S, maps (G, d_in, d_out), in the form that passes from run to run."""
        return W, S

    def close(self, spec: MemorySpec, state: Any) -> tuple[list[Tensor], list[Tensor]]:
        """W and S of a state that `open` or `run` returned."""
        return state

    def run(
        self,
        spec: MemorySpec,
        chunks: ChunkRun,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        coefficients: Coefficients,
        rate: Tensor | None,
        retain: Tensor | None,
        state: Any,
        anchor: Any,
        start: Any,
    ) -> tuple[Tensor | None, Any]:
        """y (N, G, L, V), and the state after the tiles of one run.

        q: (N, G, L, D) or None, k: (N, G, E, D), v: (N, G, E, V), rate and retain: (N, G, L). Of the state `anchor` the weights count;
        so do those of `start`, towards which weights decay; None for 0.
        """
        matmul = functools.partial(_matmul, self.low)
        W0 = [] if start is None else start[0]
        y, W, S = _run(spec, chunks, q, k, v, coefficients, rate, retain, *state, anchor[0], W0, matmul)
        return y, (W, S)


def _run(
    spec,
    chunks: ChunkRun,
    q,
    k,
    v,
    coefficients,
    rate,
    retain,
    W: list[Tensor],
    S: list[Tensor],
    A: list[Tensor],
    W0: list[Tensor],
    matmul,
):
    maps = len(W)
    timed = (q, k, v, *coefficients, rate, retain)

    def group(first: int, *tensors):
        """The tiles of one group, of which the first is the run's `first`: their y, and W, S, A after them."""
        timed, W0, state = tensors[:fixed], tensors[fixed:-states], list(tensors[-states:])
        W, S, A = state[:maps], state[maps:-maps], state[-maps:]
        outputs = []
        for i, (q, k, v, C, beta, f, n, m, rate, retain) in enumerate(zip(*map(_tiles, timed)), first):
            if chunks.fresh and i % chunks.period == 0:
                A = W
            y, W, S = _tile(spec, chunks, matmul, q, k, v, Coefficients(C, beta, f, n, m), rate, retain, W, S, A, W0)
            outputs.append(y)
        return (None if y is None else torch.stack(outputs), *W, *S, *A)

    state: list[Tensor] = [*W, *S, *A]
    fixed, states = len(timed), len(state)
    size = _tiles_per_group(chunks) if torch.is_grad_enabled() else chunks.tiles
    outputs = []
    for number, tensors in enumerate(zip(*(_tiles(x, size) for x in timed))):
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            y, *state = checkpoint(
                group, number * size, *tensors, *W0, *state, use_reentrant=False, preserve_rng_state=False
            )
        elif torch.is_grad_enabled():
            y, *state = recomputed(functools.partial(group, number * size), *tensors, *W0, *state)
        else:
            y, *state = group(number * size, *tensors, *W0, *state)
        outputs.append(y)
    return None if q is None else torch.cat(outputs), state[:maps], state[maps:-maps]


def _tiles_per_group(chunks: ChunkRun) -> int:
    """As many as there are groups: the backward pass then holds the fewest states and activations at a time."""
    return max(1, math.isqrt(chunks.tiles))


def _tiles(x: Tensor | None, size: int | None = None) -> Iterable[Tensor | None]:
    """The tiles of x (N, ...), or groups of `size`: by one operation each, whose backward does not grow with N squared."""
    if x is None or x.numel() == 0:  # what the rule does not use
        return itertools.repeat(x)
    return x.unbind(0) if size is None else x.split(size)


def _matmul(low: torch.dtype | None, a: Tensor, b: Tensor) -> Tensor:
    """a @ b of stacked matrices, computed in the type `low` and returned in that of a."""
    return torch.bmm(a, b) if low is None else torch.bmm(a.to(low), b.to(low)).to(a.dtype)


def _tile(spec, chunks, matmul, q, k, v, co, rate, retain, W, S, A, W0):
    """One tile: gradients of its window tokens, reads of its tokens, state at its end."""
    if moves_inside(spec, chunks):
        k, v = as_entries(spec, k), as_entries(spec, v)
        uses: Uses = [by_pair(spec, [(k, _solve_errors(spec, chunks, k, v, co, retain, W, S, W0))])]
    else:
        uses = errors_at_anchor(spec, k, v, A, matmul)
    if spec.windowed:
        return windowed_tile(spec, matmul, q, co, W, W0, uses)
    if spec.commits:
        return _committed_tile(spec, chunks, matmul, q, co, rate, W, S, W0, uses)
    y = None
    if q is not None:
        rows = slice(0, -1) if spec.read == "before" else slice(1, None)
        C, beta, f = co.C[:, rows], co.beta[:, rows, None], co.f[:, rows, None]

        def fast(i: int, x: Tensor) -> Tensor:
            z = _product(matmul, x, W, W0, i, beta)
            if S:
                z = z + f * matmul(x, S[i])
            for a, d in uses[i]:
                z = z - matmul(C * matmul(x, a.mT), d)
            return z

        y = spec.network.forward(q, fast)
    last, beta, f = co.C[:, -1, :, None], co.beta[:, -1, None, None], co.f[:, -1, None, None]
    kept = _decayed_maps(W, W0, beta)
    W_end = [w + (f * S[i] if S else 0.0) - _outer(matmul, last, uses[i]) for i, w in enumerate(kept)]
    return y, W_end, _momentum_end(matmul, co, S, uses)


def _decayed_maps(W: list[Tensor], W0: Sequence[Tensor], beta: Tensor) -> list[Tensor]:
    return [decayed(w, W0[i] if W0 else None, beta) for i, w in enumerate(W)]


def _product(matmul, x: Tensor, W: list[Tensor], W0: Sequence[Tensor], i: int, beta: Tensor) -> Tensor:
    """x times the decayed weights of map i. x: (G, L, d_in), beta: (G, L, 1)."""
    return decayed(matmul(x, W[i]), matmul(x, W0[i]) if W0 else None, beta)


def moves_inside(spec: MemorySpec, chunks: ChunkRun) -> bool:
    """Whether the anchor moves inside a tile of the run."""
    return spec.anchor == "token" or chunks.subchunks > 1


def _outer(matmul, weight: Tensor, use: list[tuple[Tensor, Tensor]]) -> Tensor | float:
    """Weighted sum of the gradients of one map, over window tokens and uses. weight: (G, E, 1)."""
    return sum((matmul((weight * a).mT, d) for a, d in use), 0.0)


def _momentum_end(matmul, co: Coefficients, S: list[Tensor], uses: Uses) -> list[Tensor]:
    n, m = co.n.unsqueeze(-1), co.m[:, None, None]
    return [m * s - _outer(matmul, n, use) for s, use in zip(S, uses)]


def _committed_tile(spec, chunks, matmul, q, co, rate, W, S, W0, uses):
    """One commit interval, or a part of one that ends before its commit. S is summed in full precision: Newton–Schulz lifts the
    smallest directions of S to the size of all others, rounding errors included."""
    moved = _momentum_end(torch.bmm, co, S or [torch.zeros_like(w) for w in W], uses)
    beta = co.beta.unsqueeze(-1)  # G L+1 1
    W_end = _decayed_maps(W, W0, beta[:, -1:])
    if chunks.commit:
        along = moved
        if spec.nesterov:
            along = _momentum_end(torch.bmm, co._replace(n=co.C, m=co.f), S, uses)
        W_end = [spec.update_rule.commit(w, s, rate[:, -1:, None], spec) for w, s in zip(W_end, along)]
    y = None
    if q is not None and spec.read == "before":
        y = _read(spec, matmul, q, W, W0, beta[:, :-1])
    elif q is not None and chunks.commit:
        y = _read(spec, matmul, q[:, -1:], W_end, [], beta[:, :1])
        if q.shape[1] > 1:
            y = torch.cat([_read(spec, matmul, q[:, :-1], W, W0, beta[:, 1:-1]), y], 1)
    elif q is not None:
        y = _read(spec, matmul, q, W, W0, beta[:, 1:])
    return y, W_end, moved if S else []


def _read(spec: MemorySpec, matmul, q: Tensor, W: list[Tensor], W0: Sequence[Tensor], beta: Tensor) -> Tensor:
    return spec.network.forward(q, lambda i, x: _product(matmul, x, W, W0, i, beta))


def _solve_errors(spec, chunks, k, v, co, retain, W, S, W0) -> Tensor:
    """Errors of a linear memory whose anchor moves inside the tile: one unit-lower-triangular solve.

    The anchor of sub-chunk j is the state after its first j * stride tokens, row s of the coefficients, so the errors
    e = k A - v of its window_tokens hang on those of earlier sub-chunks alone.
    """
    if not spec.loss.uses_output:
        return spec.loss.error(None, v)
    E = k.shape[1]
    row = (torch.arange(E, device=k.device) // (E // chunks.subchunks)) * chunks.stride
    C, beta, f = co.C[:, row], co.beta[:, row, None], co.f[:, row, None]
    initial = k @ W0[0] if W0 else None
    known = decayed(k @ W[0], initial, beta)
    if S:
        known = known + f * (k @ S[0])
    coupling = C.repeat_interleave(spec.pairs_per_token, -1) * (k @ k.mT)
    if spec.decay_first and retain is not None:
        after = retain[:, row, None]
        known, coupling = decayed(known, initial, after), after * coupling
    return torch.linalg.solve_triangular(coupling, known - v, upper=False, unitriangular=True)
