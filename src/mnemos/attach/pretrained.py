"""Opening and initialising of attached models, on top of transformers' own: complete, finite, of their config, never drawn anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, initialization

from ..memory.files import one_line
from ..models.folder import check_finite, check_inside, check_names, read_object, read_shapes
from .transformers_config import AttachedModelConfig


class AttachedPreTrainedModel(PreTrainedModel):
    """Checked opening, initialisation of the memories alone, and the flags that transformers reads."""

    config_class = AttachedModelConfig
    config: AttachedModelConfig
    base_model_prefix = "base"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["memories"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _is_stateful = True
    base: Any
    memories: nn.ModuleDict

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path=None, *args, **kwargs):
        """transformers' `from_pretrained`. Raises a ValueError if weights are incomplete, not finite, or do not fit their config."""
        name = pretrained_model_name_or_path
        if name is not None:
            kwargs.setdefault("use_safetensors", True)
            if os.path.isdir(name) and (Path(name) / "config.json").is_file():
                kind = read_object(Path(name) / "config.json").get("model_type")
                if kind != AttachedModelConfig.model_type:
                    raise ValueError(
                        f"{name} has model_type={kind!r:.60}: open it with AutoModelForCausalLM, then attach"
                    )
        wants_info = kwargs.pop("output_loading_info", False)
        try:
            found: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
            model, info = found
        except (SafetensorError, RecursionError, AttributeError, LookupError, TypeError) as broken:  # of crafted files
            raise ValueError(f"{name} cannot be opened: {one_line(broken)}") from broken
        where = "state_dict" if name is None else str(name)
        if info.get("mismatched_keys"):
            raise ValueError(
                f"{where} has tensors of other shapes than its config: {str(sorted(info['mismatched_keys']))[:120]}"
            )
        tied = model.all_tied_weights_keys or {}
        check_names(where, (k for k in info["missing_keys"] if k not in tied), info["unexpected_keys"])
        check_finite(where, model)
        model.base.requires_grad_(False)
        return (model, info) if wants_info else model

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """Check the headers of the weights before anything is allocated."""
        if checkpoint_files and all(str(file).endswith(".safetensors") for file in checkpoint_files):
            read_shapes(checkpoint_files)
            name = load_config.pretrained_model_name_or_path
            if name is not None and os.path.isdir(name):
                check_inside(Path(name), checkpoint_files)
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    @torch.no_grad()
    @initialization.guard_torch_init_functions()
    def initialize_weights(self) -> None:
        """Initialise what a checkpoint lacks: buffers of the base by its own rules, memories by theirs. Loaded weights stay."""
        self.base.initialize_weights()
        for module in reversed(list(self.memories.modules())):
            loaded = [getattr(x, "_is_hf_initialized", False) for x in (*module.parameters(), *module.buffers())]
            is_loaded = getattr(module, "_is_hf_initialized", False) or (loaded and all(loaded))
            if not is_loaded and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # ty: ignore[not-callable]
            module._is_hf_initialized = True  # ty: ignore[invalid-assignment]

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.base.get_output_embeddings()

    def get_decoder(self) -> nn.Module:
        return self.base.get_decoder()
