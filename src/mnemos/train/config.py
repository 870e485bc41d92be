"""`TrainConfig`: everything that defines a run, as nested dataclasses, as YAML and as command-line flags."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ..atomic_io import write_text
from ..data import DataConfig
from ..deprecation import renamed_fields
from ..parsing import parse_yaml
from .config_io import build, check_choices, plain, whole
from .telemetry import check_trackers

LEAST = {  # whole numbers, and the least each may be
    "steps": 1,
    "accumulate": 1,
    "seed": 0,
    "checkpoint.every": 1,
    "checkpoint.keep_last": 1,
    "checkpoint.bad_steps": 1,
    "checkpoint.rollbacks": 0,
    "watch.log_every": 1,
    "watch.validate_every": 0,
    "watch.probe_every": 0,
    "watch.probe_length": 1,
    "watch.sample_every": 0,
    "watch.sample_tokens": 0,
    "parallel.shard": 0,
    "schedule.finish_chunk": 1,
    "loss.polarisation_warmup": 0,
}
RANGES = {  # from the first, to below the second
    "optim.betas": (0, 1),
    "optim.momentum": (0, 1),
    "optim.weight_decay": (0, math.inf),
    "optim.w0_lr_scale": (0, math.inf),
    "optim.clip": (0, math.inf),  # torch would turn the gradient round for one below 0
    "optim.ema": (0, 1),
    "schedule.warmup": (0, math.inf),
    "schedule.decay": (0, 1),
    "schedule.final": (0, math.inf),
    "schedule.finish_share": (0, 1),
    "loss.polarisation": (0, math.inf),
    "loss.polarisation_end": (0, math.inf),
    "loss.polarisation_hold": (0, 1),
    "loss.memory_dropout": (0, 1),
    "checkpoint.spike": (0, math.inf),
    "checkpoint.rollback_lr": (0, math.inf),
}
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, the compute-optimal ratio


@dataclass
class ModelConfig:
    """Which model."""

    preset: str = "atlas-mag"
    """a row of `mnemos presets`"""
    size: str = "nano"
    """a size of `mnemos presets`"""
    set: tuple[str, ...] = ()
    """any field of the model's config, name=value: attention_window=128 memory_depth=3 memory_layers=[]"""

    def overrides(self) -> dict[str, Any]:
        """The fields of `set`, their values read as YAML.

        >>> ModelConfig(set=("attention_window=128", "memory_layers=[]")).overrides()
        {'attention_window': 128, 'memory_layers': []}
        """
        found = {}
        for item in self.set:
            name, equals, value = item.partition("=")
            if not equals or not name:
                raise ValueError(f"model.set={item!r} must have the form name=value, such as attention_window=128")
            found[name.strip()] = parse_yaml(value, f"the value of model.set={item!r:.60}")
        return found


@renamed_fields(start_lr="w0_lr_scale")
@dataclass
class OptimConfig:
    """The outer loop's optimiser."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon for the matrices of the blocks, with adamw for all else"""
    lr: float = 2e-3
    """peak learning rate of adamw"""
    muon_lr: float | None = None
    """peak learning rate of muon; None: lr, for its updates have the size of adamw's"""
    betas: tuple[float, float] = (0.9, 0.95)
    """of adamw"""
    momentum: float = 0.95
    """of muon"""
    weight_decay: float = 0.1
    """of matrices; never of norms, biases, gates, embeddings and what a memory starts from"""
    w0_lr_scale: float = 0.1
    """learning rate of the hidden maps of what a memory starts from, as a share of lr: every key passes through them, and where they move
    as fast as the rest, recall stays behind (docs/log.md); 0 leaves them as they were drawn"""
    clip: float = 1.0
    """largest norm of the gradient; 0 clips nothing"""
    ema: float = 0.0
    """decay of an average of the weights, such as 0.999; 0 keeps none"""


@dataclass
class ScheduleConfig:
    """How things change over the run."""

    name: Literal["cosine", "wsd", "constant"] = "cosine"
    """cosine; wsd: warm up, stay, decay; constant after the warm-up"""
    warmup: float = 0.02
    """steps of linear warm-up; below 1, a share of all steps"""
    decay: float = 0.2
    """share of the steps over which wsd falls"""
    final: float = 0.1
    """learning rate at the end, as a share of the peak"""
    finish_chunk: int | None = None
    """chunk size of the memory for the last part of the run: train with a large chunk, finish with a small one"""
    finish_share: float = 0.05
    """how much of the run that part is"""


