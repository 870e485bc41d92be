"""The blocks of the family: what mixes tokens, and the residual block around it.

A mixer takes x (B, T, D) with the state of the call before (None at a row's start) and gives what the block adds, and its state.
`mask` (B, T) marks each row's valid tokens, which lie in front; it is only needed where a state is kept. The first `persistent`
tokens of a row's first call are the model's persistent tokens. Shapes: B batch, T time, D hidden size, H heads.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..dispatch import decode
from ..memory import NeuralMemory
from ..nn import Attention, QKProjection, SwiGLU
from ..nn.block import BlockParts, ResidualBlock
from ..nn.norm import RMSNorm
from .config import MnemosConfig
from .gate import Gate, State, attention_choices
from .mac import ContextMixer


def make_attention(config: MnemosConfig, window: int | None) -> Attention:
    return Attention(config.hidden_size, config.num_attention_heads, window, **attention_choices(config))


class MemoryMixer(nn.Module):
    """`lmm`: memory alone."""

    def __init__(self, config: MnemosConfig):
        super().__init__()
        self.memory = NeuralMemory(config.memory_config)

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool):
        y, memory = self.memory(x, state and state["memory"], mask)
        return y, {"memory": memory} if use_cache else None


class AttentionMixer(nn.Module):
    """`swa` and `attention`: no memory."""

    def __init__(self, config: MnemosConfig, window: int | None):
        super().__init__()
        self.attention = make_attention(config, window)

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool):
        y, attention = self.attention(x, state and state["attention"], mask, persistent, use_cache)
        return y, {"attention": attention} if use_cache else None


class GateMixer(nn.Module):
    """`mag`: sliding-window attention and memory read the same tokens side by side; a gate joins them."""

    def __init__(self, config: MnemosConfig):
        super().__init__()
        self.attention = make_attention(config, config.attention_window)
        self.memory = NeuralMemory(config.memory_config)
        self.gate = Gate(config)

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool):
        y, attention = self.attention(x, state and state["attention"], mask, persistent, use_cache)
        m, memory = self.memory(x, state and state["memory"], mask)
        return self.gate(y, m, x), {"attention": attention, "memory": memory} if use_cache else None


class LayerMixer(nn.Module):
    """`mal`: memory, then sliding-window attention over what it made of the tokens; both add to the stream."""

    def __init__(self, config: MnemosConfig):
        super().__init__()
        self.memory = NeuralMemory(config.memory_config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = make_attention(config, config.attention_window)

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool):
        m, memory = self.memory(x, state and state["memory"], mask)
        y, attention = self.attention(self.norm(x + m), state and state["attention"], mask, persistent, use_cache)
        return m + y, {"memory": memory, "attention": attention} if use_cache else None


class QKMixer(nn.Module):
    """`qk`: as `mag`, with a Q-K projection in the memory's place: queries seen through all keys so far."""

    def __init__(self, config: MnemosConfig):
        super().__init__()
        self.attention = make_attention(config, config.attention_window)
        self.memory = QKProjection(
            config.hidden_size,
            config.num_attention_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            **(config.qk_projection or {}),
        )
        self.gate = Gate(config)

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool):
        y, attention = self.attention(x, state and state["attention"], mask, persistent, use_cache)
        m, memory = self.memory(x, state and state["memory"], mask, use_cache)
        return self.gate(y, m, x), {"attention": attention, "memory": memory} if use_cache else None


BLOCK_PARTS = "mixer_norm", "mixer", "feedforward_norm", "feedforward"


class Block(GradientCheckpointingLayer, ResidualBlock):
    """x + mixer(norm(x)), then x + feedforward(norm(x))."""

    def __init__(self, config: MnemosConfig, kind: str):
        super().__init__()
        self.kind = kind
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = MIXERS[kind](config)
        self.feedforward_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feedforward = SwiGLU(config.hidden_size, config.feedforward_size)
        self.dropout = config.dropout

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        persistent: int = 0,
        use_cache: bool = False,
    ) -> tuple[Tensor, State | None]:
        if state is not None and x.shape[1] == 1 and mask is None and use_cache:
            done = decode(self, x, state)
            if done is not None:
                return done
        y, state = self.mixer(self.mixer_norm(x), state, mask, persistent, use_cache)
        x = x + self._drop(y)
        return x + self._drop(self.feedforward(self.feedforward_norm(x))), state

    def parts(self) -> BlockParts | None:
        own: dict[str, Any] = self._modules  # faster than attributes; this runs at every decoded token
        first, mixer, last, feed = map(own.__getitem__, BLOCK_PARTS)
        if self.training and self.dropout:
            return None
        if type(mixer) is MemoryMixer:
            return BlockParts(mixer.memory, None, None, None, first, last, feed)
        if type(mixer) is AttentionMixer:
            return BlockParts(None, mixer.attention, None, None, first, last, feed)
        if type(mixer) is GateMixer and type(mixer.gate) is Gate:
            return BlockParts(mixer.memory, mixer.attention, mixer.gate, None, first, last, feed)
        if type(mixer) is LayerMixer:
            return BlockParts(mixer.memory, mixer.attention, None, mixer.norm, first, last, feed)
        return None

    def _drop(self, y: Tensor) -> Tensor:
        return F.dropout(y, self.dropout) if self.training and self.dropout else y


MIXERS = {
    "lmm": MemoryMixer,
    "mag": GateMixer,
    "mal": LayerMixer,
    "mac": ContextMixer,
    "qk": QKMixer,
    "swa": lambda config: AttentionMixer(config, config.attention_window),
    "attention": lambda config: AttentionMixer(config, None),
}
