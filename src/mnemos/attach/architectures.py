"""Where the decoder layers and the attention modules of a pretrained model are.

A model fits if its attention modules call transformers' attention interface and receive the keywords of the model's call, as those
of transformers 5 do.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .config import AttachConfig

ATTENTION = {  # model_type -> name of the attention module in each decoder layer
    "llama": "self_attn",
    "mistral": "self_attn",
    "qwen2": "self_attn",
    "qwen3": "self_attn",
    "gemma": "self_attn",
    "gemma2": "self_attn",
    "gemma3_text": "self_attn",
    "phi3": "self_attn",
    "olmo2": "self_attn",
    "smollm3": "self_attn",
    "gpt_neox": "attention",
}


def attention_name(config: PreTrainedConfig, target: str | None) -> str:
    """The name of the attention module in the layers of a model; raises a ValueError for an unknown architecture without `target`.

    >>> from transformers import LlamaConfig
    >>> attention_name(LlamaConfig(), None)
    'self_attn'
    """
    if target is not None:
        return target
    if config.model_type not in ATTENTION:
        raise ValueError(
            f"the base model is of type {config.model_type!r:.60}, but attach knows {', '.join(ATTENTION)}; "
            "name the attention module of its layers, as in target='self_attn'"
        )
    return ATTENTION[config.model_type]


def attention_modules(base: PreTrainedModel, target: str | None) -> list[nn.Module]:
    """The attention module of every decoder layer of `base`, in order."""
    name = attention_name(base.config, target)
    return [getattr(layer, name) for layer in decoder_layers(base, target)]


def decoder_layers(base: PreTrainedModel, target: str | None) -> list[nn.Module]:
    """The decoder layers of `base`, in order."""
    name = attention_name(base.config, target)
    depth = getattr(base.config, "num_hidden_layers", None)
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth and all(hasattr(m, name) for m in module):
            return list(module)
    raise ValueError(
        f"{type(base).__name__} has no list of {depth} layers that each have a module {name!r}: set target to the name of theirs"
    )


def key_value_shape(config: PreTrainedConfig) -> tuple[int, int]:
    """Heads and head dim of the keys and values in the cache of a model.

    >>> from transformers import LlamaConfig
    >>> key_value_shape(LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2))
    (2, 16)
    """
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, dim


def sliding_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window that the base model itself gives to the attention of each layer; None for full attention."""
    window: Any = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": window}
    for kind in types:
        if kind not in known:
            raise ValueError(f"the base model has layers of type {kind!r:.40}, but window needs {', '.join(known)}")
    return [known[kind] for kind in types]


def check_base(base: Any, config: AttachConfig) -> None:
    """Raise a ValueError for anything that is not a causal language model of transformers with known attention."""
    if not isinstance(base, PreTrainedModel) or not base.can_generate():
        raise ValueError(f"model is a {type(base).__name__}, but a causal language model of transformers is expected")
    attention_modules(base, config.target)
    if config.window is not None:
        sliding_windows(base.config)
