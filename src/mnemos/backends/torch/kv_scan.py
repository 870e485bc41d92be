"""The engine for features "exp": queries against the keys of all earlier tokens, in tiles, recomputed in backward.

The first fast map is a list of pairs (`Pairs`). A write adds a push (minus the error) to it; what momentum and decay make of a push later
is one number, its share in W and in S. The list that a call begins with is a block of pushes too, and its momentum another one. Deeper maps
are matrices, read in dual form (docs/theory.md, sections 4 and 8.4).

G = batch x heads, L tokens and E window tokens of a tile, n pushes, K key dim, P outputs of the first map, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...memory.kv_memory import kernel_values, logits, normalized, top_logit
from ...memory.spec import MemorySpec
from ...nn.derivatives import recomputed
from .chunking import ChunkRun, heads_first
from .coefficients import Coefficients
from .engine import Engine, RunInputs, Tile, rows_read, tiles_of
from .inner_grads import chain_errors


@dataclass
class Opened:
    """The list while tokens are being written: that of the state, then the c-1 tokens before the first, then the tokens.

    key: (B, N, H, K) of all of them. place: where the c-1 tokens before the first begin. seen: how many may have a share.
    offset: (H,), what is added to inner products, or None.
    """

    key: Tensor
    place: int
    seen: int
    offset: Tensor | None


class Listed(NamedTuple):
    """W and S: matrices, by map; blocks of keys (G, ·, K) and pushes (G, ·, P); for every push its share in W and in S (or None), (G, n).

    places: of each block the slot of its first push in the list.
    """

    W: list[Tensor]
    S: list[Tensor]
    keys: list[Tensor]
    pushes: list[Tensor]
    weight: Tensor
    momentum: Tensor | None
    places: list[int]


class ListEngine(Engine):
    """Runs of chunks of a memory whose first map, in the state (G, N, P), is the list. start: the weights of the others, as they are."""

    def __init__(self, opened: Opened):
        super().__init__()
        self.opened, self.key = opened, heads_first(opened.key)  # G N K
        heads = opened.key.shape[2]
        offset = None if opened.offset is None else opened.offset.to(self.key.dtype)
        self.offset = None if offset is None else offset.repeat(len(self.key) // heads)[:, None, None]  # G 1 1

    def open(self, spec: MemorySpec, W: list[Tensor], S: list[Tensor]) -> Listed:
        seen, lists = self.opened.seen, [W[0], *S[:1]]
        of_W = torch.arange(seen * len(lists), device=self.key.device) < seen
        weight = of_W.to(self.key.dtype).expand(len(self.key), -1)
        pushes, count = [x[:, :seen] for x in lists], len(lists)
        return Listed(
            W[1:], S[1:], [self.key[:, :seen]] * count, pushes, weight, 1 - weight if S else None, [0] * count
        )

    def close(self, spec: MemorySpec, state: Listed) -> tuple[list[Tensor], list[Tensor]]:
        blocks = zip(state.places, state.pushes)
        slots = torch.cat([torch.arange(x.shape[1], device=x.device) + place for place, x in blocks])
        pushes = torch.cat(state.pushes, 1)

        def listed(share: Tensor) -> Tensor:
            empty = pushes.new_zeros(len(pushes), self.key.shape[1], pushes.shape[2])
            return empty.index_add(1, slots, share.unsqueeze(-1) * pushes)

        momentum = [] if state.momentum is None else [listed(state.momentum)]
        return [listed(state.weight), *state.W], [*momentum, *state.S]

    def run(self, spec: MemorySpec, given: RunInputs, state: Listed, anchor: Listed, start: list[Tensor] | None):
        chunks, W0, outputs = given.chunks, start or [], []
        for i, (q, k, v, *co) in enumerate(zip(*map(tiles_of, (given.q, given.k, given.v, *given.coefficients)))):
            if chunks.fresh and i % chunks.period == 0:
                anchor = state
            lists = [tuple(x[:-1]) for x in ((state,) if anchor is state else (state, anchor))]
            tensors, form = tree_flatten((lists, W0, Coefficients(*co)))

            def tile(q, k, v, offset, *tensors, form=form):
                lists, W0, co = tree_unflatten(list(tensors), form)
                lists = [Listed(*x, []) for x in lists]
                return _tile(spec, chunks, q, k, v, offset, co, lists[0], lists[-1], W0)

            again = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # which chooses what to recompute
            given_tile = q, k, v, self.offset, *tensors
            y, push, *ends = recomputed(tile, *given_tile) if again else tile(*given_tile)
            outputs.append(y)
            place = self.opened.place + chunks.start + i * chunks.length
            state = _after(state, Coefficients(*co), k, push, ends, place)
        return None if given.q is None else torch.stack(outputs), state


def _after(state: Listed, co: Coefficients, k: Tensor, push: Tensor, ends: list[Tensor], place: int) -> Listed:
    """The state behind a tile. ends: its matrices. place: the slot of its first window token."""
    weight, momentum, maps = co.beta[:, -1:] * state.weight, state.momentum, len(state.W)
    if momentum is not None:
        weight = weight + co.f[:, -1:] * momentum
        momentum = torch.cat([co.m.unsqueeze(-1) * momentum, co.n], -1)
    weight, places = torch.cat([weight, co.C[:, -1]], -1), [*state.places, place]
    return Listed(ends[:maps], ends[maps:], [*state.keys, k], [*state.pushes, push], weight, momentum, places)


def _tile(spec: MemorySpec, chunks: ChunkRun, q, k, v, offset, co: Coefficients, state: Listed, anchor: Listed, W0):
    """One tile: reads of its tokens, pushes of its window tokens, and W and S of the matrices at its end."""
    n, keys, pushes = state.weight.shape[1], torch.cat([*state.keys, k], 1), torch.cat(state.pushes, 1)
    if spec.depends_on_chunking:
        known = (keys[:, :n], pushes) if anchor is state else (torch.cat(anchor.keys, 1), torch.cat(anchor.pushes, 1))
        z = (logits(k, known[0], offset).exp() * anchor.weight.unsqueeze(1)) @ known[1]
        d, uses = kv_errors(spec, z, v, anchor.W)
    else:
        d, uses = spec.loss.error(None, F.pad(v, (0, 1), value=1.0) if spec.normalize else v), []
    z = None
    if q is not None:
        rows = rows_read(spec)
        C, share = co.C[:, rows], co.beta[:, rows, None] * state.weight.unsqueeze(1)
        if state.momentum is not None:
            share = share + co.f[:, rows, None] * state.momentum.unsqueeze(1)
        L, E = C.shape[1:]
        age = torch.arange(L, device=q.device).unsqueeze(-1) - (torch.arange(E, device=q.device) - (spec.window - 1))
        later = age < (spec.read == "before")  # what must not be seen, however large: inf times 0 is no number
        scores = logits(q, keys, offset).masked_fill(F.pad(later, (n, 0)), 0.0)
        share = torch.cat([share, C], -1)  # G L n+E
        top = None
        if spec.normalize:
            top = top_logit(scores, share * torch.cat([pushes[..., -1], -d[..., -1]], 1).unsqueeze(1))
        kernel = kernel_values(scores, top) * share
        z = normalized(spec, kernel[..., :n] @ pushes - kernel[..., n:] @ d)
    tile = Tile(spec, chunks, None, q, k, v, None, None, co, state.W, state.S, anchor.W, W0)
    y, W, S = tile.linear([[use] for use in uses], listed=z)
    return y, -d, *W, *S


def kv_errors(spec: MemorySpec, z: Tensor, v: Tensor, A) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Errors (G, E, P) at the outputs z of the first map, and for each matrix its inputs and errors."""
    ((_, d),), *uses = chain_errors(spec, z, v, [z, *A], listed=z)
    return d, [use for (use,) in uses]
