"""LoRA maps in the base of an attached model, through peft, trained together with the memories."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import AttachedForCausalLM


def add_lora(model: AttachedForCausalLM, options: dict[str, Any] | None = None, **fields) -> AttachedForCausalLM:
    """Add LoRA maps to linear maps of the base, in place; `save_adapter` and `load_adapter` keep them. Needs the package peft.

    options, or fields: r (rank), lora_alpha, and target_modules, the names of the linear maps: r=8, target_modules=["q_proj", "v_proj"].
    """
    try:
        peft = importlib.import_module("peft")
    except ImportError:
        raise ValueError("add_lora needs the package peft: pip install peft") from None
    given: dict[str, Any] = {"r": 8, "lora_alpha": 16, **(options or {}), **fields}
    if unknown := sorted(set(given) - {"r", "lora_alpha", "target_modules"}):
        raise ValueError(f"add_lora has no option {', '.join(unknown)}; there are r, lora_alpha, target_modules")
    if not isinstance(given.get("target_modules"), list | tuple) or not given["target_modules"]:
        raise ValueError(
            "target_modules must be a list of the names of linear maps of the base, such as ['q_proj', 'v_proj']"
        )
    if model.lora is not None:
        raise ValueError("the model has LoRA maps already")
    given["target_modules"] = list(given["target_modules"])
    try:
        peft.inject_adapter_in_model(peft.LoraConfig(**given), model.base)
    except ValueError as wrong:
        raise ValueError(
            f"target_modules={given['target_modules']!r:.80} fit no linear map of the base: {wrong!s:.120}"
        ) from None
    model.lora = given
    return model


@contextlib.contextmanager
def without_lora(model: AttachedForCausalLM) -> Generator[None]:
    """Inside the block the base computes without its LoRA maps, as before `add_lora`."""
    mapped = [module for module in model.base.modules() if hasattr(module, "get_base_layer")]
    for module in mapped:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in mapped:
            module.enable_adapters(True)


def merge_lora(model: AttachedForCausalLM) -> AttachedForCausalLM:
    """Add the LoRA maps to the weights of the base, in place, and remove them. The base is then another one, with another hash."""
    for name, module in list(model.base.named_modules()):
        if hasattr(module, "merge") and hasattr(module, "get_base_layer"):
            module.merge(safe_merge=True)
            parent, _, own = name.rpartition(".")
            setattr(model.base.get_submodule(parent), own, module.get_base_layer())
    model.lora = None
    return model
