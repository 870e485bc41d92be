"""One cell of the grid: a model with one component switched off, trained with one seed and scored."""

from __future__ import annotations

from typing import Any

import torch

from ..models import MnemosConfig, MnemosForCausalLM, presets
from ..trials import TrialConfig, train
from .grid import overrides
from .tasks import TASKS


def model_config(settings: dict[str, Any], ablation: str) -> MnemosConfig:
    """The preset with the user's overrides, then with the ablation's."""
    task = TASKS[settings["task"]]
    chosen = {"vocab_size": task.vocab_size(settings)} | settings["overrides"]
    base = presets.config(settings["preset"], settings["size"], **chosen)
    return presets.config(settings["preset"], settings["size"], **(chosen | overrides(ablation, base)))


def run_cell(settings: dict[str, Any], ablation: str, seed: int) -> dict[str, Any]:
    """Train and score one cell. A seed has the same batches in every ablation, so that scores can be compared pairwise.

    >>> settings = {"preset": "titans-lmm", "size": "nano", "task": "mqar", "vocab_size": 16, "length": 16, "pairs": 2}
    >>> settings |= {"overrides": {"hidden_size": 16, "num_hidden_layers": 1}, "steps": 2, "batch_size": 2, "lr": 1e-3, "examples": 4}
    >>> 0 <= run_cell(settings, "no-momentum", seed=0)["score"] <= 1
    True
    """
    task = TASKS[settings["task"]]
    torch.manual_seed(seed)
    model = MnemosForCausalLM(model_config(settings, ablation))
    first = (seed + 1) * settings["steps"]
    trial = TrialConfig(
        settings["steps"],
        settings["lr"],
        lambda step: task.train(settings, first + step, settings["batch_size"]),
    )
    trained = train(model, trial)
    return {"ablation": ablation, "seed": seed, "score": task.score(settings, model, settings["examples"])} | trained
