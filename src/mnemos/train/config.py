"""`TrainConfig`: all settings of a run, as nested dataclasses, YAML and command-line flags."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from ..atomic_io import write_text
from ..data import DataConfig
from ..deprecation import renamed_fields
from ..parsing import parse_yaml
from . import base_config
from .base_config import BaseConfig, DistillConfig, check_base
from .config_io import build, check_choices, plain, under_new_names, whole
from .telemetry import check_trackers

LEAST = {  # integers, and the smallest value of each
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
} | base_config.LEAST
RANGES = {  # half-open ranges
    "optim.betas": (0, 1),
    "optim.momentum": (0, 1),
    "optim.weight_decay": (0, math.inf),
    "optim.w0_lr_scale": (0, math.inf),
    "optim.clip": (0, math.inf),  # torch would flip the gradient for a negative norm
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
} | base_config.RANGES
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, the compute-optimal ratio


@dataclass
class ModelConfig:
    """The model to train."""

    preset: str = "atlas-mag"
    """a row of `mnemos presets`"""
    size: str = "nano"
    """a size of `mnemos presets`"""
    set: tuple[str, ...] = ()
    """fields of the model's config as name=value: attention_window=128 attention_conv_width=4 memory_depth=3 memory_layers=[]"""

    remedies: ClassVar[str] = "use --seq-len {length}, --carry-state or --model.set {smaller}"

    @property
    def title(self) -> str:
        """Preset and size."""
        return f"{self.preset} {self.size}"

    def overrides(self) -> dict[str, Any]:
        """The fields of `set`; values are parsed as YAML.

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
    """The optimiser of the outer loop."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon for the matrices of the blocks and adamw for all other parameters"""
    lr: float = 2e-3
    """peak learning rate of adamw"""
    muon_lr: float | None = None
    """peak learning rate of muon (None: lr, because its updates have the same scale as adamw's)"""
    betas: tuple[float, float] = (0.9, 0.95)
    """betas of adamw"""
    momentum: float = 0.95
    """momentum of muon"""
    weight_decay: float = 0.1
    """weight decay of matrices; norms, biases, gates, embeddings and the memory's initial weights W0 have none"""
    w0_lr_scale: float = 0.1
    """learning rate of the hidden maps of the memory's initial weights W0, as a fraction of lr (at 1, recall suffers: docs/log.md); 0 freezes them"""
    clip: float = 1.0
    """largest norm of the gradient; 0 for no clipping"""
    ema: float = 0.0
    """decay of an exponential moving average of the weights, such as 0.999; 0 for none"""


@dataclass
class ScheduleConfig:
    """Learning-rate schedule, and the memory's chunk size in the last part of the run."""

    name: Literal["cosine", "wsd", "constant"] = "cosine"
    """cosine; wsd: warm-up, stable, decay; constant: no decay after the warm-up"""
    warmup: float = 0.02
    """steps of linear warm-up; below 1, a fraction of all steps"""
    decay: float = 0.2
    """fraction of the steps over which wsd decays"""
    final: float = 0.1
    """final learning rate, as a fraction of the peak"""
    finish_chunk: int | None = None
    """chunk size of the memory in the last part of the run: train with a large chunk, finish with a small one"""
    finish_share: float = 0.05
    """length of that part, as a fraction of the run"""


@dataclass
class LossConfig:
    """Terms added to the language-model loss. All are off by default."""

    polarisation: float = 0.0
    """λ0 of λ(t)·mean(1-|2g-1|) over the gates between attention and memory of all tokens; contested, see docs/training.md"""
    polarisation_end: float | None = None
    """λ1, the final value of λ(t) (None: λ0 / 100)"""
    polarisation_hold: float = 0.1
    """fraction of the steps with λ0, before λ(t) decays geometrically"""
    polarisation_warmup: int = 0
    """steps at the start without polarisation"""
    memory_dropout: float = 0.0
    """fraction of the batch rows whose memory is off in a step, drawn for each layer"""


@dataclass
class CheckpointConfig:
    """Checkpoints to keep, and rollbacks to them."""

    every: int = 500
    """steps between checkpoints"""
    keep_last: int = 3
    """number of checkpoints to keep, besides the best"""
    asynchronous: bool = True
    """write checkpoints while training continues"""
    bad_steps: int = 3
    """roll back to the last good checkpoint after this many consecutive steps without a finite loss"""
    spike: float = 1.0
    """roll back to the last good checkpoint when the smoothed loss is this far above its lowest (nats); 0 for never"""
    rollbacks: int = 3
    """give up after this many rollbacks"""
    rollback_lr: float = 0.7
    """factor of the learning rate after each rollback"""


