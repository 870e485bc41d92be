"""Attention inside one segment over [persistent ‖ long-term ‖ retrieved ‖ segment], for memory as context (MAC).

Shapes: B batch, T time, H query heads, G key-value heads, D head dim, P persistent, N long-term tokens, L segment length,
C = (H + 2G) D channels of the convolution.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .cache import RowCache, place_tokens
from .heads import Heads, Table, attend


@dataclass
class SegmentCache(RowCache):
    """Keys and values of the current segment of each row, of a fixed size.

    key, value: (B, P + N + 2L, G, D): persistent, long-term, retrieved and segment tokens. Token i of a segment and the token
    retrieved for it are in slot i of the last two parts. position: (B,) real tokens seen; a row whose position is a multiple of
    segment_len is before a new segment, and the last two parts are then ignored.
    inplace, conv: as in `AttentionCache`; the convolution continues from one segment to the next.
    """

    key: Tensor
    value: Tensor
    segment_len: int
    persistent: int = 0
    longterm: int = 0
    inplace: bool = False
    conv: Tensor | None = None


class PrecomputedSegment(NamedTuple):
    """Rotary table, and q (B, T, H, D), k and v (B, T, G, D), of T tokens of one segment; the convolution's tail after them."""

    angles: Table
    qkv: tuple[Tensor, Tensor, Tensor]
    tail: Tensor | None = None


