"""One cell of the grid: a model with one choice switched off, trained with one seed, and its score."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from ..models import MnemosConfig, MnemosForCausalLM, presets
from ..train.config import OptimConfig, ScheduleConfig
from ..train.optimisers import Optimisers
from ..train.schedules import lr_factor
from .grid import overrides
from .tasks import TASKS


def model_config(settings: dict[str, Any], ablation: str) -> MnemosConfig:
    """The preset with the user's overrides, then with the ablation's."""
    task = TASKS[settings["task"]]
    chosen = {"vocab_size": task.vocab_size(settings)} | settings["overrides"]
    base = presets.config(settings["preset"], settings["size"], **chosen)
    return presets.config(settings["preset"], settings["size"], **(chosen | overrides(ablation, base)))


def run_cell(settings: dict[str, Any], ablation: str, seed: int) -> dict[str, Any]:
    """Train and score. Seed s has the same batches in every ablation, so that their scores can be compared pairwise.

    >>> settings = {"preset": "titans-lmm", "size": "nano", "task": "mqar", "vocab_size": 16, "length": 16, "pairs": 2}
    >>> settings |= {"overrides": {"hidden_size": 16, "num_hidden_layers": 1}, "steps": 2, "batch_size": 2, "lr": 1e-3, "examples": 4}
    >>> 0 <= run_cell(settings, "no-momentum", seed=0)["score"] <= 1
    True
    """
    task = TASKS[settings["task"]]
    torch.manual_seed(seed)
    model = MnemosForCausalLM(model_config(settings, ablation)).train()
    optimisers = Optimisers(model, OptimConfig(lr=settings["lr"]))
    begin, bad, loss = time.perf_counter(), 0, math.nan
    for step in range(settings["steps"]):
        ids, labels = task.train(settings, (seed + 1) * settings["steps"] + step, settings["batch_size"])
        optimisers.set_factor(lr_factor(ScheduleConfig(), step, settings["steps"]))
        found = model(ids, labels=labels).loss
        optimisers.zero_grad()
        found.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not (found.isfinite() and norm.isfinite()):
            bad += 1
            continue
        optimisers.step()
        loss = found.item()
    seconds = time.perf_counter() - begin
    score = task.score(settings, model.eval(), settings["examples"])
    return {
        "ablation": ablation,
        "seed": seed,
        "score": score,
        "train_loss": loss,
        "bad_steps": bad,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
    }
