"""The first fast map of a memory with features "exp": Σ_i φ*(k_i)ᵀ w_i, kept as a list of pairs (k_i, w_i), one per token.

φ* has infinitely many features and is never built: x is mapped to Σ_i exp(x·k_i) w_i. The list of a row is as long as the
row's position; shorter rows are filled up with zeros at the right.
B batch, n longest position, H heads, K key dim, P outputs of the map, c window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .scan import Tokens
    from .spec import MemorySpec
    from .state import MemoryState


@dataclass
class Pairs:
    """key: (B, n, H, K), lifted. weight, momentum, anchor: (B, n, H, P), the key's share in W, in S (None where the spec has
    no momentum) and in the anchor, which is `weight` itself at a chunk's start."""

    key: Tensor
    weight: Tensor
    momentum: Tensor | None
    anchor: Tensor

    @property
    def length(self) -> int:
        return self.key.shape[1]

    @classmethod
    def empty(cls, spec: MemorySpec, batch: int, heads: int, like: Tensor) -> Pairs:
        share = like.new_zeros(batch, 0, heads, spec.pair_dim)
        key = like.new_zeros(batch, 0, heads, spec.key_dim)
        return cls(key, share, torch.zeros_like(share) if spec.momentum else None, share)

    @classmethod
    def of(cls, tensors: dict[str, Tensor], aliased: bool) -> Pairs:
        """What `tensors` named, with the anchor being the weights where `aliased`."""
        weight = tensors["pairs.weight"]
        anchor = weight if aliased else tensors["pairs.anchor"]
        return cls(tensors["pairs.key"], weight, tensors.get("pairs.momentum"), anchor)

    @staticmethod
    def shapes(spec: MemorySpec, batch: int, heads: int, length: int) -> dict[str, tuple[int, ...]]:
        named = {"pairs.key": spec.key_dim, "pairs.weight": spec.pair_dim, "pairs.anchor": spec.pair_dim}
        named |= {"pairs.momentum": spec.pair_dim} if spec.momentum else {}
        return {name: (batch, length, heads, dim) for name, dim in named.items()}

    def tensors(self) -> dict[str, Tensor]:
        named = {"pairs.key": self.key, "pairs.weight": self.weight, "pairs.anchor": self.anchor}
        return named if self.momentum is None else named | {"pairs.momentum": self.momentum}

    def map(self, function: Callable[[Tensor], Tensor]) -> Pairs:
        weight = function(self.weight)
        return Pairs(
            function(self.key),
            weight,
            None if self.momentum is None else function(self.momentum),
            weight if self.anchor is self.weight else function(self.anchor),
        )

    def resized(self, length: int) -> Pairs:
        """The list cut or filled up with zeros to `length` tokens."""
        if length == self.length:
            return self
        return self.map(lambda x: F.pad(x[:, :length], (0, 0, 0, 0, 0, max(0, length - self.length))))


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

    def part(self, start: int, c: int) -> Opened:
        if start == 0:
            return self
        place = self.place + start
        return dataclasses.replace(self, place=place, seen=place + c - 1)


def open_pairs(tokens: Tokens, state: MemoryState, features) -> tuple[Tokens, list[list[Tensor]]]:
    """Tokens that know the list, and [weights, momentum, anchor] whose first map is it, (B, H, N, P), with room for them."""
    pairs = state.pairs
    if pairs is None:
        return tokens, [state.weights, state.momentum, state.anchor]
    keys, old = tokens.lifted_key, pairs.length
    opened = Opened(torch.cat([pairs.key.to(keys.dtype), keys], 1), old, old, getattr(features, "offset", None))

    def room(share: Tensor) -> Tensor:
        return F.pad(share.to(keys.dtype), (0, 0, 0, 0, 0, keys.shape[1])).transpose(1, 2)

    weight = room(pairs.weight)
    anchor = weight if pairs.anchor is pairs.weight else room(pairs.anchor)
    momentum = [] if pairs.momentum is None else [room(pairs.momentum)]
    maps = [[weight, *state.weights], [*momentum, *state.momentum], [anchor, *state.anchor]]
    return dataclasses.replace(tokens, pairs=opened), maps


def close_pairs(
    maps: list[list[Tensor]], tokens: Tokens, state: MemoryState, offset: Tensor | int, length: int
) -> tuple[list[list[Tensor]], Pairs | None]:
    """The maps that are matrices, and the list of a state, `length` long. offset: (B, 1), slots before each row's first token."""
    if tokens.pairs is None:
        return maps, None
    assert state.pairs is not None
    old, c = state.pairs.length, state.window_key.shape[1] + 1
    keys = tokens.pairs.key  # B N H K
    index = torch.arange(length, device=keys.device)
    slot = index - state.position.unsqueeze(-1) + offset + old + c - 1  # B length, where a pair of this call stands
    new = (slot >= old) & (slot < keys.shape[1])
    slot = slot.clamp(0, keys.shape[1] - 1)
    rows = torch.arange(len(keys), device=keys.device).unsqueeze(-1)

    def written(x: Tensor) -> Tensor:  # B N H D -> B length H D
        return x[rows, slot] * new.to(x.dtype)[..., None, None]

    def share(x: Tensor) -> Tensor:  # the c-1 tokens before the first stand in both lists
        x = x.transpose(1, 2)
        return F.pad(x[:, :old], (0, 0, 0, 0, 0, length - old)) + written(x)

    before = (index < state.position.unsqueeze(-1))[..., None, None]
    kept = F.pad(keys[:, :old], (0, 0, 0, 0, 0, length - old))
    W, S, A = maps
    weight = share(W[0])
    pairs = Pairs(
        key=torch.where(before, kept, written(keys)),
        weight=weight,
        momentum=share(S[0]) if S else None,
        anchor=weight if A[0] is W[0] else share(A[0]),
    )
    return [W[1:], S[1:], A[1:]], pairs
