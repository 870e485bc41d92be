"""The torch engine: chunks in ordinary operations for every memory, device and type, differentiated by autograd.

Groups of tiles are recomputed in the backward pass: memory holds the inputs and one state per group.
N tiles, G = batch x heads, L tokens and E window tokens of a tile, D lifted key dim, V value dim.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...memory.retention import decayed
from ...memory.spec import MemorySpec
from ...nn.derivatives import recomputed
from .chunking import ChunkRun
from .coefficients import Coefficients, decay_products
from .inner_grads import Uses, as_entries, by_pair, errors_at_anchor


class RunInputs(NamedTuple):
    """The tokens of a run of chunks, in tiles."""

    chunks: ChunkRun
    q: Tensor | None  # N G L D
    k: Tensor  # N G E D
    v: Tensor  # N G E V
    coefficients: Coefficients
    rate: Tensor | None  # N G L
    retain: Tensor | None  # N G L


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

    def run(self, spec: MemorySpec, given: RunInputs, state: Any, anchor: Any, start: Any) -> tuple[Tensor | None, Any]:
        """y (N, G, L, V), and the state after the tiles of one run.

        Of the state `anchor` the weights count; so do those of `start`, towards which weights decay; None for 0.
        """
        (W, S), A, chunks = state, anchor[0], given.chunks
        W0 = [] if start is None else start[0]
        maps, low = len(W), self.low
        timed = (given.q, given.k, given.v, given.rate, given.retain, *given.coefficients)
        fixed = len(timed)

        def group(first: int, *tensors):
            """The tiles of one group, of which the first is the run's `first`: their y, and W, S, A after them."""
            timed, W0, state = tensors[:fixed], tensors[fixed:-states], list(tensors[-states:])
            W, S, A = state[:maps], state[maps:-maps], state[-maps:]
            outputs: list[Any] = []
            for i, (q, k, v, rate, retain, *co) in enumerate(zip(*map(tiles_of, timed)), first):
                if chunks.fresh and i % chunks.period == 0:
                    A = W
                y, W, S = Tile(spec, chunks, low, q, k, v, rate, retain, Coefficients(*co), W, S, A, W0).run()
                outputs.append(y)
            return (None if y is None else torch.stack(outputs), *W, *S, *A)

        flat: list[Tensor] = [*W, *S, *A]
        states = len(flat)
        size = _tiles_per_group(chunks) if torch.is_grad_enabled() else chunks.tiles
        outputs = []
        for number, tensors in enumerate(zip(*(tiles_of(x, size) for x in timed))):
            arguments = (*tensors, *W0, *flat)
            if not torch.is_grad_enabled():
                y, *flat = group(number * size, *arguments)
            elif torch.compiler.is_compiling():
                y, *flat = checkpoint(group, number * size, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                y, *flat = recomputed(functools.partial(group, number * size), *arguments)
            outputs.append(y)
        return None if given.q is None else torch.cat(outputs), (flat[:maps], flat[maps:-maps])


def _tiles_per_group(chunks: ChunkRun) -> int:
    """As many as there are groups: the backward pass then holds the fewest states and activations at a time."""
    return max(1, math.isqrt(chunks.tiles))


def tiles_of(x: Tensor | None, size: int | None = None) -> Iterable[Tensor | None]:
    """The tiles of x (N, ...), or groups of `size`: by one operation each, whose backward does not grow with N squared."""
    if x is None or x.numel() == 0:  # what the rule does not use
        return itertools.repeat(x)
    return x.unbind(0) if size is None else x.split(size)


@dataclass
class Tile:
    """One tile: gradients of its window tokens, reads of its tokens, state at its end. Shapes as in `RunInputs`, without N.

    W, S, A, W0: weights, accumulators (or none), anchor, and the weights that W decays towards (or none), by map.
    """

    spec: MemorySpec
    chunks: ChunkRun
    low: torch.dtype | None  # of matmuls
    q: Tensor | None
    k: Tensor
    v: Tensor
    rate: Tensor | None
    retain: Tensor | None
    co: Coefficients
    W: list[Tensor]
    S: list[Tensor]
    A: list[Tensor]
    W0: Sequence[Tensor]

    def run(self) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        """y (G, L, V), and W and S at the end."""
        spec = self.spec
        if spec.anchor == "token" or self.chunks.subchunks > 1:  # the anchor moves inside the tile
            k, v = as_entries(spec, self.k), as_entries(spec, self.v)
            uses: Uses = [by_pair(spec, [(k, self.solve_errors(k, v))])]
        else:
            uses = errors_at_anchor(spec, self.k, self.v, self.A, self.matmul)
        if spec.windowed:
            return self.windowed(uses)
        if spec.commits:
            return self.committed(uses)
        return self.linear(uses)

    def linear(self, uses: Uses, listed: Tensor | None = None) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        """Weights that are linear in the gradients. listed: outputs of a first map that is a list of pairs; W, S, A are the others."""
        rows, lists = rows_read(self.spec), int(self.spec.is_kv_cache)
        C, beta, f = self.co.C[:, rows], self.co.beta[:, rows, None], self.co.f[:, rows, None]

        def fast(i: int, x: Tensor) -> Tensor:
            if listed is not None and i == 0:
                return listed
            z = self.product(x, self.W, i - lists, beta)
            if self.S:
                z = z + f * self.matmul(x, self.S[i - lists])
            for a, d in uses[i - lists]:
                z = z - self.matmul(C * self.matmul(x, a.mT), d)
            return z

        y = None if self.q is None else self.spec.network.forward(self.q, fast)
        last, f = self.co.C[:, -1, :, None], self.co.f[:, -1, None, None]
        ends = [
            w + (f * self.S[i] if self.S else 0.0) - _outer(self.matmul, last, uses[i])
            for i, w in enumerate(self.decayed_weights())
        ]
        return y, ends, _momentum_end(self.matmul, self.co, self.S, uses)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b of stacked matrices, computed in the type `low` and returned in that of a."""
        return torch.bmm(a, b) if self.low is None else torch.bmm(a.to(self.low), b.to(self.low)).to(a.dtype)

    def product(self, x: Tensor, W: list[Tensor], i: int, beta: Tensor, towards_W0: bool = True) -> Tensor:
        """x (G, L, d_in) times map i of W after the decay beta (G, L, 1)."""
        start = self.matmul(x, self.W0[i]) if self.W0 and towards_W0 else None
        return decayed(self.matmul(x, W[i]), start, beta)

    def decayed_weights(self) -> list[Tensor]:
        """W after the decay of the tile."""
        beta = self.co.beta[:, -1, None, None]
        return [decayed(w, w0, beta) for w, w0 in zip(self.W, self.W0 or [None] * len(self.W))]

    def committed(self, uses: Uses) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        """One commit interval, or a part of one that ends before its commit. S is summed in full precision: Newton–Schulz lifts the
        smallest directions of S to the size of all others, rounding errors included."""
        spec, q, S, co = self.spec, self.q, self.S, self.co
        moved = _momentum_end(torch.bmm, co, S or [torch.zeros_like(w) for w in self.W], uses)
        ends, beta = self.decayed_weights(), co.beta.unsqueeze(-1)  # G L+1 1
        if self.chunks.commit:
            assert self.rate is not None
            along = _momentum_end(torch.bmm, co._replace(n=co.C, m=co.f), S, uses) if spec.nesterov else moved
            rate = self.rate[:, -1:, None]
            ends = [spec.update_rule.commit(w, s, rate, spec) for w, s in zip(ends, along)]

        def read(q: Tensor, W: list[Tensor], beta: Tensor, towards_W0: bool = True) -> Tensor:
            return spec.network.forward(q, lambda i, x: self.product(x, W, i, beta, towards_W0))

        y = None
        if q is not None and spec.read == "after" and self.chunks.commit:
            y = read(q[:, -1:], ends, beta[:, :1], towards_W0=False)  # beta is 1 in row 0
            if q.shape[1] > 1:
                y = torch.cat([read(q[:, :-1], self.W, beta[:, 1:-1]), y], 1)
        elif q is not None:
            y = read(q, self.W, beta[:, rows_read(spec)])
        return y, ends, moved if S else []

    def windowed(self, uses: Uses) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        """A commit after every token: n of the coefficients are the weights of the windows."""
        steps = [WindowSteps(self.spec, use, self.co.n) for use in uses]
        rows, last = rows_read(self.spec), self.co.C[:, -1]
        C, beta = self.co.C[:, rows], self.co.beta[:, rows, None]

        def fast(i: int, x: Tensor) -> Tensor:
            return self.product(x, self.W, i, beta) + steps[i].read(x, C, self.matmul)

        y = None if self.q is None else self.spec.network.forward(self.q, fast)
        return y, [w + step.total(last, self.matmul) for w, step in zip(self.decayed_weights(), steps)], []

    def solve_errors(self, k: Tensor, v: Tensor) -> Tensor:
        """Errors of a linear memory whose anchor moves inside the tile: one unit-lower-triangular solve.

        The anchor of sub-chunk j is the state after its first j * stride tokens, row s of the coefficients, so the errors
        e = k A - v of its window tokens depend on those of earlier sub-chunks alone.
        """
        spec, co = self.spec, self.co
        if not spec.loss.uses_output:
            return spec.loss.error(None, v)
        E = k.shape[1]
        row = (torch.arange(E, device=k.device) // (E // self.chunks.subchunks)) * self.chunks.stride
        C, beta, f = co.C[:, row], co.beta[:, row, None], co.f[:, row, None]
        initial = k @ self.W0[0] if self.W0 else None
        known = decayed(k @ self.W[0], initial, beta)
        if self.S:
            known = known + f * (k @ self.S[0])
        coupling = C.repeat_interleave(spec.pairs_per_token, -1) * (k @ k.mT)
        if spec.decay_first and self.retain is not None:
            after = self.retain[:, row, None]
            known, coupling = decayed(known, initial, after), after * coupling
        return torch.linalg.solve_triangular(coupling, known - v, upper=False, unitriangular=True)


def rows_read(spec: MemorySpec) -> slice:
    """The rows of coefficients at which tokens read."""
    return slice(0, -1) if spec.read == "before" else slice(1, None)


def _outer(matmul, weight: Tensor, use: list[tuple[Tensor, Tensor]]) -> Tensor | float:
    """Weighted sum of the gradients of one map, over window tokens and uses. weight: (G, E, 1)."""
    return sum((matmul((weight * a).mT, d) for a, d in use), 0.0)


def _momentum_end(matmul, co: Coefficients, S: list[Tensor], uses: Uses) -> list[Tensor]:
    n, m = co.n.unsqueeze(-1), co.m[:, None, None]
    return [m * s - _outer(matmul, n, use) for s, use in zip(S, uses)]


class WindowSteps:
    """The steps of one fast map at all tokens of a tile, under a rule of the windowed family. use: inputs and errors (G, E, ·) of each use;
    weight: (G, L, c).

    The gradient at token t is Σ_i weight_i a_iᵀ d_i over the c window tokens i, so a step that is a function of its singular values is
    Aᵀ M_t B with a matrix M_t (c, c) that depends on Gram matrices alone (`Rule.window_step`). The weights after token t are
        W_t = beta_t W + Σ_{s <= t} C[t,s] A_sᵀ M_s B_s          C[t,s] = rate_s Π_{s < r <= t} retain_r
    with A_s, B_s the inputs and errors of the window of token s; u: uses of a map.
    """

    def __init__(self, spec: MemorySpec, use: list[tuple[Tensor, Tensor]], weight: Tensor):
        (_, L, c), u = weight.shape, len(use)
        self.use, self.E = use, c - 1 + L
        token, slot = torch.arange(L, device=weight.device), torch.arange(u * c, device=weight.device)
        self.places = token.unsqueeze(-1) + slot % c + slot // c * self.E  # L u*c, of a window among all entries
        a, d = (torch.cat(parts, 1) for parts in zip(*use))  # G u*E ·
        rows, columns = self.places.unsqueeze(-1), self.places.unsqueeze(-2)
        gram_in, gram_out = ((x @ x.mT)[:, rows, columns] for x in (a, d))  # G L u*c u*c
        self.a, self.d = a, d
        self.M = spec.update_rule.window_step(gram_in, gram_out, weight.repeat(1, 1, u), spec)

    def read(self, x: Tensor, C: Tensor, matmul) -> Tensor:
        """Σ_s C[t,s] x_t A_sᵀ M_s B_s: x (G, T, d_in), C (G, T, L) -> (G, T, d_out)."""
        scores = matmul(x, self.a.mT)[..., self.places]  # G T L u*c
        mixed = (scores * C.unsqueeze(-1)).transpose(1, 2) @ self.M  # G L T u*c
        mixed = mixed.transpose(1, 2).flatten(2)
        empty = mixed.new_zeros(*x.shape[:2], self.a.shape[1])
        return matmul(empty.index_add(2, self.places.flatten(), mixed), self.d)

    def total(self, C: Tensor, matmul) -> Tensor:
        """Σ_s C[s] A_sᵀ M_s B_s: C (G, L) -> (G, d_in, d_out)."""
        n = self.a.shape[1]
        places = self.places.unsqueeze(-1) * n + self.places.unsqueeze(-2)  # L u*c u*c
        weighted = (C[..., None, None] * self.M).flatten(1)
        between = weighted.new_zeros(len(weighted), n * n).index_add(1, places.flatten(), weighted)
        return matmul(self.a.mT, matmul(between.view(-1, n, n), self.d))


def windowed_step(spec: MemorySpec, use: list[tuple[Tensor, Tensor]], weight: Tensor, rate: Tensor) -> Tensor:
    """rate times the step of one token. use: (G, c, ·) of each use; weight: (G, c, 1) or (G, 1, 1), rate: (G, 1, 1) -> (G, d_in, d_out)."""
    a, d = (torch.cat(parts, 1) for parts in zip(*use))
    weight = weight.squeeze(-1).expand(-1, a.shape[1] // len(use)).repeat(1, len(use))
    M = spec.update_rule.window_step(a @ a.mT, d @ d.mT, weight, spec)
    return a.mT @ (rate * M @ d)
