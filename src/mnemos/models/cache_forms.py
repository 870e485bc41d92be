"""The form of the states of a block, by which files with caches are checked before they are used.

Shapes: B batch rows, P persistent tokens, W window, G key-value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..memory import MemoryState
from ..nn import AttentionCache, RowCache

if TYPE_CHECKING:
    from .config import MnemosConfig

Shapes = dict[str, tuple[int, ...]]


@dataclass
class CacheForm:
    """The form that a config gives to a state.

    kind: the class of the state. shapes: (number of rows, longest position) -> the shape of every tensor but `position`; None for a
    `MemoryState`, which is checked by its spec. settings: the fields that are not tensors.
    counts_persistent: whether `position` counts the persistent tokens too.
    """

    kind: type[RowCache] | type[MemoryState]
    shapes: Callable[[int, int], Shapes] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    counts_persistent: bool = False


def memory_form() -> CacheForm:
    """The state of a `NeuralMemory`.

    >>> memory_form().kind.__name__
    'MemoryState'
    """
    return CacheForm(MemoryState, counts_persistent=True)


def attention_form(config: MnemosConfig, window: int | None) -> CacheForm:
    """The cache of an `Attention` with this window; None: full attention, whose cache grows.

    >>> from mnemos.models import MnemosConfig
    >>> attention_form(MnemosConfig(hidden_size=32, num_attention_heads=4), window=16).shapes(2, 100)
    {'key': (2, 16, 4, 8), 'value': (2, 16, 4, 8)}
    """
    P = config.num_persistent_tokens

    def shapes(rows: int, longest: int) -> Shapes:
        slots = (rows, P + (longest if window is None else window), *config.key_value_shape)
        return {"key": slots, "value": slots} | conv_shapes(config, rows)

    return CacheForm(AttentionCache, shapes, {"window": window, "persistent": P, "spare": 0})


def conv_shapes(config: MnemosConfig, rows: int) -> Shapes:
    """The tail of attention's convolution; nothing if attention has none.

    >>> from mnemos.models import MnemosConfig
    >>> conv_shapes(MnemosConfig(hidden_size=32, num_attention_heads=4, attention_conv_width=4), rows=2)
    {'conv': (2, 3, 96)}
    """
    heads, dim = config.key_value_shape
    width, channels = config.attention_conv_width, (config.num_attention_heads + 2 * heads) * dim
    return {"conv": (rows, width - 1, channels)} if width else {}
