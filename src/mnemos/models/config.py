"""`MnemosConfig`: all choices that define a model, as a transformers config."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from ..deprecation import current_names, old_names
from ..memory import NeuralMemoryConfig
from ..memory.config import is_number
from ..memory.retention import Zero
from ..memory.spec import MAX_DIM
from ..nn.qk_projection import check_choices
from .gate import GATES
from .keywords import refuse_unknown
from .mixer import BLOCKS
from .required import check_required, required_modules

LIMITS = {"vocab_size": 2**31 - 1, "num_hidden_layers": 2**12}  # of others: MAX_DIM; sizes may come from files
MAX_LABELS = 1024
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
QK_FIELDS = ("persistent", "window", "decay", "gate_hidden", "normalise", "chunk_size")
MEMORY_FIELDS = tuple(f.name for f in dataclasses.fields(NeuralMemoryConfig) if f.name != "dim")
MEMORY_KEYWORDS = tuple(f"memory_{name}" for name in MEMORY_FIELDS)
OLD_KEYWORDS = tuple(f"memory_{name}" for name in old_names(NeuralMemoryConfig))
TRANSFORMERS_KEYWORDS = (  # of transformers itself, now or in version 4, in calls and in config.json
    *(field.name for field in dataclasses.fields(PreTrainedConfig)),
    *getattr(GenerationConfig, "_get_default_generation_params", GenerationConfig().to_dict)(),
    *("model_type", "name_or_path", "_name_or_path", "_commit_hash", "torch_dtype", "num_labels", "output_attentions"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset"),
    *("experts_implementation", "_experts_implementation_internal", "auto_map", "custom_pipelines"),
    *("quantization_config", "transformers_weights", "tokenizer_class", "task_specific_params", "finetuning_task"),
    *("prefix", "torchscript", "use_bfloat16", "tf_legacy_loss", "pruned_heads", "tie_encoder_decoder", "is_decoder"),
    *("add_cross_attention", "cross_attention_hidden_size", "sep_token_id", "decoder_start_token_id"),
)


class MnemosConfig(PreTrainedConfig):
    """The config of a model. Every choice is a keyword; a part that is switched off has no parameters.

    vocab_size, hidden_size, num_hidden_layers, intermediate_size (of the SwiGLU; default 8/3 of hidden_size).
    layers: the block of each layer, one name or a list that repeats over the layers: lmm, mag, mal, mac, qk, swa, attention, or
    a block under `register_block`. memory_layers: the layers (from 0) that keep their memory; the others become `swa`. None: all; []: none.
    memory: choices of every `NeuralMemory`, by the names of `NeuralMemoryConfig`; each also as a keyword `memory_<name>`.
    num_attention_heads, num_key_value_heads, head_dim, qk_norm, rope_theta: of attention.
    attention_window: tokens in a sliding window, the current one included. segment_length: tokens of a MAC segment.
    attention_conv_width: width of the causal convolution over the queries, keys and values of every attention layer; 0 for none.
    num_persistent_tokens: learned tokens in front of every row. num_longterm_tokens: learned queries that read the memory for
    each MAC segment.
    gate_mode: how `mag`, `mac` and `qk` join attention y and memory m: "product" silu(norm(y) norm(m)), "sigmoid" y sigmoid(m),
    "convex" g y + (1-g) m, "additive" y + g m, with g per token and head, `gate_init` before training; or a gate under `register_gate`.
    qk_projection: choices of the `qk` block's `QKProjection`, by its keywords.
    dropout: of the terms that each block adds to the stream, in training.

    >>> config = MnemosConfig(hidden_size=64, layers=["lmm", "swa"], num_hidden_layers=4, memory_window=4)
    >>> config.blocks, config.memory_config.window
    (['lmm', 'swa', 'lmm', 'swa'], 4)
    """

    model_type = "mnemos"
    keys_to_ignore_at_inference = ["past_key_values", "memory_states", "surprises"]  # noqa: RUF012

    vocab_size: int = 256
    hidden_size: int = 128
    num_hidden_layers: int = 4
    intermediate_size: int | None = None
    layers: str | list[str] | tuple[str, ...] = "mag"
    memory_layers: list[int] | tuple[int, ...] | None = None
    memory: dict[str, Any] | None = None
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    qk_norm: bool = True
    rope_theta: float = 10000.0
    attention_window: int = 64
    attention_conv_width: int = 0
    segment_length: int = 64
    num_persistent_tokens: int = 0
    num_longterm_tokens: int = 0
    gate_mode: str = "convex"
    gate_init: float = 0.5
    qk_projection: dict[str, Any] | None = None
    dropout: float = 0.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        for name in ("memory", "qk_projection"):
            if not isinstance(getattr(self, name), dict | None):
                raise ValueError(f"{name}={getattr(self, name)!r:.60} must be a dict of choices, or None")
        keywords = {
            name.removeprefix("memory_"): kwargs.pop(name) for name in list(kwargs) if name.startswith("memory_")
        }
        renamed = old_names(NeuralMemoryConfig)
        memory = current_names("MnemosConfig.memory", self.memory or {}, renamed)
        memory |= current_names("MnemosConfig", keywords, renamed, "memory_")
        refuse_unknown(
            "MnemosConfig",
            (key for key in kwargs if key not in TRANSFORMERS_KEYWORDS),
            (*FIELDS, *MEMORY_KEYWORDS, "requires_modules"),
        )
        self.memory = memory
        check_required(kwargs.pop("requires_modules", []), memory, self.layers, self.gate_mode)
        self.qk_projection = dict(self.qk_projection or {})
        if isinstance(self.layers, tuple):
            self.layers = list(self.layers)
        if isinstance(self.memory_layers, tuple | range):
            self.memory_layers = list(self.memory_layers)
        _check_foreign({**vars(self), **kwargs})
        for dtype in (self.dtype, kwargs.get("torch_dtype")):
            named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
            if dtype is not None and named not in DTYPES:
                raise ValueError(f"dtype={dtype!r:.60} is unknown; choose float32, bfloat16, float16 or float64")
        super().__post_init__(**kwargs)
        self.validate_choices()
        if self.has_memory:  # files keep the choice: its default may change
            memory["retention"] = self.memory_config.retention

    def validate_choices(self) -> None:
        """Raise a ValueError, which lists the valid choices, for a config of which no model can be built. Runs again when a model is made."""
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "attention_window",
            "segment_length",
        ):
            _whole(name, getattr(self, name), 1, LIMITS.get(name, MAX_DIM))
        for name in ("intermediate_size", "num_key_value_heads", "head_dim"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1, MAX_DIM)
        for name in ("attention_conv_width", "num_persistent_tokens", "num_longterm_tokens"):
            _whole(name, getattr(self, name), 0, MAX_DIM)
        self._check_types()
        pattern = self.layers if isinstance(self.layers, list | tuple) else [self.layers]
        unknown = [name for name in pattern if not isinstance(name, str) or name not in BLOCKS]
        if unknown or not pattern:
            raise ValueError(
                f"layers={self.layers!r:.60} is unknown; choose one of {', '.join(BLOCKS)}, or a list of them"
            )
        if isinstance(self.layers, list) and len(pattern) > self.num_hidden_layers:
            raise ValueError(
                f"layers names {len(pattern)} blocks, but the model has num_hidden_layers={self.num_hidden_layers}"
            )
        kept = self.memory_layers
        if not isinstance(kept, list | tuple | None):
            raise ValueError(f"memory_layers={kept!r:.60} must be a list of layers, or None for all")
        if any(type(i) is not int or not 0 <= i < self.num_hidden_layers for i in kept or ()):
            raise ValueError(f"memory_layers={kept!r:.60} must lie in 0..{self.num_hidden_layers - 1}")
        if not isinstance(self.gate_mode, str) or self.gate_mode not in GATES:
            raise ValueError(f"gate_mode={self.gate_mode!r:.60} is unknown; choose one of {', '.join(GATES)}")
        if not (is_number(self.gate_init) and 0 < self.gate_init < 1):
            raise ValueError(f"gate_init={self.gate_init!r:.60} must lie between 0 and 1, ends excluded")
        if not (is_number(self.dropout) and 0 <= self.dropout < 1):
            raise ValueError(f"dropout={self.dropout!r:.60} must be >= 0 and < 1")
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            if not (is_number(getattr(self, name)) and 0 < getattr(self, name) < float("inf")):
                raise ValueError(f"{name}={getattr(self, name)!r:.60} must be a number > 0")
        unknown = sorted(set(self.memory or {}) - set(MEMORY_FIELDS))
        if unknown:
            names = [f"memory_{name}" for name in unknown]
            close = [
                near for name in names for near in difflib.get_close_matches(name, (*FIELDS, *MEMORY_KEYWORDS), n=1)
            ]
            hint = f". Did you mean {', '.join(close)}?" if close else ""
            raise ValueError(f"memory has no choice {', '.join(unknown)}; there are {', '.join(MEMORY_FIELDS)}{hint}")
        unknown = sorted(set(self.qk_projection or {}) - set(QK_FIELDS))
        if unknown:
            raise ValueError(f"qk_projection has no choice {', '.join(unknown)}; there are {', '.join(QK_FIELDS)}")
        check_choices(**(self.qk_projection or {}))
        self._check_blocks()

    def _check_types(self) -> None:
        for name in ("qk_norm", "tie_word_embeddings", "use_cache"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name}={getattr(self, name)!r:.60} must be True or False")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            for each in value if name == "eos_token_id" and isinstance(value, list | tuple) else [value]:
                if each is not None and type(each) is not int:
                    raise ValueError(f"{name}={value!r:.60} must be a token id, or None")

    def _check_blocks(self) -> None:
        blocks = [BLOCKS[name] for name in self.blocks]
        if any(block.has_attention for block in blocks):
            self._check_attention()
        memory = self.memory_config if self.has_memory else None
        for block in blocks:
            if block.has_memory and not block.supports_kv_memory and memory is not None and memory.spec.is_kv_cache:
                others = [name for name, other in BLOCKS.items() if other.has_memory and other.supports_kv_memory]
                raise ValueError(
                    f"layers={block.name!r} keeps a copy of its memory's weights, and features={memory.features!r} has none; "
                    f"use one of {', '.join(others)}"
                )

    def _check_attention(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must divide hidden_size={self.hidden_size} (or give head_dim)"
            )
        if self.attention_head_dim % 2:
            raise ValueError(f"head_dim={self.attention_head_dim} must be even, for rotary embeddings")
        if self.num_attention_heads % (self.num_key_value_heads or self.num_attention_heads):
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads={self.num_attention_heads}"
            )

    @property
    def blocks(self) -> list[str]:
        """The block of every layer, after `memory_layers`."""
        pattern = [self.layers] if isinstance(self.layers, str) else self.layers
        names = [pattern[i % len(pattern)] for i in range(self.num_hidden_layers)]
        if self.memory_layers is None:
            return names
        kept = set(self.memory_layers)
        return [name if i in kept else BLOCKS[name].without_memory or name for i, name in enumerate(names)]

    @property
    def has_memory(self) -> bool:
        """Whether any layer has a `NeuralMemory`."""
        return any(BLOCKS[name].has_memory for name in self.blocks)

    @property
    def is_hybrid(self) -> bool:
        """Whether any layer has attention and also a memory or a Q-K projection."""
        blocks = [BLOCKS[name] for name in self.blocks]
        return any(block.has_attention and block.without_memory is not None for block in blocks)

    @property
    def attention_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def key_value_shape(self) -> tuple[int, int]:
        """Heads and head dim of the keys and values of attention."""
        return self.num_key_value_heads or self.num_attention_heads, self.attention_head_dim

    @property
    def attention_options(self) -> dict[str, Any]:
        """Keywords of every attention layer; its window, or the length of its segments, depends on the block."""
        return {
            "dim": self.hidden_size,
            "heads": self.num_attention_heads,
            "head_dim": self.head_dim,
            "kv_heads": self.num_key_value_heads,
            "qk_norm": self.qk_norm,
            "rope_theta": self.rope_theta,
            "eps": self.rms_norm_eps,
            "conv_width": self.attention_conv_width,
        }

    @property
    def feedforward_size(self) -> int:
        """`intermediate_size`, or 8/3 of `hidden_size`: three maps then have as many parameters as two of width 4."""
        return self.intermediate_size or int(self.hidden_size * 8 / 3)

    @property
    def memory_config(self) -> NeuralMemoryConfig:
        """The config of every `NeuralMemory` of the model."""
        return NeuralMemoryConfig(self.hidden_size, **(self.memory or {}))

    def change_memory(self, changed: dict[str, Any]) -> None:
        """Set fields of `memory_config`."""
        self.memory = dict(self.memory or {}) | changed

    @property
    def longest_attention(self) -> int:
        """The largest attention window of any layer in tokens; 0 if no layer has one."""
        return max(BLOCKS[kind].attention_span(self) or 0 for kind in set(self.blocks))

    def __setattr__(self, key: str, value: Any) -> None:
        if key in MEMORY_KEYWORDS:
            choice = key.removeprefix("memory_")
            raise ValueError(f"{key} is a keyword of MnemosConfig; later, set config.memory[{choice!r}]")
        super().__setattr__(key, value)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """transformers' `from_dict`, where keywords override the dict; `memory_<name>` is one of them."""
        choices = {name: kwargs.pop(name) for name in list(kwargs) if name in (*MEMORY_KEYWORDS, *OLD_KEYWORDS)}
        made = super().from_dict(config_dict | choices, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        if config.has_memory and not {"retention", "memory_retention"} & {*(config_dict.get("memory") or {}), *choices}:
            config.memory = {**(config.memory or {}), "retention": Zero.name}  # a file from before the choice existed
        return made

    def to_dict(self) -> dict[str, Any]:
        """All fields, and transformers' own. Attributes that other tools set are left out: a file with them could not be opened.

        `use_cache` is always True: transformers' Trainer sets it to False before it saves, but it is a choice of a call.
        requires_modules: the modules that register blocks, gates and parts of the memory, if any is not of the package.
        """
        known = {*FIELDS, *TRANSFORMERS_KEYWORDS}
        found = {name: value for name, value in super().to_dict().items() if name in known} | {"use_cache": True}
        modules = required_modules(self.memory, self.layers, self.gate_mode)
        return found | ({"requires_modules": modules} if modules else {})


FIELDS = tuple(MnemosConfig.__annotations__)


def _check_foreign(given: dict[str, Any]) -> None:
    """Check types and sizes of transformers' own fields, which transformers does not check: num_labels of a file allocates labels."""
    labels = given.get("num_labels")
    if labels is not None and (type(labels) is not int or not 0 <= labels <= MAX_LABELS):
        raise ValueError(f"num_labels={labels!r:.60} must be a whole number <= {MAX_LABELS}")
    for name in ("id2label", "label2id", "quantization_config", "auto_map"):
        value = given.get(name)
        is_fine = isinstance(value, dict) and len(value) <= MAX_LABELS
        if value is not None and not is_fine and not hasattr(value, "to_dict"):  # of a quantisation config
            raise ValueError(f"{name}={value!r:.60} must be a dict of at most {MAX_LABELS} entries, or None")
    architectures = given.get("architectures")
    if not (
        architectures is None or (isinstance(architectures, list) and all(isinstance(x, str) for x in architectures))
    ):
        raise ValueError(f"architectures={architectures!r:.60} must be a list of names, or None")


def _whole(name: str, value, least: int, most: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r:.60} must be a whole number >= {least}")
    if value > most:
        raise ValueError(f"{name}={value!r:.60} must be at most {most}")
