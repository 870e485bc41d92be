"""`AttachedModelConfig`: the config of a pretrained model and of the memories attached to it, as one transformers config."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ..memory import NeuralMemoryConfig
from .architectures import attention_name
from .config import AttachConfig


class AttachedModelConfig(PreTrainedConfig):
    """The config of a pretrained model with memories. Fields of the base, such as `vocab_size`, are attributes of this config too.

    base_config: the config of the base model, or its dict. attach: the fields of the `AttachConfig`.

    >>> from transformers import LlamaConfig
    >>> config = AttachedModelConfig(base_config=LlamaConfig(hidden_size=64), attach={"layers": "every:5"})
    >>> config.hidden_size, config.attach_config.window
    (64, None)
    """

    model_type = "mnemos_attached"
    sub_configs = {"base_config": AutoConfig}  # noqa: RUF012
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    base_config: dict[str, Any] | PreTrainedConfig | None = None
    attach: dict[str, Any] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        base = self.base_config
        if isinstance(base, dict):
            kind = base.get("model_type")
            if not isinstance(kind, str) or kind == self.model_type:
                raise ValueError(
                    f"base_config has model_type={kind!r:.60}, but the type of a pretrained model is expected"
                )
            if "auto_map" in base:
                raise ValueError(
                    "base_config has auto_map, which names code to run: only models of transformers itself open"
                )
            self.base_config = AutoConfig.for_model(**base)
        elif base is not None and not isinstance(base, PreTrainedConfig):
            raise ValueError(f"base_config={base!r:.60} must be the config of a pretrained model")
        elif base is not None:  # transformers sets both on the base too
            kwargs.setdefault("attn_implementation", base._attn_implementation)
            kwargs.setdefault("experts_implementation", getattr(base, "_experts_implementation", None))
        super().__post_init__(**kwargs)
        base, chosen = self.base_config, self.attach_config
        if isinstance(base, PreTrainedConfig):
            attention_name(base, chosen.target)
            chosen.memory_config(base.hidden_size)
            chosen.layer_indices(base.num_hidden_layers)
            self.tie_word_embeddings = bool(base.tie_word_embeddings)

    @property
    def attach_config(self) -> AttachConfig:
        return AttachConfig.from_dict(self.attach or {})

    @property
    def has_memory(self) -> bool:
        """True, as for every config of a model with memories."""
        return True

    @property
    def is_hybrid(self) -> bool:
        """True: attention stays when memories are off."""
        return True

    @property
    def num_persistent_tokens(self) -> int:
        """0: an attached memory has none."""
        return 0

    @property
    def gate_mode(self) -> str:
        """`additive`: the output of a memory, times its gate, is added to that of attention."""
        return "additive"

    @property
    def blocks(self) -> list[str]:
        """The kind of each layer: `attention`, or `attached` for attention with a memory beside it."""
        depth = self.num_hidden_layers
        chosen = self.attach_config.layer_indices(depth)
        return ["attached" if i in chosen else "attention" for i in range(depth)]

    @property
    def memory_config(self) -> NeuralMemoryConfig:
        """The config of every memory."""
        return self.attach_config.memory_config(self.hidden_size)

    def change_memory(self, changed: dict[str, Any]) -> None:
        """Set fields of `memory_config`."""
        fields = self.attach_config.to_dict()
        memory = {"preset": fields["memory"]} if isinstance(fields["memory"], str) else fields["memory"]
        self.attach = fields | {"memory": memory | changed}

    @property
    def longest_attention(self) -> int:
        """The window of attention in tokens; 0 without one."""
        return self.attach_config.window or 0

    @property
    def max_position_embeddings(self) -> int | None:
        """The longest text of the base; None with a window, which limits no text."""
        return (
            None
            if self.attach_config.window is not None
            else getattr(self.base_config, "max_position_embeddings", None)
        )

    def get_text_config(self, decoder=None, encoder=None) -> PreTrainedConfig:
        base = self.base_config
        return base.get_text_config(decoder, encoder) if isinstance(base, PreTrainedConfig) else self

    def __getattr__(self, name: str) -> Any:
        """Fields of the base config, for tools that read `vocab_size` or `num_hidden_layers`."""
        base = self.__dict__.get("base_config")
        if name.startswith("_") or not isinstance(base, PreTrainedConfig):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(base, name)
