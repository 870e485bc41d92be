"""A cell's model, and how it is trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from mnemos.models import MnemosConfig, presets
from mnemos.train.config import OptimConfig
from mnemos.trials import TrialConfig

FIRST = 1  # cell["presets"] of results that were kept before presets forgot towards W0 and Atlas committed after every token
FIRST_MUON = {"momentum": True, "chunk_size": 128, "window": 16, "commit_every": None}  # of all Atlas presets then


def first_memory(preset: str) -> dict[str, Any]:
    """Choices of a preset's memory that were others when results were first kept.

    >>> first_memory("titans-mag"), first_memory("swa"), first_memory("atlas")["chunk_size"]
    ({'retention': 'zero'}, {}, 128)
    """
    memory = presets.PRESETS[preset].memory
    if memory is None or "retention" in memory:
        return {}
    return {"retention": "zero"} | (FIRST_MUON if memory.get("commit_every") == 1 else {})


def config_of(cell: dict[str, Any], **more: Any) -> MnemosConfig:
    """The preset and overrides of cell["model"], as wide and deep as the cell says; by the first presets if cell["presets"] is 1.

    >>> config_of({"model": {"preset": "deltanet", "memory_heads": 1}, "dim": 32, "layers": 2}, vocab_size=64).hidden_size
    32
    """
    overrides = {"hidden_size": cell["dim"], "num_hidden_layers": cell["layers"]} | more | cell["model"]
    overrides.pop("start_lr", None)
    if cell.get("presets") == FIRST:
        first = first_memory(overrides["preset"])
        overrides = {f"memory_{name}": value for name, value in first.items()} | overrides
    with warnings.catch_warnings():  # kept results are found by their cells, which have the names of their time
        warnings.simplefilter("ignore", DeprecationWarning)
        return presets.config(overrides.pop("preset"), "nano", **overrides)


def trial_config(cell: dict[str, Any], batch: Callable) -> TrialConfig:
    """A cell's steps and rate. cell["model"]["start_lr"]: how fast hidden maps of a memory's start learn, if not as by default.

    >>> trial_config({"steps": 9, "lr": 0.01, "model": {"start_lr": 1}}, len).w0_lr_scale
    1
    """
    return TrialConfig(
        cell["steps"], cell["lr"], batch, w0_lr_scale=cell["model"].get("start_lr", OptimConfig.w0_lr_scale)
    )
