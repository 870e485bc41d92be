"""Training: one typed config, one trainer for one process or many, checkpoints that survive being killed, and what to watch.

`Trainer(TrainConfig(...)).train()` is the way in; `mnemos train` is the same from the command line.
"""

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
from .runs import export, list_runs, load_model, load_tokenizer, open_run
from .trainer import Result, Trainer, TrainingFailed

__all__ = [
    "RECIPES",
    "CheckpointConfig",
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
