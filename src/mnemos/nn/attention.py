"""Causal attention with or without a sliding window. Any split of a sequence into calls gives the same result.

Over a window, the work grows with T x window: blocks of queries, each with the keys inside its windows, share one mask.

Shapes: B batch, T time, H query heads, G key-value heads, D head dim, P persistent tokens, W window, S cached tokens,
C = (H + 2G) D channels of the convolution; of a sliding window N blocks, C their size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import decode
from .cache import RowCache, place_tokens
from .heads import Heads, attend

if TYPE_CHECKING:
    from typing_extensions import Self

MASK_ELEMENTS = 2**24  # a mask larger than this is made for some of the queries at a time


@dataclass
class AttentionCache(RowCache):
    """Keys and values of B batch rows, which may be at different positions.

    key, value: (B, P + S, G, D), the persistent tokens first. With a window, S = window and position t is in slot
    P + t % window; without one it is in slot P + t, and S grows with the longest row. Unused slots are 0.
    position: (B,) real tokens seen. inplace: calls without gradients may write into this cache instead of copying it; set it if
    nothing else resumes from the same cache. Without a window, the cache then allocates `spare` slots ahead.
    conv: (B, conv_width - 1, C), the last inputs of the convolution; None without one.
    """

    key: Tensor
    value: Tensor
    window: int | None
    persistent: int = 0
    inplace: bool = False
    spare: int = 0
    conv: Tensor | None = None

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        return super().select(rows).without_spare()

    @classmethod
    def stack(cls, caches: Sequence[Self]) -> Self:
        longest = max((c.key.shape[1] for c in caches), default=0)
        return super().stack([c if c.window is not None else c._resize(longest) for c in caches]).without_spare()

    def without_spare(self) -> Self:
        """The same cache without unused slots behind its longest row."""
        return self if self.window is not None else self._resize(self.persistent + int(self.position.max()))

    def _resize(self, slots: int) -> Self:
        more = slots - self.key.shape[1]
        if more == 0:
            return dataclasses.replace(self, spare=0)
        key, value = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (self.key, self.value))
        return dataclasses.replace(self, key=key, value=value, spare=0)


class Attention(Heads):
    """Causal multi-head attention. x (B, T, dim) -> y (B, T, dim), and the cache to resume from.

    window: the number of keys that a token sees, itself included; None for all tokens before it.
    head_dim: dim / heads by default. kv_heads: fewer heads for keys and values (grouped queries).
    qk_norm: RMS norm of queries and keys per head, with learned scales.
    conv_width: width of the causal convolution over queries, keys and values, before the norms; 0 for none. Its tail reaches
    conv_width - 1 tokens beyond the window.

    >>> attention = Attention(dim=32, heads=4, window=8)
    >>> x = torch.randn(2, 20, 32)
    >>> y, _ = attention(x, use_cache=False)
    >>> first, cache = attention(x[:, :13])
    >>> second, cache = attention(x[:, 13:], cache)
    >>> torch.allclose(y, torch.cat([first, second], 1), atol=1e-5), cache.key.shape, cache.position
    (True, torch.Size([2, 8, 4, 8]), tensor([20, 20]))
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int | None,
        *,
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
        if window is not None and window < 1:
            raise ValueError(f"window={window} must be >= 1, or None for all tokens")
        self.window = window

    def forward(
        self,
        x: Tensor,
        cache: AttentionCache | None = None,
        mask: Tensor | None = None,
        persistent: int = 0,
        use_cache: bool = True,
    ) -> tuple[Tensor, AttentionCache | None]:
        """x (B, T, dim) after the tokens of `cache` -> y (B, T, dim) and the new cache (None without use_cache).

        mask: (B, T) bool, True on a prefix of each row. Tokens behind it are not written to the cache; their y is finite but arbitrary.
        persistent: without a cache, the number of first tokens of x that are persistent: un-rotated, seen by every later token,
        counted neither by the window nor as positions, and valid whatever their mask. The cache holds them. For the convolution they
        are the first tokens of the row.
        """
        self.check(x, mask, cache, AttentionCache)
        if cache is None:
            return self._begin(x, mask, persistent, use_cache)
        self.check_cache(cache, persistent)
        if not use_cache:
            cache = dataclasses.replace(cache, inplace=False)
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        T, W = x.shape[1], self.window
        if T == 1 and W is not None and mask is None and use_cache:
            done = decode(self, x, cache)
            if done is not None:
                return done
        positions = cache.position.unsqueeze(1)  # B 1
        if T > 1:
            positions = positions + torch.arange(T, device=x.device)
        q, k, v, tail = self.project(x, self.angles(positions, x.dtype), cache.conv, mask)
        if tail is not None:
            cache = dataclasses.replace(cache, conv=tail)
        if W is None:
            y, new = self._extend(q, k, v, cache, positions, mask)
        elif T == 1:
            y, new = self._decode(q, k, v, cache, W, mask)
        else:
            y, new = self._slide(q, k, v, cache, W, positions, mask, use_cache)
        return self.out(y.flatten(2)), new if use_cache else None

    def _begin(self, x: Tensor, mask: Tensor | None, P: int, use_cache: bool) -> tuple[Tensor, AttentionCache | None]:
        """The first call of a sequence."""
        B, T = x.shape[:2]
        if not 0 <= P <= T:
            raise ValueError(f"persistent={P} must lie in 0..{T}, the tokens of x")
        index = torch.arange(T, device=x.device)
        count = None
        if mask is not None:
            mask = mask | (index < P)
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
            count = mask.sum(1) - P
        angles = self.angles((index - P).clamp(min=0).unsqueeze(0), x.dtype)  # position 0 is no rotation
        q, k, v, tail = self.project(x, angles, mask=mask)
        W = self.window
        y = attend(q, k, v, causal=True) if W is None else sliding_attention(q, k, v, W, P)
        y = self.out(y.flatten(2))
        if not use_cache:
            return y, None
        if count is None:
            count = torch.full((B,), T - P, device=x.device)
        if W is None:
            longest = T if mask is None else P + int(count.max())
            return y, AttentionCache(count, k[:, :longest].clone(), v[:, :longest].clone(), None, P, conv=tail)
        empty = k.new_zeros(B, W, self.kv_heads, self.head_dim)
        source = _last_in_slot(count, W)
        key, value = (
            torch.cat((new[:, :P], place_tokens(empty, new[:, P:], source, count)), 1)
            if T > P
            else F.pad(new, (0, 0, 0, 0, 0, W))
            for new in (k, v)
        )
        return y, AttentionCache(count, key, value, W, P, conv=tail)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, cache: AttentionCache, W: int, mask: Tensor | None):
        """One token per row, written to its slot of the ring buffer; softmax does not depend on slot order."""
        P, position = cache.persistent, cache.position
        row = torch.arange(q.shape[0], device=q.device)
        slot = position % W + P
        buffers = []
        for old, new in ((cache.key, k), (cache.value, v)):
            new = new[:, 0].to(old.dtype)
            if mask is not None:
                new = torch.where(mask.unsqueeze(-1), new, old[row, slot])
            buffer = old if cache.inplace and not torch.is_grad_enabled() else old.clone()
            buffers.append(buffer.index_put_((row, slot), new))
        key, value = buffers
        seen = torch.arange(P + W, device=q.device) <= (position + P).unsqueeze(1)  # B P+W
        y = attend(q, key, value, seen[:, None, None])
        count = 1 if mask is None else mask[:, 0]
        return y, dataclasses.replace(cache, key=key, value=value, position=position + count)

    def _slide(self, q, k, v, cache: AttentionCache, W: int, positions: Tensor, mask: Tensor | None, use_cache: bool):
        """Many tokens with a window: the first W see the ring buffer, the others each other and the persistent tokens only."""
        P, T = cache.persistent, q.shape[1]
        first = min(T, W)
        held = _last_in_slot(cache.position, W).unsqueeze(1)  # B 1 W, the position in each slot
        query, own = positions[:, :first, None], positions[:, None, :first]  # B first 1, B 1 first
        seen = torch.cat(
            (
                torch.ones_like(query, dtype=torch.bool).expand(-1, -1, P),
                (held >= 0) & (held > query - W),
                own <= query,
            ),
            dim=2,
        )  # B first P+W+first
        key, value = (torch.cat((old, new[:, :first]), 1) for old, new in ((cache.key, k), (cache.value, v)))
        y = attend(q[:, :first], key, value, seen.unsqueeze(1))
        if first < T:
            rest = full_windows(q[:, first:], k, v, cache.key[:, :P], cache.value[:, :P], W)
            y = torch.cat((y, rest), dim=1)
        if not use_cache:
            return y, None
        count = T if mask is None else mask.sum(1)
        end = cache.position + count
        source = _last_in_slot(end, W) - cache.position.unsqueeze(1)
        key, value = (
            torch.cat((old[:, :P], place_tokens(old[:, P:], new.to(old.dtype), source, count)), 1)
            for old, new in ((cache.key, k), (cache.value, v))
        )
        return y, dataclasses.replace(cache, key=key, value=value, position=end)

    def _extend(self, q, k, v, cache: AttentionCache, positions: Tensor, mask: Tensor | None):
        """Without a window: each row is extended behind its own last token."""
        B, T = q.shape[:2]
        row, slot = torch.arange(B, device=q.device).unsqueeze(1), positions + cache.persistent
        size = cache.key.shape[1]
        need = size - cache.spare + T
        if cache.inplace and not torch.is_grad_enabled():
            more = max(need, size + size // 2) - size if need > size else 0
            key, value = (F.pad(x, (0, 0, 0, 0, 0, more)) if more else x for x in (cache.key, cache.value))
        else:
            key, value = (F.pad(x[:, : need - T], (0, 0, 0, 0, 0, T)) for x in (cache.key, cache.value))
        key, value = (buffer.index_put_((row, slot), new.to(buffer.dtype)) for buffer, new in ((key, k), (value, v)))
        new = dataclasses.replace(cache, key=key, value=value, spare=key.shape[1] - need)
        key, value = key[:, :need], value[:, :need]
        slots = torch.arange(key.shape[1], device=q.device)
        step = max(1, MASK_ELEMENTS // (B * len(slots)))
        y = [
            attend(part, key, value, (slots <= last.unsqueeze(-1)).unsqueeze(1))
            for part, last in zip(q.split(step, 1), slot.split(step, 1))
        ]
        count = T if mask is None else mask.sum(1)
        new = dataclasses.replace(new, position=cache.position + count)
        return torch.cat(y, 1) if len(y) > 1 else y[0], new if mask is None else new.without_spare()

    def check_cache(self, cache: AttentionCache, persistent: int) -> None:
        """Raise a ValueError for a cache that does not fit this layer."""
        if cache.window != self.window:
            raise ValueError(f"cache is of window={cache.window}, but the layer has window={self.window}")
        if cache.position.dtype != torch.int64:
            raise ValueError(f"cache has positions of {cache.position.dtype}, but torch.int64 is expected")
        if persistent not in (0, cache.persistent):
            raise ValueError(f"persistent={persistent}, but the cache was begun with {cache.persistent}")
        slots = cache.persistent + self.window if self.window is not None else cache.key.shape[1]
        expected = (cache.batch, slots, self.kv_heads, self.head_dim)
        if cache.key.shape != expected or cache.value.shape != expected:
            raise ValueError(f"cache has keys of shape {tuple(cache.key.shape)}, but {expected} is expected")
        self.check_tail(cache.conv, cache.batch)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, window={self.window}"


def _last_in_slot(count: Tensor, window: int) -> Tensor:
    """The last position below count (B,) in each slot of a ring buffer, negative if there is none: (B, window)."""
    last = count.unsqueeze(1) - 1
    return last - (last - torch.arange(window, device=count.device)) % window


def sliding_attention(q: Tensor, k: Tensor, v: Tensor, window: int, persistent: int = 0, block: int = 0) -> Tensor:
    """Token t sees tokens t-window+1..t and the first `persistent` ones, which see each other causally.

    q (B, T, H, D), k and v (B, T, G, D), the persistent tokens first and not counted by the window -> (B, T, H, D).
    block: queries per block, 0 for a size that depends on the window.

    >>> q, k, v = torch.randn(3, 1, 100, 2, 8)
    >>> y = sliding_attention(q, k, v, window=5)
    >>> torch.allclose(y[:, -1:], attend(q[:, -1:], k[:, -5:], v[:, -5:]), atol=1e-6)
    True
    """
    first = min(q.shape[1], persistent + window)  # these see all tokens before them
    y = attend(q[:, :first], k[:, :first], v[:, :first], causal=True)
    if first == q.shape[1]:
        return y
    rest = full_windows(
        q[:, first:], k[:, persistent:], v[:, persistent:], k[:, :persistent], v[:, :persistent], window, block
    )
    return torch.cat((y, rest), dim=1)


def full_windows(
    q: Tensor, k: Tensor, v: Tensor, persistent_k: Tensor, persistent_v: Tensor, window: int, block: int = 0
) -> Tensor:
    """Attention of the queries from position `window` on, whose windows lie within the given keys.

    q (B, R, H, D) at positions W..W+R-1; k, v (B, W+R, G, D) from position 0; persistent (B, P, G, D) -> (B, R, H, D).
    """
    B, R = q.shape[:2]
    W, P = window, persistent_k.shape[1]
    C = min(block or block_size(W), R)
    N, last = divmod(R, C)
    query = torch.arange(C, device=q.device).unsqueeze(1)
    key = torch.arange(-P, W + C, device=q.device)  # of a block, counted from W tokens before its first query
    mask = (key < 0) | ((key > query) & (key <= query + W))  # C P+W+C

    keys, values = reach(k, persistent_k, N, C, W), reach(v, persistent_v, N, C, W)
    blocks = q[:, : N * C].unflatten(1, (N, C)).flatten(0, 1)  # B*N C H D
    y = attend(blocks, keys, values, mask).unflatten(0, (B, N)).flatten(1, 2)
    if last == 0:
        return y
    keys, values = (torch.cat((p, x[:, N * C :]), 1) for p, x in ((persistent_k, k), (persistent_v, v)))
    return torch.cat((y, attend(q[:, N * C :], keys, values, mask[:last, : P + W + last])), dim=1)


def block_size(window: int) -> int:
    """Queries per block: half a window, which wastes a third of the scores (a whole one: half), within limits set by overhead."""
    return min(128, max(32, window // 2))


def reach(x: Tensor, persistent: Tensor, N: int, C: int, W: int) -> Tensor:
    """Tokens that each of N blocks sees: persistent, the W before it, its own C. (B, W+R, ...) -> (B*N, P+W+C, ...)."""
    B, P = persistent.shape[:2]

    def shifted(start: int, width: int) -> Tensor:
        return x[:, start : start + N * C].unflatten(1, (N, C))[:, :, :width]  # B N width G D

    parts = [shifted(start, min(C, W - start)) for start in range(0, W, C)]
    if P:
        parts.insert(0, persistent.unsqueeze(1).expand(B, N, *persistent.shape[1:]))
    return torch.cat((*parts, shifted(W, C)), dim=2).flatten(0, 1)
