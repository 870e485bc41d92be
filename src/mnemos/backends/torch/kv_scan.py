"""The engine for features "exp": queries against the keys of all earlier tokens, in tiles, recomputed in backward.

The first fast map is a list of pairs (`pairs`). The pushes (minus the errors) that this call adds to it stay apart until its
end; what momentum and decay make of them is one number per push, its share in W, in S and in the anchor. Deeper maps are
matrices, read in dual form (docs/theory.md, sections 4 and 8.4).

G = batch x heads, N tiles, L tokens and E window tokens of a tile, n pairs, K key dim, P outputs of the first map, V value dim.
`old` is the list that a call begins with, its `Pairs` as (G, n, ·).
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...memory.kv_memory import Pairs, kernel_values, logits, normalized, top_logit
from ...memory.spec import MemorySpec
from ...nn.derivatives import recomputed
from .chunking import ChunkRun
from .coefficients import Coefficients
from .engine import RunInputs, Tile, rows_read
from .inner_grads import chain_errors


class Shares(NamedTuple):
    """For every pair its share in W, S and the anchor, (G, n) each; S is None where the memory has no momentum."""

    weight: Tensor
    momentum: Tensor | None
    anchor: Tensor


def run_list(tokens, runs: list[ChunkRun], value: Tensor, W, S, A, W0, spec: MemorySpec, ends_on_grid: bool):
    """As `tokens._run_matrices`; the first of the maps is the list, (G, N, P)."""
    opened = tokens.pairs
    batch = tokens.raw_key.shape[0]
    offset = None if opened.offset is None else opened.offset.to(value.dtype).repeat(batch)[:, None, None]  # G 1 1

    def begun(share: Tensor) -> Tensor:
        return share[:, : opened.seen]

    key = opened.key.transpose(1, 2).flatten(0, 1)
    old = Pairs(begun(key), begun(W[0]), begun(S[0]) if S else None, begun(A[0]))
    run = _Run(spec, old, offset, W[1:], S[1:], A[1:], W0, momentum=bool(S))
    outputs = [run.run(tokens.run_inputs(chunks, value, spec)) for chunks in runs]
    if ends_on_grid:
        run.move_anchor()
    places = torch.tensor([opened.place + start + e for start, E in run.placed for e in range(E)], device=key.device)
    weight, momentum, anchor = run.lists(W[0].shape[1], places)
    W = [weight, *run.W]
    return outputs, W, [*momentum, *run.S], W if ends_on_grid else [anchor, *run.A]


class _Run:
    """The state of a run over tiles: matrices, the pushes of all tiles so far, and their shares.

    `share` begins with what is left of the old list's shares: of its W, its S (where there is one) and its anchor.
    """

    def __init__(self, spec: MemorySpec, old: Pairs, offset: Tensor | None, W, S, A, W0, momentum: bool):
        self.spec, self.old, self.offset, self.W, self.S, self.A, self.W0 = spec, old, offset, W, S, A, W0
        self.blocks: list[tuple[Tensor, Tensor]] = []  # keys (G, E, K) and pushes (G, E, P) of each tile
        self.placed: list[tuple[int, int]] = []  # first entry of each tile, and how many
        begin = torch.eye(3, dtype=old.key.dtype, device=old.key.device).unsqueeze(1).expand(3, len(old.key), 3)
        self.share = Shares(begin[0], begin[1] if momentum else None, begin[2])

    def move_anchor(self) -> None:
        self.A, self.share = self.W, self.share._replace(anchor=self.share.weight)

    def run(self, given: RunInputs) -> Tensor | None:
        """Write and read the tokens of a run: y (N, G, L, V)."""
        chunks, outputs = given.chunks, []
        queries = itertools.repeat(None) if given.q is None else given.q.unbind(0)
        per_tile = zip(queries, given.k.unbind(0), given.v.unbind(0), *(x.unbind(0) for x in given.coefficients))
        for i, (q, k, v, *co) in enumerate(per_tile):
            if chunks.fresh and i % chunks.period == 0:
                self.move_anchor()
            outputs.append(self.tile(chunks, q, k, v, Coefficients(*co)))
            self.placed.append((chunks.start + i * chunks.length, k.shape[1]))
        return None if given.q is None else torch.stack(outputs)

    def tile(self, chunks: ChunkRun, q: Tensor | None, k: Tensor, v: Tensor, co: Coefficients):
        blocks = [x for block in self.blocks for x in block]
        matrices = [*self.W, *self.S, *self.A, *self.W0]
        function = functools.partial(_tile, self.spec, chunks, len(self.W), len(self.S), len(self.W0))
        tensors = (q, k, v, self.offset, *co, *self.share, *vars(self.old).values(), *matrices, *blocks)
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # a compiler chooses what to recompute
        y, push, *matrices = recomputed(function, *tensors) if again else function(*tensors)
        self.W, self.S = matrices[: len(self.W)], matrices[len(self.W) :]
        self.blocks.append((k, push))
        beta, f, m = co.beta[:, -1:], co.f[:, -1:], co.m.unsqueeze(-1)
        weight, momentum, anchor = self.share
        kept = beta * weight if momentum is None else beta * weight + f * momentum
        self.share = Shares(
            torch.cat([kept, co.C[:, -1]], -1),
            None if momentum is None else torch.cat([m * momentum, co.n], -1),
            F.pad(anchor, (0, k.shape[1])),
        )
        return y

    def lists(self, length: int, places: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """The list in W, S (one or none) and the anchor, (G, length, P) each, with the pushes at `places`."""
        pushes = torch.cat([push for _, push in self.blocks], 1)  # G n P

        def of(share: Tensor) -> Tensor:
            total = F.pad(_mix(self.old, share), (0, 0, 0, length - self.old.key.shape[1]))
            return total.index_add(1, places, share[:, 3:, None] * pushes)

        weight, momentum, anchor = self.share
        listed = of(weight)
        return listed, [] if momentum is None else [of(momentum)], listed if anchor is weight else of(anchor)


def _mix(old: Pairs, share: Tensor) -> Tensor:
    """What is left of the old list under these shares: (G, n, P)."""
    w, s, a = share[:, :3, None].split(1, 1)  # G 1 1
    total = w * old.weight + a * old.anchor
    return total if old.momentum is None else total + s * old.momentum


def _tile(spec: MemorySpec, chunks: ChunkRun, maps: int, momenta: int, starts: int, q, k, v, offset, *tensors):
    """One tile: pushes of its window tokens, reads of its tokens, matrices at its end. Returns y, pushes, W, S."""
    co, share, old = Coefficients(*tensors[:5]), Shares(*tensors[5:8]), Pairs(*tensors[8:12])
    W, S, A, W0, blocks = _parts(tensors[12:], maps, momenta, maps, starts)
    keys = torch.cat(blocks[::2], 1) if blocks else None
    pushes = torch.cat(blocks[1::2], 1) if blocks else None
    if spec.depends_on_chunking:
        z = k.new_zeros(*k.shape[:2], spec.pair_dim)
        if old.key.shape[1]:
            z = z + logits(k, old.key, offset).exp() @ _mix(old, share.anchor)
        if keys is not None and pushes is not None:
            z = z + logits(k, keys, offset).exp() @ (share.anchor[:, 3:, None] * pushes)
        d, uses = kv_errors(spec, z, v, A)
    else:
        d, uses = spec.loss.error(None, F.pad(v, (0, 1), value=1.0) if spec.normalize else v), []
    z = None
    if q is not None:
        rows = rows_read(spec)
        C, beta, f = co.C[:, rows], co.beta[:, rows, None], co.f[:, rows, None]
        z = normalized(spec, _first_map(spec, q, k, -d, C, beta, f, offset, share, old, keys, pushes))
    tile = Tile(spec, chunks, None, q, k, v, None, None, co, list(W), list(S), list(A), W0)
    y, W_end, S_end = tile.linear([[use] for use in uses], listed=z)
    return y, -d, *W_end, *S_end


def _parts(tensors: tuple, *sizes: int) -> list[tuple]:
    """Tensors by groups of these sizes, and the rest."""
    ends = [0, *itertools.accumulate(sizes)]
    return [*(tensors[lo:hi] for lo, hi in itertools.pairwise(ends)), tensors[ends[-1] :]]


def _first_map(spec, q, k, push, C, beta, f, offset, share: Shares, old: Pairs, keys, pushes) -> Tensor:
    """The list at each of the tile's tokens: (G, L, P). C, beta and f are of the rows that are read."""
    L, E = C.shape[1:]
    age = torch.arange(L, device=q.device).unsqueeze(-1) - (torch.arange(E, device=q.device) - (spec.window - 1))
    later = age < (1 if spec.read == "before" else 0)  # what must not be seen, however large: inf times 0 is no number
    own = logits(q, k, offset).masked_fill(later, 0.0)
    scored = [(own, C)]
    weight_share, momentum_share = share.weight, share.momentum
    past = before = None
    mixed, kept = old.weight, old.momentum
    if keys is not None:
        past = logits(q, keys, offset)
        if momentum_share is None:
            coefficient = beta * weight_share[:, None, 3:]
        else:
            pair = torch.stack([weight_share[:, 3:], momentum_share[:, 3:]], 1)  # G 2 n
            coefficient = torch.cat([beta, f], -1) @ pair
        scored.append((past, coefficient))
    if old.key.shape[1]:
        before = logits(q, old.key, offset)
        mixed = _mix(old, weight_share)
        kept = None if momentum_share is None else _mix(old, momentum_share)
        weight = beta * mixed[..., -1].unsqueeze(1)
        scored.append((before, weight if kept is None else weight + f * kept[..., -1].unsqueeze(1)))
    top = top_logit(scored) if spec.normalize else None
    z = (kernel_values(own, top) * C) @ push
    if past is not None:
        z = z + (kernel_values(past, top) * scored[1][1]) @ pushes
    if before is not None:
        kernel = kernel_values(before, top)
        z = z + beta * (kernel @ mixed)
        if kept is not None:
            z = z + f * (kernel @ kept)
    return z


def kv_errors(spec: MemorySpec, z: Tensor, v: Tensor, A) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Errors (G, E, P) at the outputs z of the first map, and for each matrix its inputs and errors."""
    ((_, d),), *uses = chain_errors(spec, z, v, [z, *A], listed=z)
    return d, [use for (use,) in uses]
