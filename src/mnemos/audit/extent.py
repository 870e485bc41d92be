"""Sizes in tokens that a model's config names: windows, segments, chunks; and how far its attention reaches back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

NAMES = {
    *("attention_window", "sliding_window", "window", "window_size", "local_attention"),
    *("segment_length", "segment_len", "chunk_size", "commit_every", "attention_chunk_size"),
}
MOST_EDGES = 6  # multiples of a size


def sizes_of(config: Any) -> list[int]:
    """The windows, segments and chunks of a model, from its config, in tokens.

    >>> from mnemos.models import presets
    >>> sizes_of(presets.config("titans-mac", memory_chunk_size=16))
    [16, 64]
    """
    found: set[int] = set()
    for part in _parts(config):
        for name, value in part.items():
            if name in NAMES and type(value) is int and value > 1:
                found.add(value)
    return sorted(found)


def _parts(config: Any) -> list[dict[str, Any]]:
    """The config's dictionary and those inside it."""
    if config is None:
        return []
    own = config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", {})
    parts, waiting = [], [own if isinstance(own, dict) else {}]
    if getattr(config, "has_memory", False):
        waiting.append(dataclasses.asdict(config.memory_config))
    if hasattr(config, "attach_config"):  # its defaults too
        base = config.base_config
        waiting.append(dataclasses.asdict(config.attach_config.memory_config(base.hidden_size)))
    while waiting:
        part = waiting.pop()
        parts.append(part)
        waiting += [inner for inner in part.values() if isinstance(inner, dict)]
    return parts


def edges(sizes: Sequence[int], length: int) -> list[int]:
    """Positions before, at and behind the first multiples of each size.

    >>> edges([8], 20)
    [7, 8, 9, 15, 16, 17]
    """
    found = {n * size + d for size in sizes for n in range(1, MOST_EDGES + 1) for d in (-1, 0, 1)}
    return sorted(t for t in found if 0 < t < length)


def reach(model: Any) -> int | float | None:
    """The tokens before a token that attention can carry to it, through all layers; infinite for full attention; None if unknown.

    >>> from mnemos.models import MnemosForCausalLM, presets
    >>> reach(MnemosForCausalLM(presets.config("titans-mag", num_hidden_layers=2, attention_window=16)))
    30
    """
    config = getattr(model, "config", None)
    limits = getattr(model, "limits", None)  # of an attached model with a window
    if getattr(config, "attach", None) is not None:
        return math.inf if limits is None else sum(window - 1 for window, _, _ in limits)
    if getattr(config, "model_type", None) == "mnemos" and config is not None:
        from ..models.mixer import BLOCKS

        spans = [BLOCKS[name].attention_span(config) for name in config.blocks]
        return math.inf if None in spans else sum(max(0, (span or 0) - 1) for span in spans)
    if getattr(config, "num_attention_heads", None) and not getattr(config, "sliding_window", None):
        return None if getattr(model, "_is_stateful", False) else math.inf
    return None
