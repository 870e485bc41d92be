"""`AttachedModelConfig`: the config of a pretrained model and of the memories attached to it, as one transformers config."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

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
