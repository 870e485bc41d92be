"""The state of a run: weights, optimiser, average, counters, data position. Saved to checkpoints and restored from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .checkpoints import Checkpoints, Contents
from .config import TrainConfig
from .distributed import World
from .divergence import DivergenceGuard
from .hooks import AnyModel, set_chunk_size
from .model_source import ModelSource
from .optimisers import Optimisers
from .randomness import random_state, set_random_state
from .tbptt import CarriedState


@dataclass
class RunProgress:
    """Counters of a run. new_best: the last validation loss is the lowest so far and has no checkpoint yet."""

    step: int = 0
    tokens: int = 0
    val_loss: float | None = None
    best: float = math.inf
    new_best: bool = False
    guard: DivergenceGuard = field(default_factory=DivergenceGuard)


class RunState:
    """Saves and restores one run."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        source: ModelSource,
        model: AnyModel,
        optimisers: Optimisers,
        data: Any,
        carried: CarriedState,
        checkpoints: Checkpoints,
    ):
        self.config, self.world, self.source, self.model, self.data = config, world, source, model, data
        self.optimisers, self.carried, self.checkpoints = optimisers, carried, checkpoints
        averaged = source.parameters(model) if config.optim.ema else {}
        self.average = {name: p.detach().clone() for name, p in averaged.items()}

    def update_average(self) -> None:
        for name, p in self.source.parameters(self.model).items() if self.average else ():
            self.average[name].lerp_(p.detach(), 1 - self.config.optim.ema)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that may be sharded over processes, by name and without copies: weights, optimiser, average."""
        named = self.source.tensors(self.model, "model")
        named |= {f"optim.{name}": x for name, x in self.optimisers.tensors().items()}
        return named | {f"average.{name}": x for name, x in self.average.items()}

    def save(self, progress: RunProgress, wait: bool = False) -> bool:
        """Write a checkpoint, marked as the best one if `progress.new_best`. Returns whether it was written."""
        best, progress.new_best = progress.best if progress.new_best else None, False
        state = {
            "tokens": progress.tokens,
            "guard": progress.guard.state(),
            "val_loss": progress.val_loss,
            "best": progress.best if math.isfinite(progress.best) else None,
            "data": self.data.train.state_dict(),
            "world_size": self.world.size,
            "config": self.config.to_dict(),
            "model": json.loads(self.model.config.to_json_string(use_diff=False)),
        }
        files: dict[str, Callable[[Path], None]] = {}
        if self.carried.cache is not None:
            files[f"carried-{self.world.rank}.safetensors"] = self.carried.save
        contents = Contents(progress.step, state, {"random": random_state()}, files)
        return self.checkpoints.save(self.tensors(), contents, best, wait)

    def restore(self, progress: RunProgress) -> Path | None:
        """Restore everything from the newest complete checkpoint; None if there is none."""
        self.optimisers.allocate()
        found = self.checkpoints.load(self.tensors)
        if found is None:
            for optimiser in self.optimisers.all:
                optimiser.state.clear()
            return None
        path, state = found
        self._take(progress, state)
        progress.guard = DivergenceGuard(**state["guard"])
        self.data.train.load_state_dict(state["data"])
        if self.config.data.carry_state:
            saved = state["world_size"]
            self.carried.load(path, self.world.rank, self.world.size, saved, self.model.config, self.world.device)
        own = path / f"rank-{self.world.rank}.json"
        if state["world_size"] == self.world.size and own.exists():
            set_random_state(json.loads(own.read_text())["random"])
        return path

    def roll_back(self, progress: RunProgress) -> Path | None:
        """Restore weights and optimiser from the newest checkpoint before the divergence; the data continues from the current position."""
        guard, config = progress.guard, self.config.checkpoint
        self.checkpoints.finish()
        limit = None if guard.lowest is None or not config.spike else guard.lowest + config.spike / 2
        found = self.checkpoints.load(self.tensors, self._last_good(limit))
        if found is None:
            return None
        path, state = found
        best = progress.best
        self._take(progress, state)
        progress.best = min(progress.best, best)
        guard.rolled_back(state["guard"], config)
        self.checkpoints.forget_after(progress.step)  # a resume would otherwise use them as the newest
        self.carried.drop()
        return path

    def _take(self, progress: RunProgress, state: dict[str, Any]) -> None:
        progress.step, progress.tokens, progress.val_loss = state["step"], state["tokens"], state["val_loss"]
        progress.best, progress.new_best = math.inf if state["best"] is None else state["best"], False
        size = self.source.chunk_size(state["model"])
        if size is not None:
            set_chunk_size(self.model, size)

    def _last_good(self, limit: float | None) -> int:
        """The step of the newest checkpoint whose smoothed loss is at most `limit`; -1 if there is none."""
        good = -1
        for step in self.world.broadcast(self.checkpoints.live_steps()):
            smoothed = json.loads((self.checkpoints.path(step) / "state.json").read_text())["guard"]["smoothed"]
            if limit is None or smoothed is None or smoothed <= limit:
                good = step
        return good