@dataclass
class LossConfig:
    """What is added to the language-model loss. All off by default."""

    polarisation: float = 0.0
    """λ0 of λ(t)·mean(1-|2g-1|) over every token's gate between attention and memory; contested, see docs/training.md"""
    polarisation_end: float | None = None
    """λ1, where λ(t) falls to; None: λ0 / 100"""
    polarisation_hold: float = 0.1
    """share of the steps with λ0, before λ(t) falls geometrically"""
    polarisation_warmup: int = 0
    """steps without it, at the start"""
    memory_dropout: float = 0.0
    """share of the rows whose memory is silent in a step, layer by layer"""


@dataclass
class CheckpointConfig:
    """What is kept, and when a run goes back to it."""

    every: int = 500
    """steps between checkpoints"""
    keep_last: int = 3
    """how many to keep, besides the best"""
    asynchronous: bool = True
    """write while training goes on"""
    bad_steps: int = 3
    """so many steps in a row without a finite loss: back to the last good checkpoint"""
    spike: float = 1.0
    """smoothed loss so far (in nats) above its lowest: back to the last good checkpoint; 0 never"""
    rollbacks: int = 3
    """give up after so many"""
    rollback_lr: float = 0.7
    """factor of the learning rate after each"""


@dataclass
class WatchConfig:
    """What to look at, and how often (in steps; 0 is never)."""

    log_every: int = 10
    """a line of metrics.jsonl"""
    validate_every: int = 250
    """loss on the held-out text, gates, surprise, the memory's contribution"""
    probe_every: int = 0
    """needle in a haystack, scored on the answer"""
    probe_length: int = 1024
    """tokens of the haystack"""
    sample_every: int = 0
    """a sample from the model; one is always made at the end"""
    sample_tokens: int = 120
    """length of a sample; 0 makes none"""
    prompt: str = "The "
    """what a sample begins with"""
    trackers: tuple[str, ...] = ()
    """send metrics there too: tensorboard, wandb or trackio (extra track), or one that --import registers"""
    display: bool = True
    """a live display, where there is a terminal"""


@dataclass
class ParallelConfig:
    """How several processes share the work (start them with torchrun)."""

    strategy: Literal["auto", "ddp", "fsdp", "hybrid"] = "auto"
    """ddp: every process has all weights; fsdp: sharded over all; hybrid: over `shard`, copied beyond; auto: fsdp"""
    shard: int = 0
    """processes that share one copy of the weights under hybrid; 0: those of one machine"""


