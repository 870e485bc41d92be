"""How a sequence is cut: runs on the chunk grid, and tiles, the unit of work of an engine.

A tile holds L = J x stride tokens: J whole chunks where chunks are small, or a part of one chunk where they are large.
N tiles, B batch, H heads, G = B x H, L tokens and E window tokens of a tile, c window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...memory.spec import MemorySpec

TILE = 64  # tokens a tile aims at: enough for large matmuls, few enough to keep the L x L terms small
MAX_WINDOW_TOKENS = 256  # most window tokens of a tile that holds several chunks


class ChunkRun(NamedTuple):
    """`tiles` tiles that start at token `start`. `fresh`: the anchor becomes W at every `period`-th tile; else it is given."""

    start: int
    tiles: int
    subchunks: int
    stride: int
    period: int
    fresh: bool
    commit: bool

    @property
    def length(self) -> int:
        """Tokens of a tile."""
        return self.subchunks * self.stride

    @property
    def stop(self) -> int:
        return self.start + self.tiles * self.length


def cut(n: int, tokens_to_boundary: int, spec: MemorySpec, together: bool = True) -> list[ChunkRun]:
    """Runs of chunks that cover n tokens, of which the first `tokens_to_boundary` belong to a chunk whose anchor is given.

    together: small chunks share a tile, which makes few large matmuls of many small ones.
    """
    if spec.anchor == "token":
        return _whole_chunks(0, n, 1, spec, together)
    if not spec.depends_on_chunking:
        return _part(0, n, spec, fresh=True, offset=0)
    runs: list[ChunkRun] = []
    b = spec.chunk_size
    head = min(tokens_to_boundary, n)
    runs += _part(0, head, spec, fresh=False, offset=b - tokens_to_boundary)
    whole = (n - head) // b
    if spec.has_intervals:
        if whole:
            m = spec.commit
            runs.append(ChunkRun(head, whole * (b // m), 1, m, b // m, True, True))
    else:
        runs += _whole_chunks(head, whole, b, spec, together)
    start = head + whole * b
    return runs + _part(start, n - start, spec, fresh=True, offset=0)


def _whole_chunks(start: int, count: int, b: int, spec: MemorySpec, together: bool) -> list[ChunkRun]:
    """`count` chunks of b tokens that start on the grid."""
    if count == 0:
        return []
    tile = _tile_length(spec)
    if b > tile:
        part = next((d for d in range(tile, tile // 2, -1) if b % d == 0), b)
        return [ChunkRun(start, count * (b // part), 1, part, b // part, True, True)]
    shared = 1
    if together and _solvable(spec):  # the errors of several chunks are one solve
        shared = max(1, min(tile // b, MAX_WINDOW_TOKENS // (spec.window - 1 + b)))
    runs = []
    if count // shared:
        runs.append(ChunkRun(start, count // shared, shared, b, 1, True, True))
    if count % shared:
        rest = count % shared
        runs.append(ChunkRun(start + (count - rest) * b, 1, rest, b, 1, True, True))
    return runs


def _solvable(spec: MemorySpec) -> bool:
    return (
        spec.network.is_matrix and spec.loss.solvable and not (spec.commits or spec.is_kv_cache or spec.max_grad_norm)
    )


def _part(start: int, n: int, spec: MemorySpec, fresh: bool, offset: int) -> list[ChunkRun]:
    """n tokens of one chunk, the first of which is token `offset` of it, all at one anchor."""
    tile = spec.commit if spec.has_intervals else _tile_length(spec)
    runs: list[ChunkRun] = []
    lead = min(n, -offset % tile) if spec.has_intervals else 0
    for length, period in ((lead, 1), (tile, (n - lead) // tile), ((n - lead) % tile, 1)):
        if length == 0 or period == 0:
            continue
        first = fresh and not runs
        begin = runs[-1].stop if runs else start
        commits = (offset + begin - start + length) % tile == 0
        runs.append(ChunkRun(begin, period, 1, length, period, first, commits))
    return runs


def _tile_length(spec: MemorySpec) -> int:
    """At least the window, so that re-evaluating the c-1 tokens before a tile at most doubles the work."""
    length = TILE
    while length < spec.window - 1:
        length *= 2
    return length


def heads_first(x: Tensor) -> Tensor:
    """(B, n, H, ...) -> (G, n, ...)."""
    return x.transpose(1, 2).flatten(0, 1)


def to_tiles(x: Tensor, chunks: ChunkRun) -> Tensor:
    """(B, T, H, ...) -> (N, G, L, ...), the tokens of a run."""
    x = x[:, chunks.start : chunks.stop]
    B, _, H, *rest = x.shape
    x = x.reshape(B, chunks.tiles, chunks.length, H, *rest).transpose(0, 1).transpose(2, 3)
    return x.reshape(chunks.tiles, B * H, chunks.length, *rest)


def to_window_tokens(x: Tensor, chunks: ChunkRun, c: int) -> Tensor:
    """(B, c-1+T, H, ...) -> (N, G, E, ...): for each sub-chunk its own tokens and the c-1 before them."""
    if c == 1:
        return to_tiles(x, chunks)
    x = x[:, chunks.start : chunks.stop + c - 1]
    B, _, H, *rest = x.shape
    N, J, stride = chunks.tiles, chunks.subchunks, chunks.stride
    if c - 1 <= stride:  # the tail of the block before, then the block: cheaper than overlapping views
        own = x[:, c - 1 :].reshape(B, N * J, stride, H, *rest)
        before = torch.cat([x[:, : c - 1].unsqueeze(1), own[:, :-1, stride - (c - 1) :]], 1)
        blocks = torch.cat([before, own], 2)  # B N*J block H ...
    else:
        blocks = x.unfold(1, c - 1 + stride, stride).movedim(-1, 2)
    blocks = blocks.reshape(B, N, J, c - 1 + stride, H, *rest).transpose(0, 1).movedim(4, 2)  # N B H J block ...
    return blocks.reshape(N, B * H, J * (c - 1 + stride), *rest)


def from_tiles(y: Tensor, batch: int) -> Tensor:
    """(N, G, L, D) -> (B, N*L, H, D)."""
    N, G, L, D = y.shape
    y = y.reshape(N, batch, G // batch, L, D).transpose(0, 1).transpose(2, 3)  # B N L H D
    return y.reshape(batch, N * L, G // batch, D)
