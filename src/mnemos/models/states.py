"""The kinds of state a cache is made of, and their way into a file and back.

Each kind has `batch`, `nbytes`, `clone`, `detach`, `to`, `select` and `stack`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..memory import MemoryState
from ..memory.state import state_from_tensors
from ..nn import AttentionCache, QKCache, RowCache, SegmentCache
from .config import MnemosConfig
from .context import FrozenCache

KINDS: dict[str, type[RowCache]] = {
    kind.__name__: kind for kind in (AttentionCache, SegmentCache, QKCache, FrozenCache)
}


def to_tensors(state: MemoryState | RowCache) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state's tensors by name, and what else there is to know of it, as JSON."""
    if isinstance(state, MemoryState):
        return state._tensors(), {"kind": "MemoryState"}
    return state.tensors(), {"kind": type(state).__name__, **state.settings()}


def from_tensors(
    path, config: MnemosConfig, tensors: dict[str, Tensor], about: dict[str, Any]
) -> MemoryState | RowCache:
    """The state that `to_tensors` took apart; `path` is where it came from, for what there is to complain."""
    kind = about.get("kind")
    if kind == "MemoryState":
        return state_from_tensors(path, config.memory_config.spec, tensors)
    if kind not in KINDS:
        raise ValueError(f"{path} holds a state of unknown kind {kind!r:.40}")
    return KINDS[kind].from_tensors(tensors, **{name: value for name, value in about.items() if name != "kind"})