@dataclass
class TrainConfig:
    """One run. `mnemos train --help` shows every field; `runs/<name>/config.yaml` is one of these, in full.

    >>> config = TrainConfig(steps=10, optim=OptimConfig(lr=1e-3))
    >>> TrainConfig.from_dict(config.to_dict()) == config
    True
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    name: str | None = None
    """the run's folder; None: preset and size, numbered"""
    folder: str = "runs"
    """where runs live"""
    steps: int | None = None
    """optimiser steps; None: from tokens"""
    tokens: str | None = None
    """how much to read: 15B, 200M, a number, or chinchilla (20 per parameter); takes the place of steps"""
    accumulate: int = 1
    """batches per step"""
    seed: int = 0
    """of the weights and of the data's order"""
    device: str = "auto"
    """cuda where there is one, else cpu; or a torch device"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """what matrices are multiplied in; weights and memories stay float32"""
    gradient_checkpointing: bool = False
    """recompute blocks in the backward pass: less memory, a third more work"""
    compile: bool = False
    """torch.compile every block"""

    def __post_init__(self):
        self._check_length()
        for name, least in LEAST.items():
            part, _, field_name = name.rpartition(".")
            value = getattr(getattr(self, part) if part else self, field_name)
            if value is not None:
                whole(name, value, least)
        if self.seed >= 2**63:
            raise ValueError(f"seed={self.seed} must be below 2**63")
        for part in (self.optim, self.schedule, self.loss, self.parallel):
            check_choices(part)
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} is unknown; choose float32 or bfloat16")
        for name in ("lr", "muon_lr"):
            value = getattr(self.optim, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"optim.{name}={value!r} must be > 0")
        for name, (low, high) in RANGES.items():
            part, _, field_name = name.rpartition(".")
            value = getattr(getattr(self, part), field_name)
            for x in value if isinstance(value, tuple) else () if value is None else (value,):
                if not low <= x < high:
                    limit = f" and < {high:g}" if high < math.inf else ""
                    raise ValueError(f"{name}={value!r} must be >= {low:g}{limit}")
        if self.data.carry_state and self.gradient_checkpointing:
            raise ValueError("carry_state and gradient_checkpointing do not go together: choose one")
        if self.compile and (self.loss.polarisation or self.loss.memory_dropout):
            raise ValueError("compile does not go with loss.polarisation or loss.memory_dropout: choose one")

    def _check_length(self) -> None:
        if self.steps is not None and self.tokens is not None:
            raise ValueError(
                f"steps={self.steps} and tokens={self.tokens!r} both say how long to train: give one of them"
            )

    def total_steps(self, parameters: int) -> int:
        """`steps`, or as many as read `tokens`; 1,000 where neither is given."""
        self._check_length()
        if self.steps is not None:
            return self.steps
        if self.tokens is None:
            return 1000
        return max(1, -(-self.token_budget(parameters) // self.tokens_per_step))

    def token_budget(self, parameters: int) -> int:
        """`tokens` as a number.

        >>> TrainConfig(tokens="chinchilla").token_budget(1000), TrainConfig(tokens="1.5M").token_budget(0)
        (20000, 1500000)
        """
        text = str(self.tokens).strip().lower()
        if text == "chinchilla":
            return TOKENS_PER_PARAMETER * parameters
        factor = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}.get(text[-1:], 1)
        try:
            budget = round(float(text[:-1] if factor > 1 else text) * factor)
        except (ValueError, OverflowError):  # inf has no whole number
            budget = 0
        if budget < 1:
            raise ValueError(f"tokens={self.tokens!r} must be a number such as 200M or 15B, or chinchilla")
        return budget

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch_size * self.data.seq_len * self.accumulate

    def to_dict(self) -> dict[str, Any]:
        return plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TrainConfig:
        """A config from nested dictionaries; what is missing has its default, what is unknown is refused."""
        return build(cls, fields, "")

    def save(self, path: str | os.PathLike) -> None:
        write_text(path, self.to_yaml())

    def to_yaml(self) -> str:
        """Every setting, as `save` writes it."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    @classmethod
    def load(cls, path: str | os.PathLike) -> TrainConfig:
        """Read a YAML file of settings for a training. Its trackers must be registered."""
        config = cls.load_recorded(path)
        check_trackers(config.watch.trackers)
        return config

    @classmethod
    def load_recorded(cls, path: str | os.PathLike) -> TrainConfig:
        """Read the config.yaml of a run. Its trackers need not be registered, so that the run can be listed, evaluated and exported."""
        try:
            fields = parse_yaml(Path(path).read_text(encoding="utf-8"), "it")
        except OSError as broken:
            raise ValueError(f"{path} is not a readable config: {broken.strerror or broken}") from None
        except ValueError as broken:
            raise ValueError(f"{path} is not a readable config: {broken}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{path} is not a config: it must hold names and values, as runs/<name>/config.yaml does")
        return cls.from_dict(fields)


EXCLUSIVE_LENGTHS = {"steps": "tokens", "tokens": "steps"}  # the later one of these to be given takes the other's place


def merge(config: TrainConfig, fields: dict[str, Any]) -> TrainConfig:
    """The same config with some fields, nested as in YAML, replaced.

    >>> merge(TrainConfig(steps=300), {"tokens": "5M"}).steps is None
    True
    """

    def over(old: Any, new: Any) -> Any:
        if isinstance(old, dict) and isinstance(new, dict):
            return old | {key: over(old.get(key), value) for key, value in new.items()}
        return new

    replaced = {other: None for name, other in EXCLUSIVE_LENGTHS.items() if fields.get(name) is not None}
    return TrainConfig.from_dict(over(config.to_dict(), replaced | fields))
