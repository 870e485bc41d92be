"""Base classes of the caches of all layers and of states: tensors whose first axis is the batch row, and settings shared by all rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


class Rows:
    """Base of values made of tensors whose first axis is the batch row. Subclasses have `tensors`, `map` and `position`, (B,) int64."""

    position: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, each with the batch row as its first axis."""
        raise NotImplementedError

    def map(self, function: Callable[..., Tensor]) -> Self:
        """Apply `function` to every tensor."""
        raise NotImplementedError

    def with_tensors(self, tensors: dict[str, Tensor], others: Sequence[Self] = ()) -> Self:
        """The value with other `tensors()`, which belong to it alone. others: whose rows are in them too."""
        raise NotImplementedError

    @property
    def batch(self) -> int:
        return self.position.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    def detach(self) -> Self:
        """The same value, detached from its graph (truncated back-propagation)."""
        return self.map(Tensor.detach)

    def clone(self) -> Self:
        """A copy that shares no memory."""
        return self.map(Tensor.clone)

    def to(self, target: torch.device | str | torch.dtype) -> Self:
        """Move to a device, or change the floating-point type."""
        if isinstance(target, torch.dtype):
            return self.map(lambda x: x.to(target) if x.is_floating_point() else x)
        return self.map(lambda x: x.to(target))

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """Rows by index, in the order given, repeats allowed (beam search, batching)."""
        try:
            index = torch.as_tensor(rows, device=self.position.device)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"rows must be a list of whole numbers, not {type(rows).__name__} {str(rows)[:40]}"
            ) from None
        if index.dim() != 1 or index.numel() == 0:
            raise ValueError("rows must be a non-empty list of indices of batch rows")
        if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise ValueError(
                f"rows must be whole numbers, not {index.dtype}; for a mask give mask.nonzero().squeeze(-1)"
            )
        index = index.to(torch.int64)
        if int(index.min()) < 0 or int(index.max()) >= self.batch:
            raise ValueError(f"rows must lie in 0..{self.batch - 1}, not {index.tolist()}")
        return self.map(lambda x: x.index_select(0, index))


@dataclass
class RowCache(Rows):
    """A dataclass of tensors (B, ...) and of settings; `position` (B,) int64 counts the tokens of each row.

    A cache is a value: a layer returns a new one and does not change the one it was given.

    >>> @dataclass
    ... class Tail(RowCache):
    ...     inputs: Tensor
    >>> tail = Tail(torch.tensor([3, 5]), torch.zeros(2, 4))
    >>> tail.select([1, 1, 0]).position
    tensor([5, 5, 3])
    """

    position: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, each with the batch row as its first axis."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    def settings(self) -> dict[str, int | bool | None]:
        """The fields that are not tensors; all are JSON values."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: x for name, x in named.items() if not isinstance(x, Tensor)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], **settings) -> Self:
        """The cache with these `tensors()` and `settings()`."""
        fields = dataclasses.fields(cls)
        required = {f.name for f in fields if f.default is dataclasses.MISSING}
        given = tensors.keys() | settings.keys()
        if not required <= given or not given <= {f.name for f in fields}:
            raise ValueError(f"{cls.__name__} needs {sorted(required)}, but {sorted(given)} are given")
        if len({x.shape[0] if x.dim() else -1 for x in tensors.values()}) != 1:
            raise ValueError(f"the tensors of a {cls.__name__} have different numbers of batch rows")
        return cls(**tensors, **settings)

    def with_tensors(self, tensors: dict[str, Tensor], others: Sequence[Self] = ()) -> Self:
        for other in others:
            if other.settings() | {"inplace": None} != self.settings() | {"inplace": None}:
                raise ValueError(f"the caches differ: {self.settings()} and {other.settings()}")
        return dataclasses.replace(self, **tensors)

    def map(self, function: Callable[..., Tensor]) -> Self:
        return dataclasses.replace(self, **{name: function(x) for name, x in self.tensors().items()})

    @classmethod
    def stack(cls, caches: Sequence[Self]) -> Self:
        """One cache with the rows of all, in order."""
        if not caches:
            raise ValueError("stack needs at least one cache")
        # the result is a copy, whatever else holds the parts
        caches = [dataclasses.replace(c, inplace=False) if "inplace" in c.settings() else c for c in caches]
        first = caches[0]
        for other in caches[1:]:
            if other.settings() != first.settings():
                raise ValueError(f"stack: the caches differ: {first.settings()} and {other.settings()}")
            if _kinds(other) != _kinds(first):
                raise ValueError("stack: the caches differ in shape, dtype or device")
        parts = [cache.tensors() for cache in caches]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return dataclasses.replace(first, **joined)


def _kinds(cache: RowCache) -> dict:
    return {name: (x.shape[1:], x.dtype, x.device) for name, x in cache.tensors().items()}


def place_tokens(old: Tensor, new: Tensor, source: Tensor, count: Tensor | int) -> Tensor:
    """A buffer with new tokens: slot s of row b becomes token source[b, s] of that row, if the row has such a token.

    old (B, S, ...), new (B, T, ...), source (B, S), outside 0..count-1 for slots that stay, count (B,) or int.
    The cost does not depend on T.

    >>> old, new = torch.zeros(1, 4), torch.tensor([[1.0, 2.0, 3.0]])
    >>> place_tokens(old, new, torch.tensor([[-1, 2, 0, 3]]), 3)
    tensor([[0., 3., 1., 0.]])
    """
    B, T = new.shape[:2]
    limit = count.unsqueeze(1) if isinstance(count, Tensor) else count
    taken = (source >= 0) & (source < limit)
    flat = source.clamp(0, T - 1) + torch.arange(B, device=new.device).unsqueeze(1) * T
    picked = new.flatten(0, 1).index_select(0, flat.flatten()).view(old.shape)
    return torch.where(taken.reshape(*taken.shape, *(1,) * (old.dim() - 2)), picked, old)
