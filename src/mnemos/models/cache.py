"""`MnemosCache`: the states of all layers of a model, as one object and as one file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..memory import MemoryState
from ..memory.files import one_line, read_tensors, write_tensors
from ..memory.state_validation import MAX_POSITION
from .cache_forms import CacheForm
from .cache_io import cache_forms, from_tensors, to_tensors
from .config import MnemosConfig
from .mixer import BLOCKS

FORMAT = "mnemos.cache/1"
DEFINING = (
    "hidden_size",
    "blocks",
    "memory",
    "qk_projection",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "qk_norm",
    "rope_theta",
    "attention_window",
    "attention_conv_width",
    "segment_length",
    "num_persistent_tokens",
    "num_longterm_tokens",
)


class MnemosCache:
    """The states of a model after the tokens read so far: memory states, ring buffers of attention, convolution tails.

    A call returns a new cache and does not change the one it was given, so any number of calls can resume from one cache.
    With inplace = True the next call may write into the tensors of the cache; `generate` does so with its own.
    layers: the states of each layer by name. length: columns read so far, padding included; `get_seq_length()` of transformers.

    >>> from mnemos.models import MnemosConfig, MnemosForCausalLM
    >>> model = MnemosForCausalLM(MnemosConfig(hidden_size=32, num_hidden_layers=1, layers="lmm", memory_heads=2))
    >>> cache = model.state(torch.tensor([[1, 2, 3]]))
    >>> cache.get_seq_length(), cache.batch, cache.is_kv_cache
    (3, 1, False)
    >>> cache.fork(10).batch
    10
    """

    is_compileable = False

    def __init__(self, config: MnemosConfig, layers: list[dict[str, Any]], length: int):
        self.config, self.layers, self.length = config, layers, length
        self.inplace = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    @property
    def batch(self) -> int:
        return next(state.batch for layer in self.layers for state in layer.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for layer in self.layers for state in layer.values())

    @property
    def is_kv_cache(self) -> bool:
        """Whether the cache grows with every token (full attention, exp features); otherwise its size is fixed."""
        return any(BLOCKS[name].is_kv_cache for name in self.config.blocks) or (
            self.config.has_memory and self.config.memory_config.spec.is_kv_cache
        )

    def _map(self, function: Callable) -> MnemosCache:
        layers = [{name: function(state) for name, state in layer.items()} for layer in self.layers]
        return MnemosCache(self.config, layers, self.length)

    def with_inplace(self, inplace: bool) -> MnemosCache:
        """The same cache, with the next call allowed, or not, to write into its states."""

        def mark(state):
            if not hasattr(state, "inplace") or state.inplace == inplace:
                return state
            marked = object.__new__(type(state))
            marked.__dict__ = state.__dict__ | {"inplace": inplace}
            return marked

        return self._map(mark)

    def with_any_start(self) -> MnemosCache:
        """The same cache for a model whose initial weights W0 have changed since: memories forget towards the W0 they began with."""

        def unchecked(state):
            return dataclasses.replace(state, start_from_file=False) if isinstance(state, MemoryState) else state

        return self._map(unchecked)

    def clone(self) -> MnemosCache:
        """A copy that shares no memory."""
        return self._map(lambda state: state.clone())

    def detach(self) -> MnemosCache:
        """The same cache, detached from its graph."""
        return self._map(lambda state: state.detach())

    def to(self, target: torch.device | str | torch.dtype) -> MnemosCache:
        """Move to a device, or change the floating-point type."""
        return self._map(lambda state: state.to(target))

    def select(self, rows: Sequence[int] | Tensor) -> MnemosCache:
        """Rows by index, in the order given, repeats allowed."""
        return self._map(lambda state: state.select(rows))

    def fork(self, copies: int) -> MnemosCache:
        """Every row `copies` times, next to each other, to continue it in several ways."""
        if type(copies) is not int or copies < 1:
            raise ValueError(f"copies={copies!r} must be a whole number >= 1")
        return self.select([row for row in range(self.batch) for _ in range(copies)])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows in place, for beam search."""
        self.layers = self.select(beam_idx).layers

    @classmethod
    def stack(cls, caches: Sequence[MnemosCache]) -> MnemosCache:
        """One cache with the rows of all, in order; they may be at different positions."""
        if not caches:
            raise ValueError("stack needs at least one cache")
        first = caches[0]
        for other in caches[1:]:
            first.check_config(other.config)
        layers = [
            {name: type(state).stack([cache.layers[i][name] for cache in caches]) for name, state in layer.items()}
            for i, layer in enumerate(first.layers)
        ]
        return cls(first.config, layers, max(cache.length for cache in caches))

    def check_config(self, config: MnemosConfig) -> None:
        """Raise a ValueError for the config of a model whose states have another form."""
        if config is self.config:
            return
        _check_config(self.config, config)

    def file_contents(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and the header of the file that `save` writes; `from_file_contents` is the inverse."""
        cache_forms(self.config)  # raises an error if the file could not be opened again
        tensors, states = {}, {}
        for i, layer in enumerate(self.layers):
            for name, state in layer.items():
                found, states[f"{i}.{name}"] = to_tensors(state)
                tensors |= {f"{i}.{name}.{key}": x for key, x in found.items()}
        header = {"format": FORMAT, "config": self.config.to_json_string(use_diff=False), "states": json.dumps(states)}
        return tensors, header | {"length": str(self.length)}

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file with the config in its header. The write is atomic."""
        write_tensors(path, *self.file_contents())

    @classmethod
    def load(
        cls, path: str | os.PathLike, config: MnemosConfig | None = None, device: torch.device | str = "cpu"
    ) -> MnemosCache:
        """Read a file that `save` wrote. With the `config` of a model, raises a ValueError if the cache does not fit that model."""
        return cls.from_file_contents(path, *read_tensors(path, "cache", FORMAT, device), config)

    @classmethod
    def from_file_contents(
        cls,
        path: str | os.PathLike,
        tensors: dict[str, Tensor],
        header: dict[str, str],
        config: MnemosConfig | None = None,
    ) -> MnemosCache:
        """The cache of these tensors and this header, after all checks. path: the name of their file in errors."""
        try:
            fields, length, about = (json.loads(header[name]) for name in ("config", "length", "states"))
            depth = fields["num_hidden_layers"]
            if type(about) is not dict or type(depth) is not int or not 1 <= depth <= len(about):
                raise ValueError(f"it has no states of {str(depth)[:40]} layers")
            saved = MnemosConfig.from_dict(fields)
            saved.validate_choices()
            expected = {
                f"{i}.{name}": form for i, layer in enumerate(cache_forms(saved)) for name, form in layer.items()
            }
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as broken:
            raise ValueError(f"{path} has a broken header: {one_line(broken)}") from None
        if config is not None:
            _check_config(saved, config)
        if about.keys() != expected.keys():
            raise ValueError(f"{path} does not fit its own header: {_difference(about, expected)}")
        parts: dict[str, dict[str, Tensor]] = {place: {} for place in expected}
        for key, x in tensors.items():
            place = ".".join(key.split(".", 2)[:2])
            if place not in parts:
                raise ValueError(f"{path} does not fit its own header: {key:.60} belongs to no layer")
            parts[place][key.removeprefix(f"{place}.")] = x
        layers: list[dict[str, Any]] = [{} for _ in saved.blocks]
        for place, form in expected.items():
            layer, name = place.split(".")
            layers[int(layer)][name] = from_tensors(path, saved, form, parts[place], about[place])
        cache = cls(saved, layers, length)
        cache._check_rows(path, list(expected.values()))
        return cache

    def _check_rows(self, path, forms: list[CacheForm]) -> None:
        """All layers have the same rows, which are at the same positions; some positions count the persistent tokens too."""
        states = [state for layer in self.layers for state in layer.values()]
        before = [self.config.num_persistent_tokens if form.counts_persistent else 0 for form in forms]
        first = states[0].position - before[0]
        if any(not torch.equal(s.position - count, first) for s, count in zip(states, before)) or int(first.min()) < 0:
            raise ValueError(f"{path} does not fit its own header: its layers are at different positions")
        if type(self.length) is not int or not int(first.max()) <= self.length <= MAX_POSITION:
            raise ValueError(
                f"{path} does not fit its own header: length={self.length!r:.40} of batch rows at {first.tolist()[:8]}"
            )


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    wrong = sorted(found.keys() ^ expected.keys())
    kind = "is missing" if wrong[0] in expected else "belongs to no layer"
    return f"{wrong[0]:.60} {kind}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")


def _check_config(saved: MnemosConfig, config: MnemosConfig) -> None:
    differing = [
        f"{name}={getattr(saved, name)!r} (here {getattr(config, name)!r})"
        for name in DEFINING
        if _effective(saved, name) != _effective(config, name)
    ]
    if differing:
        raise ValueError(f"the cache belongs to another model: {', '.join(differing)}"[:480])


def _effective(config: MnemosConfig, name: str) -> Any:
    """The effective value of a field: defaults are filled in, and the backend of a memory makes no difference."""
    if name == "memory" and config.has_memory:
        return dataclasses.replace(config.memory_config, backend="auto")
    if name == "head_dim":
        return config.attention_head_dim
    if name == "num_key_value_heads":
        return config.num_key_value_heads or config.num_attention_heads
    return getattr(config, name)
