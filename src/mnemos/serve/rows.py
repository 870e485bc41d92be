"""`Rows`: answers that are generated together, one row each, at different positions of their conversations.

States of constant size are stacked and decoded as one batch. States that grow with every token are decoded one after the other.
Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..models import MnemosCache
from ..sessions.reading import read_tokens
from .slots import Slots, order


def can_stack(cache: Any) -> bool:
    """Whether caches of this kind are decoded as one batch: the rows of their tensors have one shape at every position.

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> [can_stack(MnemosForCausalLM(presets.config(name, "nano")).state(ids)) for name in ("deltanet", "transformer")]
    [True, False]
    """
    if isinstance(cache, MnemosCache):
        return not cache.is_kv_cache
    return bool(getattr(cache, "is_windowed", False))


class Rows:
    """The rows of one model, by any key.

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> model = MnemosForCausalLM(presets.config("deltanet", "nano")).eval()
    >>> rows = Rows(model)
    >>> rows.change(joining=[("a", model.state(torch.tensor([[1, 2]]))), ("b", model.state(torch.tensor([[3]])))])
    {}
    >>> rows.step([4, 5]).shape, list(rows.change(leaving=["a"])), rows.keys
    (torch.Size([2, 256]), ['a'], ['b'])
    """

    def __init__(self, model: Any):
        self.model = model
        self.keys: list[Hashable] = []
        self._cache: Any = None  # of all rows
        self._caches: list[Any] = []  # of each row, if they cannot be stacked
        self._slots = Slots()

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def is_stacked(self) -> bool:
        return self._cache is not None

    def change(
        self, leaving: Sequence[Hashable] = (), joining: Sequence[tuple[Hashable, Any]] = ()
    ) -> dict[Hashable, Any]:
        """Take rows out and put rows in; returns the caches of those that left. A joining cache belongs to the rows from then on."""
        gone = set(leaving)
        if not gone and not joining:
            return {}
        if not self._caches and isinstance(self._cache or joining[0][1], MnemosCache) and self._can_stack(joining):
            return self._change_slots(gone, list(joining))
        stay = [i for i, key in enumerate(self.keys) if key not in gone]
        if not self._caches and self._can_stack(joining):
            left = {key: self._take([i]) for i, key in enumerate(self.keys) if key in gone}
            parts = ([self._take(stay)] if stay else []) + [cache for _, cache in joining]
            self._cache = parts[0] if len(parts) == 1 else (type(parts[0]).stack(parts) if parts else None)
        else:
            assert self._cache is None
            left = {key: self._caches[i] for i, key in enumerate(self.keys) if key in gone}
            self._caches = [self._caches[i] for i in stay] + [cache for _, cache in joining]
        self.keys = [self.keys[i] for i in stay] + [key for key, _ in joining]
        return left

    @staticmethod
    def _can_stack(joining: Sequence[tuple[Hashable, Any]]) -> bool:
        return all(can_stack(cache) for _, cache in joining)

    def _change_slots(self, gone: set[Hashable], joining: list[tuple[Hashable, Any]]) -> dict[Hashable, Any]:
        """`change` of caches that have slots. A row that is alone is not copied: it has slots only once it gets company."""
        left: dict[Hashable, Any] = {}
        if self._cache is not None and len(gone) == len(self.keys):
            left = {key: self._cache.select([i]) if self._slots else self._cache for i, key in enumerate(self.keys)}
            self.clear()
            gone = set()
        if self._cache is None and joining:
            key, self._cache = joining.pop(0)
            self.keys = [key]
        if not gone and not joining:
            return left
        leaving = [i for i, key in enumerate(self.keys) if key in gone]
        self._cache, caches = self._slots.change(self._cache, leaving, [cache for _, cache in joining])
        left |= {self.keys[i]: cache for i, cache in zip(leaving, caches)}
        self.keys = [self.keys[i] for i in order(len(self.keys), leaving)] + [key for key, _ in joining]
        return left

    def _take(self, rows: list[int]) -> Any:
        return self._cache if len(rows) == len(self.keys) else self._cache.select(rows)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Logits (R, V) after one more token of each row."""
        ids = torch.tensor([tokens], device=self.model.device).mT  # R 1
        if not self._caches:
            logits, self._cache = read_tokens(self.model, self._cache, ids, is_own=True)
            return logits
        found = []
        for i, cache in enumerate(self._caches):
            logits, self._caches[i] = read_tokens(self.model, cache, ids[i : i + 1], is_own=True)
            found.append(logits)
        return torch.cat(found)

    def clear(self) -> None:
        """Drop all rows."""
        self.keys, self._cache, self._caches = [], None, []
        self._slots.clear()
