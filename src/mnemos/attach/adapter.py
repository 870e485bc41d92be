"""Adapters: the trained memories of an attached model as one file, bound to the base model that they were trained with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..memory.files import one_line, read_tensors, write_tensors
from ..memory.state_validation import check_floats, check_shapes
from .config import AttachConfig
from .identity import LORA, base_hash
from .lora import add_lora
from .model import AttachedForCausalLM, attach

FORMAT = "mnemos.adapter/1"


def save_adapter(model: AttachedForCausalLM, path: str | os.PathLike) -> None:
    """Write the memories of a model, and LoRA maps if it has some, as a safetensors file; whole or not at all.

    Its header has the `AttachConfig` and the name, the type and the hash of the base model, whose weights are not in the file.
    """
    if not isinstance(model, AttachedForCausalLM):
        raise ValueError(f"model is a {type(model).__name__}, but save_adapter needs one that attach returned")
    header = {
        "format": FORMAT,
        "attach": model.attach_config.to_json(),
        "base_name": _base_name(model.base),
        "base_type": model.base.config.model_type,
        "base_hash": base_hash(model.base),
        "lora": json.dumps(model.lora),
    }
    write_tensors(path, adapter_tensors(model), header)


def _base_name(base: PreTrainedModel) -> str:
    """The name of the base on a hub, or of its folder without the way there: adapters are passed on, paths of a machine are not."""
    name = str(getattr(base, "name_or_path", "") or "")
    path = Path(name)
    return (path.name if path.is_absolute() or path.exists() else name)[:200]


def adapter_tensors(model: AttachedForCausalLM) -> dict[str, Tensor]:
    """The tensors of an adapter by name: those of the memories, and LoRA maps of the base."""
    return {name: x for name, x in model.state_dict().items() if is_adapter(name)}


def is_adapter(name: str) -> bool:
    """Whether a parameter or buffer of an attached model belongs to its memories or its LoRA maps, and not to the base.

    >>> is_adapter("memories.2.gate"), is_adapter("base.model.embed_tokens.weight")
    (True, False)
    """
    return name.startswith("memories.") or LORA in name


def load_adapter(base: PreTrainedModel, path: str | os.PathLike, allow_other_base: bool = False) -> AttachedForCausalLM:
    """Attach the memories of a file to the base model that they were trained with: the attached model.

    Raises a ValueError for another base, unless `allow_other_base`, and for tensors that are missing, foreign or not finite.
    """
    tensors, header = read_tensors(path, "adapter", FORMAT, "cpu")
    try:
        config = AttachConfig.from_json(header["attach"])
        name, kind, expected, lora = (
            header["base_name"],
            header["base_type"],
            header["base_hash"],
            json.loads(header["lora"]),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as broken:
        raise ValueError(f"{path} has a broken header: {one_line(broken)}") from None
    if not isinstance(base, PreTrainedModel) or isinstance(base, AttachedForCausalLM):
        raise ValueError(f"base is a {type(base).__name__}, but a pretrained model without memories is expected")
    if base.config.model_type != kind:
        raise ValueError(
            f"{path} was trained with a base of type {kind!r:.60}, but this one is {base.config.model_type!r}"
        )
    if not allow_other_base and base_hash(base) != expected:
        raise ValueError(
            f"{path} was trained with the base {name or kind!r:.120}, whose weights differ from those of this one; "
            "allow_other_base=True attaches it all the same"
        )
    model = attach(base, config)
    if lora is not None:
        add_lora(model, _lora_options(path, lora))
    fill(path, model, tensors)
    return model


def fill(path, model: AttachedForCausalLM, tensors: dict[str, Tensor]) -> None:
    """Copy checked tensors into a model."""
    own = adapter_tensors(model)
    check_shapes(path, tensors, {name: tuple(x.shape) for name, x in own.items()})
    check_floats(path, {name: x for name, x in tensors.items() if own[name].is_floating_point()})
    with torch.no_grad():
        for name, x in own.items():
            if not x.is_floating_point() and x.dtype != tensors[name].dtype:
                raise ValueError(f"{path} holds {tensors[name].dtype} in {name:.60}, where {x.dtype} is expected")
            x.copy_(tensors[name])


def _lora_options(path, lora: Any) -> dict[str, Any]:
    modules = lora.get("target_modules") if isinstance(lora, dict) else None
    if (
        not isinstance(modules, list)
        or not all(isinstance(x, str) for x in modules)
        or set(lora) - {"r", "lora_alpha", "target_modules"}
        or any(type(lora.get(k)) is not int or not 1 <= lora[k] <= 4096 for k in ("r", "lora_alpha"))
    ):
        raise ValueError(f"{path} has a broken header: lora={lora!r:.80}")
    return lora
