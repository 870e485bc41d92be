"""A cell's model."""

from __future__ import annotations

from typing import Any

from ..models import MnemosConfig, presets


def config_of(cell: dict[str, Any], **more: Any) -> MnemosConfig:
    """The preset and overrides of cell["model"], as wide and deep as the cell says.

    >>> config_of({"model": {"preset": "deltanet", "memory_heads": 1}, "dim": 32, "layers": 2}, vocab_size=64).hidden_size
    32
    """
    overrides = {"hidden_size": cell["dim"], "num_hidden_layers": cell["layers"]} | more | cell["model"]
    return presets.config(overrides.pop("preset"), "nano", **overrides)