@dataclass
class WatchConfig:
    """Telemetry and its intervals (in steps; 0 for never)."""

    log_every: int = 10
    """steps between lines of metrics.jsonl"""
    validate_every: int = 250
    """steps between validations: held-out loss, gates, surprise, contribution of the memory"""
    probe_every: int = 0
    """steps between needle-in-a-haystack probes, scored on the answer"""
    probe_length: int = 1024
    """tokens of the haystack"""
    sample_every: int = 0
    """steps between samples from the model; the last step always has one"""
    sample_tokens: int = 120
    """tokens of a sample; 0 for no samples"""
    prompt: str = "The "
    """prompt of a sample"""
    trackers: tuple[str, ...] = ()
    """also send metrics to tensorboard, wandb or trackio (extra track), or to a tracker that an --import registers"""
    display: bool = True
    """live display, in a terminal"""


@dataclass
class ParallelConfig:
    """Distribution over several processes (start them with torchrun)."""

    strategy: Literal["auto", "ddp", "fsdp", "hybrid"] = "auto"
    """ddp: replicated weights; fsdp: sharded over all processes; hybrid: sharded over `shard` processes and replicated; auto: fsdp"""
    shard: int = 0
    """processes that share one copy of the weights under hybrid (0: those of one machine)"""


@dataclass
class TrainConfig:
    """The config of one run. `mnemos train --help` lists all fields; `runs/<name>/config.yaml` is a complete example.

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
    base: BaseConfig = field(default_factory=BaseConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    name: str | None = None
    """folder of the run (None: preset and size, with a number if taken)"""
    folder: str = "runs"
    """parent folder of the runs"""
    steps: int | None = None
    """optimiser steps (None: from tokens)"""
    tokens: str | None = None
    """tokens to read: 15B, 200M, a number, or chinchilla (20 per parameter); replaces steps"""
    accumulate: int = 1
    """batches per step (gradient accumulation)"""
    seed: int = 0
    """seed of the weights and of the order of the data"""
    device: str = "auto"
    """auto (cuda if available, else cpu), or a torch device"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of matrix products; weights and memories stay float32"""
    gradient_checkpointing: bool = False
    """recompute blocks in the backward pass: less memory, a third more computation"""
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
            raise ValueError("carry_state and gradient_checkpointing cannot be combined: choose one")
        if self.compile and (self.loss.polarisation or self.loss.memory_dropout):
            raise ValueError("compile cannot be combined with loss.polarisation or loss.memory_dropout: choose one")
        check_base(self, ModelConfig())

    def _check_length(self) -> None:
        if self.steps is not None and self.tokens is not None:
            raise ValueError(
                f"steps={self.steps} and tokens={self.tokens!r} both set the length of the run: give one of them"
            )

    def total_steps(self, parameters: int) -> int:
        """`steps`, or the steps that read `tokens`; 1,000 if neither is given."""
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
        except (ValueError, OverflowError):  # infinity has no integer value
            budget = 0
        if budget < 1:
            raise ValueError(f"tokens={self.tokens!r} must be a number such as 200M or 15B, or chinchilla")
        return budget

    @property
    def subject(self) -> ModelConfig | BaseConfig:
        """The part that names the model to train."""
        return self.model if self.base.model is None else self.base

    @property
    def title(self) -> str:
        """The model to train, in words."""
        return self.subject.title

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch_size * self.data.seq_len * self.accumulate

    def to_dict(self) -> dict[str, Any]:
        return plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TrainConfig:
        """A config from nested dictionaries; missing fields have their defaults, unknown fields raise a ValueError."""
        return build(cls, fields, "")

    def save(self, path: str | os.PathLike) -> None:
        write_text(path, self.to_yaml())

    def to_yaml(self) -> str:
        """All settings as YAML, the content of the file that `save` writes."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    @classmethod
    def load(cls, path: str | os.PathLike) -> TrainConfig:
        """Read a YAML file of training settings. Its trackers must be registered."""
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


EXCLUSIVE_LENGTHS = {"steps": "tokens", "tokens": "steps"}  # the one given later replaces the other


def merge(config: TrainConfig, fields: dict[str, Any]) -> TrainConfig:
    """The config with some fields, nested as in YAML, replaced.

    >>> merge(TrainConfig(steps=300), {"tokens": "5M"}).steps is None
    True
    """

    def over(old: Any, new: Any) -> Any:
        if isinstance(old, dict) and isinstance(new, dict):
            return old | {key: over(old.get(key), value) for key, value in new.items()}
        return new

    fields = under_new_names(TrainConfig, fields)
    replaced = {other: None for name, other in EXCLUSIVE_LENGTHS.items() if fields.get(name) is not None}
    return TrainConfig.from_dict(over(config.to_dict(), replaced | fields))
