"""States of a cache as tensors of a file, and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..memory import MemoryState
from ..memory.state import state_from_tensors
from ..memory.state_validation import check_floats, check_position, check_shapes
from ..nn import AttentionCache, RowCache
from .cache_forms import CacheForm
from .config import MnemosConfig
from .mixer import BLOCKS

UNSAVED = ("inplace",)  # set by the process that holds a cache, never by a file


def to_tensors(state: MemoryState | RowCache) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a state by name, and its settings as JSON."""
    if isinstance(state, MemoryState):
        return state.tensors(), {"kind": "MemoryState"}
    if isinstance(state, AttentionCache):
        state = state.without_spare()
    settings = {name: value for name, value in state.settings().items() if name not in UNSAVED and value is not None}
    return state.tensors(), {"kind": type(state).__name__, **settings}


def from_tensors(
    path, config: MnemosConfig, form: CacheForm, tensors: dict[str, Tensor], about: Any
) -> MemoryState | RowCache:
    """The state with these tensors and settings. Raises a ValueError, which names the file `path`, if it has another form."""
    name = form.kind.__name__
    if not isinstance(about, dict) or about.get("kind") != name:
        raise ValueError(f"{path} does not fit its own header: a {name} is expected, not {about!r:.60}")
    if form.shapes is None:
        memory = config.memory_config
        spec, width = memory.spec, memory.conv_width
        channels = memory.conv_channels
        return state_from_tensors(path, spec, tensors, memory.head_count, (width - 1, channels) if width else None)
    settings = {key: value for key, value in about.items() if key not in ("kind", *UNSAVED) and value is not None}
    expected = {key: value for key, value in form.settings.items() if value is not None}
    if settings != expected or any(type(settings[key]) is not type(value) for key, value in expected.items()):
        raise ValueError(f"{path} does not fit its own header: {name} has {str(settings)[:120]}, not {expected}")
    check_position(path, tensors.get("position"))
    position = tensors["position"]
    check_shapes(path, tensors, form.shapes(len(position), int(position.max())) | {"position": (len(position),)})
    floats = {key: x for key, x in tensors.items() if key != "position"}
    check_floats(path, floats)
    if len({x.dtype for x in floats.values()}) > 1:
        raise ValueError(f"{path} mixes number types")
    assert issubclass(form.kind, RowCache)
    return form.kind.from_tensors(tensors, **form.settings)


def cache_forms(config: MnemosConfig) -> list[dict[str, CacheForm]]:
    """The forms of the states of every layer, by name. Raises a ValueError for a block that does not define them.

    >>> [list(layer) for layer in cache_forms(MnemosConfig(layers=["mag", "swa"], num_hidden_layers=2))]
    [['attention', 'memory'], ['attention']]
    """
    found = []
    for name in config.blocks:
        forms = BLOCKS[name].cache_forms(config)
        if forms is None:
            raise ValueError(f"block {name!r} has no cache_forms, so its caches cannot be saved or opened")
        found.append(forms)
    return found