class SegmentAttention(Heads):
    """Token i of a segment sees the persistent tokens, the segment's long-term tokens, and of the retrieved tokens and
    the segment's own those with index ≤ i.

    Token i and the token retrieved for it have rotary position i, counted inside the segment, so that attention does not depend on
    the position of the segment; persistent and long-term tokens are not rotated. Queries come from x alone; keys and values of
    all four kinds from the same maps. A segment begins at every multiple of segment_len; a call may not contain
    tokens of two segments of one row.

    longterm: the number of long-term tokens of a segment. conv_width: as in `Attention`, over the tokens of the row, persistent ones
    first; the convolution leaves out retrieved and long-term tokens, which have no neighbours in the row.

    >>> attention = SegmentAttention(dim=32, heads=4, segment_len=8)
    >>> x, retrieved = torch.randn(2, 8, 32), torch.randn(2, 8, 32)
    >>> y, cache = attention(x, retrieved)
    >>> first, cache = attention(x[:, :5], retrieved[:, :5])
    >>> second, cache = attention(x[:, 5:], retrieved[:, 5:], cache=cache)
    >>> torch.allclose(y, torch.cat([first, second], 1), atol=1e-5), cache.key.shape
    (True, torch.Size([2, 16, 4, 8]))
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        segment_len: int,
        *,
        longterm: int = 0,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        qk_norm: bool = True,
        rope_theta: float = 10000.0,
        eps: float = 1e-6,
        conv_width: int = 0,
    ):
        super().__init__(
            dim,
            heads,
            head_dim=head_dim,
            kv_heads=kv_heads,
            qk_norm=qk_norm,
            rope_theta=rope_theta,
            eps=eps,
            conv_width=conv_width,
        )
        if segment_len < 1 or longterm < 0:
            raise ValueError(f"segment_len={segment_len} must be >= 1 and longterm={longterm} >= 0")
        self.segment_len, self.longterm = segment_len, longterm

    def forward(
        self,
        x: Tensor,
        retrieved: Tensor,
        longterm: Tensor | None = None,
        cache: SegmentCache | None = None,
        mask: Tensor | None = None,
        persistent: int = 0,
        use_cache: bool = True,
        precomputed: PrecomputedSegment | None = None,
    ) -> tuple[Tensor, SegmentCache | None]:
        """x, retrieved (B, T, dim) after the tokens of `cache` -> y (B, T, dim) and the new cache (None without use_cache).

        longterm: (B, N, dim), needed whenever a row begins a segment; inside a segment the same again, or None.
        mask: (B, T) bool, True on a prefix of each row. Tokens behind it are not written to the cache; their y is finite but arbitrary.
        persistent: without a cache, the number of first tokens of x that are persistent: they see each other causally and
        are seen by all; the tokens retrieved for them are ignored.
        precomputed: the entry of these tokens in the list that `precompute` returned for the whole sequence.
        """
        self.check(x, mask, cache, SegmentCache)
        self._check_inputs(x, retrieved, longterm, cache, persistent)
        before = []
        if cache is None:
            P = persistent
            y, cache = self._begin(x[:, :P])
            before = [y] if P else []
            x, retrieved = x[:, P:], retrieved[:, P:]
            mask = None if mask is None else mask[:, P:]
        elif not use_cache:
            cache = dataclasses.replace(cache, inplace=False)
        y = before
        if x.shape[1]:
            if mask is not None:
                x, retrieved = (z.masked_fill(~mask.unsqueeze(-1), 0.0) for z in (x, retrieved))
            after, cache = self._continue(x, retrieved, longterm, cache, mask, precomputed)
            y = [*before, after]
        y = self.out((torch.cat(y, 1) if len(y) > 1 else y[0]).flatten(2))
        return y, cache if use_cache else None

    def precompute(
        self, x: Tensor, offset: int, sizes: list[int], tail: Tensor | None = None
    ) -> list[PrecomputedSegment]:
        """Queries, keys and values of tokens x (B, T, dim), in pieces of these sizes, one per segment.

        offset: the index of the first token in its segment. tail: of the convolution, before x. None of this depends on the retrieved
        tokens, so it is computed for all segments at once.
        """
        index = (offset + torch.arange(x.shape[1], device=x.device)) % self.segment_len
        angles = self.angles(index.unsqueeze(0), x.dtype)
        mixed, tails = self.qkv(x), []
        if self.conv is not None:
            convolved = []
            for piece in mixed.split(sizes, 1):
                piece, tail = self.convolve(piece, tail)
                convolved.append(piece)
                tails.append(tail)
            mixed = torch.cat(convolved, 1)
        pieces = (zip(*(y.split(sizes, 1) for y in group)) for group in (angles, self.split_heads(mixed, angles)))
        return [PrecomputedSegment(*piece) for piece in zip(*pieces, tails or [None] * len(sizes))]

    def _begin(self, x: Tensor) -> tuple[Tensor, SegmentCache]:
        """The persistent tokens (B, P, dim), P ≥ 0, and a cache that holds nothing else."""
        B, P = x.shape[:2]
        still = torch.zeros(1, P, dtype=torch.int64, device=x.device)  # position 0 is no rotation
        q, k, v, tail = self.project(x, self.angles(still, x.dtype))
        y = attend(q, k, v, causal=True) if P else q
        room = k.new_zeros(B, self.longterm + 2 * self.segment_len, *k.shape[2:])
        position = torch.zeros(B, dtype=torch.int64, device=x.device)
        key, value = torch.cat((k, room), 1), torch.cat((v, room), 1)
        return y, SegmentCache(position, key, value, self.segment_len, P, self.longterm, conv=tail)

    def _continue(
        self, x, retrieved, longterm, cache: SegmentCache, mask, precomputed: PrecomputedSegment | None
    ) -> tuple[Tensor, SegmentCache]:
        """Tokens of one segment. Heads (B, T, H, D), before the output map, and the cache with these tokens in it."""
        T, L, fixed = x.shape[1], self.segment_len, cache.persistent + self.longterm
        offset = cache.position % L
        own = offset.unsqueeze(1)  # B T, index of each token in its segment
        if T > 1:
            own = own + torch.arange(T, device=x.device)
        count = T if mask is None else mask.sum(1)
        if not torch.compiler.is_compiling():
            self._check_segment(offset, count, longterm)
        if T == 1:  # one pass over both costs less than the unused query
            mixed, tail = self.qkv(torch.cat((x, retrieved), 1)), None
            if self.conv is not None:
                token, tail = self.convolve(mixed[:, :1], cache.conv, mask)
                mixed = torch.cat((token, mixed[:, 1:]), 1)
            q, k, v = self.split_heads(mixed, self.angles(own, x.dtype))
            q, (k, rk), (v, rv) = q[:, :1], k.split(1, 1), v.split(1, 1)
        else:
            if precomputed is None:
                angles = self.angles(own, x.dtype)
                q, k, v, tail = self.project(x, angles, cache.conv, mask)
            else:
                angles, (q, k, v), tail = precomputed
            rk, rv = self.project_keys(retrieved, angles)
        lk, lv = (None, None) if longterm is None or not self.longterm else self.project_keys(longterm)
        sets = ((cache.key, lk, rk, k), (cache.value, lv, rv, v))
        if T == L and mask is None:  # whole segments, so every row is at the start of one
            P = cache.persistent
            key, value = (
                torch.cat((old[:, :P], old[:, P:fixed] if lt is None else lt, r, s), 1) for old, lt, r, s in sets
            )
            own = own[:1]
        elif T == 1:
            slots = torch.cat((own + fixed, own + (fixed + L)), 1)  # B 2
            key, value = (self._put_one(cache, *tensors, slots, mask, count) for tensors in sets)
        else:
            key, value = (self._put_many(cache, *tensors, offset, mask, count) for tensors in sets)
        index = torch.arange(-fixed, 2 * L, device=x.device).fmod_(
            L
        )  # of a slot in its segment; <= 0 for slots that all tokens see
        seen = (index <= own.unsqueeze(-1)).unsqueeze(1)  # B 1 T P+N+2L
        position = cache.position + count
        new = dataclasses.replace(cache, key=key, value=value, position=position, conv=tail)
        return attend(q, key, value, seen), new

    def _put_one(self, cache: SegmentCache, old, longterm, retrieved, token, slots, mask, count) -> Tensor:
        """Write the token retrieved for one token per row, and the token, to their slots (B, 2)."""
        buffer = old if cache.inplace and not torch.is_grad_enabled() else old.clone()
        start, N = cache.persistent, self.longterm
        if longterm is not None:
            longterm = longterm.to(old.dtype)
            buffer[:, start : start + N] = _where_any(longterm, old[:, start : start + N], count)
        row = torch.arange(old.shape[0], device=old.device).unsqueeze(1)
        new = torch.cat((retrieved, token), 1).to(old.dtype)
        if mask is not None:
            new = torch.where(mask[:, :, None, None], new, buffer[row, slots])
        return buffer.index_put_((row, slots), new)

    def _put_many(self, cache: SegmentCache, old, longterm, retrieved, token, offset, mask, count) -> Tensor:
        start, N, L = cache.persistent, self.longterm, self.segment_len
        persistent, lt, r, s = old.split((start, N, L, L), 1)
        if longterm is not None:
            lt = _where_any(longterm.to(old.dtype), lt, count)
        source = torch.arange(L, device=old.device) - offset.unsqueeze(1)  # B L
        r, s = (place_tokens(part, new.to(old.dtype), source, count) for part, new in ((r, retrieved), (s, token)))
        return torch.cat((persistent, lt, r, s), 1)

    def _check_inputs(self, x, retrieved, longterm, cache: SegmentCache | None, persistent: int) -> None:
        if retrieved.shape != x.shape:
            raise ValueError(f"retrieved has shape {tuple(retrieved.shape)}, but x has {tuple(x.shape)}")
        if longterm is not None and longterm.shape != (x.shape[0], self.longterm, self.dim):
            expected = (x.shape[0], self.longterm, self.dim)
            raise ValueError(f"longterm has shape {tuple(longterm.shape)}, but {expected} is expected")
        real = x.shape[1] - (persistent if cache is None else 0)
        if real > self.segment_len:
            raise ValueError(f"x brings {real} tokens, but a segment has {self.segment_len}")
        if cache is None:
            if real < 0 or persistent < 0:
                raise ValueError(f"persistent={persistent} must lie in 0..{x.shape[1]}, the tokens of x")
            return
        if persistent not in (0, cache.persistent):
            raise ValueError(f"persistent={persistent}, but the cache was begun with {cache.persistent}")
        sizes = cache.segment_len, cache.longterm
        if sizes != (self.segment_len, self.longterm):
            raise ValueError(f"cache has (segment_len, longterm) = {sizes}, not {(self.segment_len, self.longterm)}")
        expected = (cache.batch, cache.persistent + self.longterm + 2 * self.segment_len, self.kv_heads, self.head_dim)
        if cache.key.shape != expected or cache.value.shape != expected:
            raise ValueError(f"cache has keys of shape {tuple(cache.key.shape)}, but {expected} is expected")
        self.check_tail(cache.conv, cache.batch)

    def _check_segment(self, offset: Tensor, count: Tensor | int, longterm: Tensor | None) -> None:
        """Checks that depend on the offsets of the rows."""
        if isinstance(count, Tensor) or count > 1:
            over = offset + count > self.segment_len
            if over.any():
                raise ValueError(
                    f"rows {over.nonzero().flatten().tolist()} would cross the end of their segment of {self.segment_len} "
                    f"tokens; cut the call there"
                )
        if self.longterm and longterm is None and bool(((offset == 0) & torch.as_tensor(count > 0)).any()):
            raise ValueError(f"longterm is needed at the start of a segment: (B, {self.longterm}, {self.dim})")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, segment_len={self.segment_len}, longterm={self.longterm}"


def _where_any(new: Tensor, old: Tensor, count: Tensor | int) -> Tensor:
    """new (B, N, G, D) for the rows with a token, old for the others."""
    return torch.where((count > 0)[:, None, None, None], new, old) if isinstance(count, Tensor) else new
