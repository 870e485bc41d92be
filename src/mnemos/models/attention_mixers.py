"""Blocks of attention without a `NeuralMemory`: qk, swa and attention.

Shapes: B batch, T time, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..nn import Attention, QKCache, QKProjection
from ..nn.block import MixerParts
from .cache_forms import CacheForm, Shapes, attention_form
from .gate import make_gate
from .mixer import Mixer, State, register_block

if TYPE_CHECKING:
    from .config import MnemosConfig


@register_block
class QKMixer(Mixer):
    """`qk`: as `mag`, with a Q-K projection instead of a memory: queries projected onto all keys so far."""

    name = "qk"
    description = "sliding-window attention and a Q-K projection side by side, joined by a gate"
    has_attention = True
    without_memory = "swa"

    def __init__(self, config: MnemosConfig):
        super().__init__(config)
        self.attention = Attention(window=config.attention_window, **config.attention_options)
        self.memory = QKProjection(
            config.hidden_size,
            config.num_attention_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            **(config.qk_projection or {}),
        )
        self.gate = make_gate(config)

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool):
        y, attention = self.attention(x, state and state["attention"], mask, persistent, use_cache)
        m, memory = self.memory(x, state and state["memory"], mask, use_cache)
        return self.gate(y, m, x), {"attention": attention, "memory": memory} if use_cache else None

    @classmethod
    def cache_forms(cls, config: MnemosConfig) -> dict[str, CacheForm]:
        H, D, window = config.num_attention_heads, config.attention_head_dim, (config.qk_projection or {}).get("window")

        def shapes(rows: int, _: int) -> Shapes:
            if window is None:
                return {"gram": (rows, H, D, D), "norm": (rows, H)}
            return {"key": (rows, window - 1, H, D), "gate": (rows, window - 1, H)}

        return {
            "attention": attention_form(config, config.attention_window),
            "memory": CacheForm(QKCache, shapes, counts_persistent=True),
        }


@register_block
class SWAMixer(Mixer):
    """`swa`: sliding-window attention."""

    name = "swa"
    description = "sliding-window attention"
    has_attention = True

    def __init__(self, config: MnemosConfig):
        super().__init__(config)
        self.attention = Attention(window=self.attention_span(config), **config.attention_options)

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool):
        y, attention = self.attention(x, state and state["attention"], mask, persistent, use_cache)
        return y, {"attention": attention} if use_cache else None

    def parts(self) -> MixerParts | None:
        return MixerParts(attention=self._modules["attention"]) if type(self) is SWAMixer else None

    @classmethod
    def cache_forms(cls, config: MnemosConfig) -> dict[str, CacheForm]:
        return {"attention": attention_form(config, cls.attention_span(config))}


@register_block
class FullAttentionMixer(SWAMixer):
    """`attention`: full causal attention, whose cache grows with every token."""

    name = "attention"
    description = "full causal attention"
    is_kv_cache = True

    @classmethod
    def attention_span(cls, config: MnemosConfig) -> int | None:
        return None
