"""Opening and initialising of models: the base class of both, on top of transformers' own."""

from __future__ import annotations

import os
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, initialization

from ..memory.files import one_line
from .config import MnemosConfig
from .folder import (
    check_depth,
    check_files,
    check_finite,
    check_inside,
    check_names,
    check_shapes,
    dtype_name,
    expected_shapes,
    own_names,
    read_shapes,
)

ALLOW_MISSING: ContextVar[bool] = ContextVar("ALLOW_MISSING", default=False)  # for the model that is being opened


class MnemosPreTrainedModel(PreTrainedModel):
    """Base of both models: checked opening, initialisation, and the flags that transformers reads."""

    config_class = MnemosConfig
    config: MnemosConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path=None, *args, allow_missing: bool = False, **kwargs):
        """transformers' `from_pretrained`. Raises a ValueError if weights are incomplete, not finite, or do not fit their config.

        allow_missing: initialise tensors that the weights lack as in a new model, and ignore those that the model lacks.
        A device_map may place layers on any devices, but not offload them: layers read the weights of their parts themselves, and
        accelerate loads offloaded weights only when a part is called.
        """
        name = pretrained_model_name_or_path
        lenient = allow_missing or kwargs.get("key_mapping") is not None
        if name is not None and os.path.isdir(name) and kwargs.get("gguf_file") is None:
            folder = Path(name) / kwargs.get("subfolder", "")
            check_files(folder)
            if not lenient and not kwargs.keys() & {"state_dict", "variant", "ignore_mismatched_sizes"}:
                config = kwargs.get("config")
                check_depth(folder, getattr(config, "num_hidden_layers", kwargs.get("num_hidden_layers")))
        if name is not None:
            kwargs.setdefault("use_safetensors", True)
        wants_info = kwargs.pop("output_loading_info", False)
        token = ALLOW_MISSING.set(lenient)
        try:
            found: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
            model, info = found
        except (SafetensorError, RecursionError, AttributeError, LookupError, TypeError) as broken:  # of crafted files
            raise ValueError(f"{name} cannot be opened: {one_line(broken)}") from broken
        finally:
            ALLOW_MISSING.reset(token)
        places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ValueError(
                f"device_map places weights on {', '.join(sorted(places))}, which offloads some of them; "
                "use device_map='cpu', or devices that hold all of them"
            )
        where = "state_dict" if name is None else str(name)
        if not lenient:
            check_names(where, *(own_names(model, dict.fromkeys(info[k])) for k in ("missing_keys", "unexpected_keys")))
        check_finite(where, model)
        return (model, info) if wants_info else model

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """Compare the headers of the weights with the model while it is on the meta device, before anything is allocated."""
        found = None
        if state_dict is not None:
            found = {name: (tuple(x.shape), dtype_name(x.dtype)) for name, x in state_dict.items()}
        elif checkpoint_files and all(str(file).endswith(".safetensors") for file in checkpoint_files):
            found = read_shapes(checkpoint_files)
            name = load_config.pretrained_model_name_or_path
            if name is not None and os.path.isdir(name):
                check_inside(Path(name), checkpoint_files)
        if found is not None and not load_config.is_quantized and not load_config.ignore_mismatched_sizes:
            where = str(load_config.pretrained_model_name_or_path or "state_dict")
            check_shapes(where, expected_shapes(model), own_names(model, found), ALLOW_MISSING.get())
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    @torch.no_grad()
    @initialization.guard_torch_init_functions()
    def initialize_weights(self) -> None:
        """Initialise children before their parents, so that a module can override the initialisation of its linear maps.

        transformers' own loop skips modules without parameters of their own, such as the gates of a memory.
        """
        for module in reversed(list(self.modules())):
            loaded = [getattr(x, "_is_hf_initialized", False) for x in (*module.parameters(), *module.buffers())]
            if not getattr(module, "_is_hf_initialized", False) and not (loaded and all(loaded)):
                self._init_weights(module)
            module._is_hf_initialized = True  # ty: ignore[invalid-assignment]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # ty: ignore[not-callable]
