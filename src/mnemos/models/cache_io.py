"""The kinds of state a cache is made of, their form for a config, and their way into a file and back.

Each kind has `batch`, `nbytes`, `clone`, `detach`, `to`, `select` and `stack`.
Shapes: B rows, P persistent tokens, W window, N long-term tokens, L segment length, G key-value heads, H heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..memory import MemoryState
from ..memory.state import state_from_tensors
from ..memory.state_validation import check_floats, check_position, check_shapes
from ..nn import AttentionCache, QKCache, RowCache, SegmentCache
from .config import MnemosConfig
from .mac import FrozenCache

Shapes = dict[str, tuple[int, ...]]
UNSAVED = ("inplace",)  # a choice of the process that holds a cache, never of a file


@dataclass
class Form:
    """A state as a config has it. shapes: from the number of rows and the longest position to the shape of every tensor."""

    kind: type[RowCache] | type[MemoryState]
    shapes: Callable[[int, int], Shapes] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def to_tensors(state: MemoryState | RowCache) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state's tensors by name, and its settings as JSON."""
    if isinstance(state, MemoryState):
        return state.tensors(), {"kind": "MemoryState"}
    if isinstance(state, AttentionCache):
        state = state.without_spare()
    settings = {name: value for name, value in state.settings().items() if name not in UNSAVED and value is not None}
    return state.tensors(), {"kind": type(state).__name__, **settings}


def from_tensors(
    path, config: MnemosConfig, form: Form, tensors: dict[str, Tensor], about: Any
) -> MemoryState | RowCache:
    """The state that `to_tensors` took apart, if it has this form; `path` is where it came from."""
    name = form.kind.__name__
    if not isinstance(about, dict) or about.get("kind") != name:
        raise ValueError(f"{path} does not fit its own header: a {name} is expected, not {about!r:.60}")
    if form.shapes is None:
        memory = config.memory_config
        spec, width = memory.spec, memory.conv_width
        channels = memory.head_count * (2 * spec.key_dim + spec.value_dim)
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


def forms(config: MnemosConfig) -> list[dict[str, Form]]:
    """For every layer, the states it keeps, by name."""
    return [FORMS[block](config) for block in config.blocks]


def _memory(_config: MnemosConfig) -> Form:
    return Form(MemoryState)


def _attention(config: MnemosConfig, window: int | None) -> Form:
    P, heads = config.num_persistent_tokens, _key_heads(config)

    def shapes(rows: int, longest: int) -> Shapes:
        slots = (rows, P + (longest if window is None else window), *heads)
        return {"key": slots, "value": slots}

    return Form(AttentionCache, shapes, {"window": window, "persistent": P, "spare": 0})


def _segment(config: MnemosConfig) -> Form:
    P, N, L = config.num_persistent_tokens, config.num_longterm_tokens, config.segment_length
    slots = P + N + 2 * L, *_key_heads(config)
    return Form(
        SegmentCache,
        lambda rows, _: {"key": (rows, *slots), "value": (rows, *slots)},
        {"segment_len": L, "persistent": P, "longterm": N},
    )


def _frozen(config: MnemosConfig) -> Form:
    memory = config.memory_config
    numbers = memory.head_count * sum(math.prod(shape) for shape in memory.spec.shapes)
    return Form(FrozenCache, lambda rows, _: {"weights": (rows, numbers)})


def _projection(config: MnemosConfig) -> Form:
    H, D, window = config.num_attention_heads, config.attention_head_dim, (config.qk_projection or {}).get("window")

    def shapes(rows: int, _: int) -> Shapes:
        if window is None:
            return {"gram": (rows, H, D, D), "norm": (rows, H)}
        return {"key": (rows, window - 1, H, D), "gate": (rows, window - 1, H)}

    return Form(QKCache, shapes)


def _key_heads(config: MnemosConfig) -> tuple[int, int]:
    return config.num_key_value_heads or config.num_attention_heads, config.attention_head_dim


def _windowed(config: MnemosConfig) -> Form:
    return _attention(config, config.attention_window)


FORMS: dict[str, Callable[[MnemosConfig], dict[str, Form]]] = {
    "lmm": lambda config: {"memory": _memory(config)},
    "mag": lambda config: {"attention": _windowed(config), "memory": _memory(config)},
    "mal": lambda config: {"memory": _memory(config), "attention": _windowed(config)},
    "mac": lambda config: {"memory": _memory(config), "attention": _segment(config), "frozen": _frozen(config)},
    "qk": lambda config: {"attention": _windowed(config), "memory": _projection(config)},
    "swa": lambda config: {"attention": _windowed(config)},
    "attention": lambda config: {"attention": _attention(config, None)},
}
