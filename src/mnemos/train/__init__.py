"""Training: one typed config, one trainer for one or many processes, checkpoints that survive a kill, and telemetry.

Entry point: `Trainer(TrainConfig(...)).train()`, or `mnemos train` on the command line.
Names are imported lazily, because `mnemos runs` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base_config import BaseConfig, DistillConfig
    from .config import (
        CheckpointConfig,
        LossConfig,
        ModelConfig,
        OptimConfig,
        ParallelConfig,
        ScheduleConfig,
        TrainConfig,
        WatchConfig,
    )
    from .optimisers import parameter_groups
    from .recipes import RECIPES, recipe
    from .records import list_runs, open_run
    from .runs import export, load_model, load_tokenizer
    from .trainer import Result, Trainer, TrainingFailed

_HOME = {
    "RECIPES": "recipes",
    "BaseConfig": "base_config",
    "CheckpointConfig": "config",
    "DistillConfig": "base_config",
    "LossConfig": "config",
    "ModelConfig": "config",
    "OptimConfig": "config",
    "ParallelConfig": "config",
    "Result": "trainer",
    "ScheduleConfig": "config",
    "TrainConfig": "config",
    "Trainer": "trainer",
    "TrainingFailed": "trainer",
    "WatchConfig": "config",
    "export": "runs",
    "list_runs": "records",
    "load_model": "runs",
    "load_tokenizer": "runs",
    "open_run": "records",
    "parameter_groups": "optimisers",
    "recipe": "recipes",
}

__all__ = [
    "RECIPES",
    "BaseConfig",
    "CheckpointConfig",
    "DistillConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "Result",
    "ScheduleConfig",
    "TrainConfig",
    "Trainer",
    "TrainingFailed",
    "WatchConfig",
    "export",
    "list_runs",
    "load_model",
    "load_tokenizer",
    "open_run",
    "parameter_groups",
    "recipe",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    return value
