"""Blocks with a memory beside, before or without attention: lmm, mag and mal.

Shapes: B batch, T time, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..memory import NeuralMemory
from ..nn import Attention
from ..nn.block import MixerParts
from ..nn.norm import RMSNorm
from .cache_forms import CacheForm, attention_form, memory_form
from .gate import Gate, make_gate
from .mixer import Mixer, State, register_block

if TYPE_CHECKING:
    from .config import MnemosConfig


@register_block
class LMMMixer(Mixer):
    """`lmm`: a memory alone."""

    name = "lmm"
    description = "memory alone"
    has_memory = True
    without_memory = "swa"

    def __init__(self, config: MnemosConfig):
        super().__init__(config)
        self.memory = NeuralMemory(config.memory_config)

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool):
        y, memory = self.memory(x, state and state["memory"], mask)
        return y, {"memory": memory} if use_cache else None

    def parts(self) -> MixerParts | None:
        return MixerParts(memory=self._modules["memory"]) if type(self) is LMMMixer else None

    @classmethod
    def cache_forms(cls, config: MnemosConfig) -> dict[str, CacheForm]:
        return {"memory": memory_form()}


@register_block
class MAGMixer(Mixer):
    """`mag`, memory as gate: sliding-window attention and a memory read the same tokens, and a gate joins their outputs."""

    name = "mag"
    description = "sliding-window attention and memory side by side, joined by a gate"
    has_memory = True
    has_attention = True
    without_memory = "swa"

    def __init__(self, config: MnemosConfig):
        super().__init__(config)
        self.attention = Attention(window=config.attention_window, **config.attention_options)
        self.memory = NeuralMemory(config.memory_config)
        self.gate = make_gate(config)

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool):
        y, attention = self.attention(x, state and state["attention"], mask, persistent, use_cache)
        m, memory = self.memory(x, state and state["memory"], mask)
        return self.gate(y, m, x), {"attention": attention, "memory": memory} if use_cache else None

    def parts(self) -> MixerParts | None:
        own = self._modules  # faster than attributes; this runs at every decoded token
        gate = own["gate"]
        known = gate.gated_sum() if isinstance(gate, Gate) and type(self) is MAGMixer else None
        return None if known is None else MixerParts(own["memory"], own["attention"], known)

    @classmethod
    def cache_forms(cls, config: MnemosConfig) -> dict[str, CacheForm]:
        return {"attention": attention_form(config, config.attention_window), "memory": memory_form()}


@register_block
class MALMixer(Mixer):
    """`mal`, memory as layer: a memory, then sliding-window attention over its output; the block adds both."""

    name = "mal"
    description = "memory, then sliding-window attention"
    has_memory = True
    has_attention = True
    without_memory = "swa"

    def __init__(self, config: MnemosConfig):
        super().__init__(config)
        self.memory = NeuralMemory(config.memory_config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(window=config.attention_window, **config.attention_options)

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool):
        m, memory = self.memory(x, state and state["memory"], mask)
        y, attention = self.attention(self.norm(x + m), state and state["attention"], mask, persistent, use_cache)
        return m + y, {"memory": memory, "attention": attention} if use_cache else None

    def parts(self) -> MixerParts | None:
        own = self._modules
        is_known = type(self) is MALMixer
        return MixerParts(own["memory"], own["attention"], None, own["norm"]) if is_known else None

    @classmethod
    def cache_forms(cls, config: MnemosConfig) -> dict[str, CacheForm]:
        return {"memory": memory_form(), "attention": attention_form(config, config.attention_window)}
