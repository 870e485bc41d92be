"""`ModelSource`: the model of a run, and everything that depends on its kind. Trainer, checkpoints and exports ask their source.

`PresetSource` builds a model of presets; `AttachedSource` (attached_source.py) attaches memories to a pretrained one.
"""

from __future__ import annotations

import dataclasses
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..atomic_io import write_text
from ..deprecation import old_names
from ..memory import NeuralMemoryConfig
from ..models import MnemosConfig, MnemosForCausalLM, presets
from ..models.folder import check_finite, check_shapes
from .checkpoints import read_tensors_into, tensor_shapes
from .config import TrainConfig
from .distillation import Distillation
from .hooks import AnyModel
from .optimisers import Optimisers
from .telemetry import flops_per_token


class ModelSource(ABC):
    """Builds the model of a config, and opens those of its checkpoints."""

    def __init__(self, config: TrainConfig):
        self.config = config

    @abstractmethod
    def check(self) -> None:
        """Raise a ValueError for settings of which no model can be built. Runs before hours of reading data."""

    @abstractmethod
    def build(self, data: Any, saved: dict[str, Any] | None) -> AnyModel:
        """A new model. saved: the model's config in the checkpoint from which the run will resume."""

    @classmethod
    @abstractmethod
    def describe(cls, state: dict[str, Any]) -> Any:
        """What `load` needs of a checkpoint's state.json. Raises a KeyError or TypeError if it is missing."""

    @classmethod
    @abstractmethod
    def load(cls, run: Path, checkpoint: Path, described: Any, prefix: str, allow_missing: bool) -> AnyModel:
        """The model of a checkpoint in evaluation mode. prefix: "model" or "average"."""

    @classmethod
    @abstractmethod
    def write(cls, model: AnyModel, folder: Path, run: Path, checkpoint: Path, average: bool) -> None:
        """Write the exported form of a run's model into a folder."""

    @classmethod
    def parameters(cls, model: AnyModel) -> dict[str, nn.Parameter]:
        """The parameters that checkpoints hold, by name."""
        return dict(model.named_parameters())

    @classmethod
    def tensors(cls, model: AnyModel, prefix: str) -> dict[str, Tensor]:
        """`parameters` without copies; and the model's buffers if the prefix is "model"."""
        named = {f"{prefix}.{name}": p.detach() for name, p in cls.parameters(model).items()}
        return named | cls.buffers(model) if prefix == "model" else named

    @classmethod
    def buffers(cls, model: AnyModel) -> dict[str, Tensor]:
        """The buffers that checkpoints hold."""
        known = model.state_dict().keys()
        return {f"model.{name}": b for name, b in model.named_buffers() if name in known}

    @classmethod
    def fill(cls, model: AnyModel, checkpoint: Path, prefix: str) -> AnyModel:
        """Read the tensors of a checkpoint into a model, and check that they are finite."""
        found, tensors = tensor_shapes(checkpoint), cls.tensors(model, prefix) | cls.buffers(model)
        read_tensors_into(checkpoint, {name: x for name, x in tensors.items() if name in found})
        check_finite(str(checkpoint), model)
        return model

    @classmethod
    def check_shapes(cls, model: AnyModel, checkpoint: Path, prefix: str, allow_missing: bool) -> None:
        """Raise a ValueError if a checkpoint has missing or foreign tensors, or tensors of other shapes than the model."""
        shapes = {name: tuple(x.shape) for name, x in (cls.tensors(model, prefix) | cls.buffers(model)).items()}
        found = tensor_shapes(checkpoint)
        own = {name: x for name, x in found.items() if name in shapes or name.startswith(f"{prefix}.")}
        check_shapes(str(checkpoint), shapes, own, allow_missing)

    @classmethod
    @abstractmethod
    def chunk_size(cls, saved: dict[str, Any]) -> int | None:
        """The chunk size of the memory in the config of a saved model."""

    @abstractmethod
    def shards(self, model: AnyModel) -> list[nn.Module]:
        """The modules that FSDP gathers one at a time, inner ones first."""

    @abstractmethod
    def flops_per_token(self, model: AnyModel, length: int) -> float:
        """Model FLOPs per token in training."""

    def optimisers(self, model: AnyModel) -> Optimisers:
        """The optimisers of the parameters that are trained."""
        return Optimisers(model, self.config.optim)

    def gate_factor(self, step: int, total: int) -> float:
        """Factor of the learning rate of `Optimisers`' gates in a step."""
        return 1.0

    def distillation(self, model: AnyModel) -> Distillation | None:
        """The teacher of the model, if it has one."""
        return None

    def notes(self, model: AnyModel) -> Iterator[str]:
        """Sentences for the user at the start of a run."""
        yield from ()


class PresetSource(ModelSource):
    """A model of presets, trained from scratch."""

    def check(self) -> None:
        model = self.config.model
        presets.config(model.preset, model.size, **model.overrides())

    def build(self, data: Any, saved: dict[str, Any] | None) -> MnemosForCausalLM:
        model = self.config.model
        overrides = model.overrides()
        vocabulary = overrides.setdefault("vocab_size", data.vocab_size)
        if vocabulary < data.vocab_size:
            raise ValueError(f"vocab_size={vocabulary} is too small for the tokenizer's {data.vocab_size} tokens")
        eos = getattr(data.tokenizer, "eos_token_id", None)
        kept = {} if saved is None else saved_choices(saved, model.overrides())
        return MnemosForCausalLM(presets.config(model.preset, model.size, **{"eos_token_id": eos} | kept | overrides))

    @classmethod
    def describe(cls, state: dict[str, Any]) -> MnemosConfig:
        return MnemosConfig.from_dict(state["model"])

    @classmethod
    def load(cls, run: Path, checkpoint: Path, described: MnemosConfig, prefix: str, allow_missing: bool):
        with torch.device("meta"):
            model = MnemosForCausalLM(described)
        cls.check_shapes(model, checkpoint, prefix, allow_missing)  # before memory of that size is allocated
        return cls.fill(MnemosForCausalLM(described).eval(), checkpoint, prefix)

    @classmethod
    def write(cls, model: AnyModel, folder: Path, run: Path, checkpoint: Path, average: bool) -> None:
        from ..models.remote import add_remote_code
        from .model_card import model_card

        model.config.use_cache = True
        model.save_pretrained(folder)
        add_remote_code(folder)
        for file in (run / "tokenizer").glob("*"):
            if file.is_file():
                shutil.copy(file, folder / file.name)
        write_text(folder / "README.md", model_card(run, checkpoint, model, average))

    @classmethod
    def chunk_size(cls, saved: dict[str, Any]) -> int | None:
        return (saved.get("memory") or {}).get("chunk_size")

    def shards(self, model: AnyModel) -> list[nn.Module]:
        return model.decoder_layers()

    def flops_per_token(self, model: AnyModel, length: int) -> float:
        return flops_per_token(model, length)


def saved_choices(model: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """What a run to resume keeps of its saved model although presets may have changed since. given: fields that the user chose."""
    saved, renamed = MnemosConfig.from_dict(model), old_names(NeuralMemoryConfig)
    chosen = {name.removeprefix("memory_") for name in [*given, *(given.get("memory") or {})]}
    changed = {"dim", *chosen, *(renamed.get(name, name) for name in chosen)}
    memory = dataclasses.asdict(saved.memory_config) if saved.has_memory else {}
    kept = {f"memory_{name}": value for name, value in memory.items() if name not in changed}
    return {"attention_conv_width": saved.attention_conv_width} | kept
