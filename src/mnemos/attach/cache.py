"""`AttachedCache`: `past_key_values` of an attached model: the keys and values of attention, and the states of the memories.

Shapes: B rows, P columns read so far.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from ..memory import MemoryState
from .call import AttachedCall
from .ring import RingLayer


class AttachedCache(DynamicCache):
    """The state of an attached model after the tokens read so far. As with every cache of transformers, a call changes it in place;
    `generate` works on a copy. `clone`, `fork` and `select` make caches that share no memory.

    memory: the state of the memory of each layer that has one. position: (B,) valid tokens of each row; None before the first call.
    length: columns read so far, padding included. mask: (B, P) bool, the valid columns, with full attention; None: all.
    With a window the keys and values of attention are a ring, and the size of the cache is constant.
    """

    layers: list[Any]
    advances_in_place = True

    def __init__(self, base_config: Any, limits: list[tuple[int, int, int | None]] | None, epoch: int = 0):
        if limits is None:
            super().__init__(config=base_config)
        else:
            Cache.__init__(self, layers=[RingLayer(window, sinks) for window, sinks, _ in limits])
        self.is_windowed, self.epoch = limits is not None, epoch
        self.memory: dict[int, MemoryState] = {}
        self.position: Tensor | None = None
        self.mask: Tensor | None = None
        self.length = 0
        self.call: AttachedCall | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read so far, padding included."""
        return self.length

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Called by the attention of every layer with its new keys and values (B, H, T, D)."""
        if not self.is_windowed:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.call is None:
            raise ValueError("this cache belongs to an attached model with a window: call that model, not its base")
        layer = self.layers[layer_idx]
        assert isinstance(layer, RingLayer)
        return layer.update(key_states, value_states, self.call)

    def advance(self, call: AttachedCall, mask: Tensor | None, device: torch.device) -> None:
        """Count the tokens of a call. mask: (B, T) bool, its valid tokens; None: all."""
        rows, columns = call.shape
        self.position = call.ends(device).expand(rows).clone()
        if not self.is_windowed and (mask is not None or self.mask is not None):
            past = torch.ones(rows, self.length, dtype=torch.bool, device=device) if self.mask is None else self.mask
            new = torch.ones(rows, columns, dtype=torch.bool, device=device) if mask is None else mask
            self.mask = torch.cat([past, new], dim=1)
        self.length += columns

    @property
    def batch(self) -> int:
        return 0 if self.position is None else self.position.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, each with the row as its first axis."""
        named: dict[str, Tensor] = {}
        for i, layer in enumerate(self.layers):
            if layer.is_initialized:
                named |= {f"attention.{i}.key": layer.keys, f"attention.{i}.value": layer.values}
        for i, state in self.memory.items():
            named |= {f"memory.{i}.{name}": x for name, x in state.tensors().items()}
        named |= {} if self.position is None else {"position": self.position}
        return named if self.mask is None else named | {"mask": self.mask}

    def _map(self, tensor: Callable[[Tensor], Tensor], state: Callable[[MemoryState], MemoryState]) -> AttachedCache:
        """A cache with `tensor` of the tensors of attention and `state` of the states of memories."""
        new = copy.copy(self)
        new.call = None
        new.layers = [copy.copy(layer) for layer in self.layers]
        for layer in new.layers:
            if layer.is_initialized:
                layer.keys, layer.values = tensor(layer.keys), tensor(layer.values)
                layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
        new.memory = {i: state(found) for i, found in self.memory.items()}
        new.position = None if self.position is None else tensor(self.position)
        new.mask = None if self.mask is None else tensor(self.mask)
        return new

    def clone(self) -> AttachedCache:
        """A copy that shares no memory."""
        return self._map(Tensor.clone, MemoryState.clone)

    def detach(self) -> AttachedCache:
        """A cache with the same tensors, detached from their graph."""
        return self._map(Tensor.detach, MemoryState.detach)

    def to(self, device: torch.device | str) -> AttachedCache:
        """Move to a device."""
        return self._map(lambda x: x.to(device), lambda state: state.to(device))

    def select(self, rows: Sequence[int] | Tensor) -> AttachedCache:
        """Rows by index, in the order given, repeats allowed."""
        index = torch.as_tensor(rows)
        if index.dim() != 1 or not index.numel() or index.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"rows={str(rows)[:60]} must be a list of row numbers")
        if self.position is None or int(index.min()) < 0 or int(index.max()) >= self.batch:
            raise ValueError(f"rows={index.tolist()[:16]} must lie in 0..{self.batch - 1}, the rows of the cache")
        return self._map(lambda x: x.index_select(0, index.to(x.device)), lambda state: state.select(index))

    @classmethod
    def stack(cls, caches: Sequence[AttachedCache]) -> AttachedCache:
        """One cache with the rows of all, in order; they may be at different positions. Of models with a window only: their caches
        have one size."""
        first = caches[0]
        for other in caches:
            if not other.is_windowed or other.position is None or other.memory.keys() != first.memory.keys():
                raise ValueError("stack needs caches of a model with a window, each with at least one token")
        new = first._map(lambda x: x, lambda state: state)
        for i, layer in enumerate(new.layers):
            layer.keys = torch.cat([cache.layers[i].keys for cache in caches])
            layer.values = torch.cat([cache.layers[i].values for cache in caches])
        new.memory = {i: MemoryState.stack([cache.memory[i] for cache in caches]) for i in first.memory}
        new.position = torch.cat([cache.position for cache in caches if cache.position is not None])
        new.length = max(cache.length for cache in caches)
        return new

    def fork(self, copies: int) -> AttachedCache:
        """Every row `copies` times, next to each other, to continue it in several ways."""
        if type(copies) is not int or copies < 1:
            raise ValueError(f"copies={copies!r:.60} must be a whole number >= 1")
        return self.select([row for row in range(self.batch) for _ in range(copies)])

    def _become(self, other: AttachedCache) -> None:
        self.layers, self.memory, self.position, self.mask = other.layers, other.memory, other.position, other.mask

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows in place, for beam search."""
        self._become(self.select(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows in place."""
        self._become(self.select(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row in place."""
        self._become(self.fork(repeats))

    def reset_memory(self) -> None:
        """Let the memories begin again with the next token; attention keeps its tokens."""
        self.memory = {}

    def reset(self) -> None:
        """Forget everything."""
        for layer in self.layers:
            layer.reset()
        self.memory, self.position, self.mask, self.length = {}, None, None, 0

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: a memory cannot forget chosen tokens."""
        raise ValueError(
            "an AttachedCache cannot be cropped, because a memory keeps no tokens: go on from an earlier clone()"
        )

    def activate_past_recording(self) -> None:
        """Not possible, as `crop`."""
        raise ValueError("assisted generation crops the cache, which a memory does not allow: call generate without it")
