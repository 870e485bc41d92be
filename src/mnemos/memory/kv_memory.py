"""The first fast map of a memory with features "exp": Σ_i φ*(k_i)ᵀ w_i, kept as a list of pairs (k_i, w_i), one per token.

φ* has infinitely many features and is never built: x is mapped to Σ_i exp(x·k_i) w_i. The list of a batch row is as long as the
row's position; shorter rows are filled up with zeros at the right.
B batch, n longest position, H heads, K key dim, P outputs of the map, c window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .spec import MemorySpec
    from .state import MemoryState


HIGHEST = 30.0  # a pair of weight 0 may lie above the row's maximum: its gradient is cut off at exp(HIGHEST)


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


def read_pairs(q: Tensor, state: MemoryState, spec: MemorySpec, features) -> Tensor:
    """M(q; W) for lifted queries (B, H, T, K) -> (B, H, T, V)."""
    assert state.pairs is not None
    key, weight = (x.to(q.dtype).transpose(1, 2) for x in (state.pairs.key, state.pairs.weight))  # B H n ...
    scores = logits(q, key, per_head(features, q))
    top = top_logit(scores, weight[..., -1].unsqueeze(-2)) if spec.normalize else None
    z = normalized(spec, kernel_values(scores, top) @ weight)
    return spec.network.forward(q, lambda i, x: z if i == 0 else x @ state.weights[i - 1])


def logits(x: Tensor, key: Tensor, offset: Tensor | None) -> Tensor:
    """Logarithm of the kernel: (..., L, K), (..., n, K) -> (..., L, n)."""
    scores = x @ key.mT
    return scores if offset is None else scores + offset


def per_head(features, like: Tensor) -> Tensor | None:
    """The offset of a feature map, for scores (B, H, L, n)."""
    offset = getattr(features, "offset", None)
    return None if offset is None else offset.to(like.dtype)[:, None, None]


def top_logit(scores: Tensor, weight: Tensor) -> Tensor:
    """Each row's largest logit among the pairs that have weight in it, 0 where none has: (..., L, n) -> (..., L, 1)."""
    if not scores.shape[-1]:
        return scores.new_zeros(())
    top = scores.detach().masked_fill(weight.detach() <= 0, -torch.inf).amax(-1, keepdim=True)
    return top.masked_fill(top == -torch.inf, 0.0)


def kernel_values(scores: Tensor, top: Tensor | None) -> Tensor:
    return scores.exp() if top is None else (scores - top).clamp(max=HIGHEST).exp()


def normalized(spec: MemorySpec, z: Tensor) -> Tensor:
    """z divided by its last column, which sums the weights; 0 where that is 0."""
    if not spec.normalize:
        return z
    total = z[..., -1:]
    some = total > 0
    return torch.where(some, z[..., :-1] / torch.where(some, total, torch.ones_like(total)), torch.zeros_like(total))
