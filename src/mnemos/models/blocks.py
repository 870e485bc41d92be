"""The blocks of the family: what mixes tokens, and the residual block around it.

A mixer takes x (B, T, D) with the state of the call before (None at a row's start) and gives what the block adds, and its state.
`mask` (B, T) marks each row's valid tokens, which lie in front; it is only needed where a state is kept. The first `persistent`
tokens of a row's first call are the model's persistent tokens. Shapes: B batch, T time, D hidden size, H heads.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..memory import MemoryState, NeuralMemory
from ..memory import read as read_memory
from ..memory.gating import logit
from ..memory.norm import RMSNorm, l2_normalize
from ..nn import Attention, SwiGLU
from .config import MnemosConfig

State = dict


class Gate(nn.Module):
    """Joins attention y and memory m (B, T, D): the gate modes of `MnemosConfig`; x is what both were made from."""

    def __init__(self, config: MnemosConfig):
        super().__init__()
        D, self.mode = config.hidden_size, config.gate_mode
        self.init, self.heads = config.gate_init, _gate_heads(config)
        self.norms = nn.ModuleList(RMSNorm(D, config.rms_norm_eps) for _ in range(2)) if self.mode == "product" else None
        self.linear = nn.Linear(D, self.heads) if self.mode in ("convex", "additive") else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.linear is not None:
            nn.init.zeros_(self.linear.weight)
            nn.init.constant_(self.linear.bias, logit(self.init))

    def forward(self, y: Tensor, m: Tensor, x: Tensor) -> Tensor:
        if self.norms is not None:
            return F.silu(self.norms[0](y) * self.norms[1](m))
        if self.linear is None:
            return y * m.sigmoid()
        g = self.linear(x).sigmoid().repeat_interleave(x.shape[-1] // self.heads, dim=-1)  # B T D
        return g * y + (1 - g) * m if self.mode == "convex" else y + g * m


def _gate_heads(config: MnemosConfig) -> int:
    """As many gates as attention heads, where they divide the width; else one per channel."""
    heads = config.num_attention_heads
    return heads if config.hidden_size % heads == 0 else config.hidden_size


def make_attention(config: MnemosConfig, window: int | None) -> Attention:
    return Attention(config.hidden_size, config.num_attention_heads, window, **_attention_choices(config))


def _attention_choices(config: MnemosConfig) -> dict:
    return {
        "head_dim": config.head_dim,
        "kv_heads": config.num_key_value_heads,
        "qk_norm": config.qk_norm,
        "rope_theta": config.rope_theta,
        "eps": config.rms_norm_eps,
    }


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
    """`qk`: sliding-window attention whose queries pass through a memory of keys."""

    def __init__(self, config: MnemosConfig):
        super().__init__()
        self.attention = QKAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.attention_window,
            **_attention_choices(config),
            **config.qk_projection,
        )

    def forward(self, x: Tensor, state: State | None, mask: Tensor | None, persistent: int, use_cache: bool):
        y, attention = self.attention(x, state and state["attention"], mask, persistent, use_cache)
        return y, {"attention": attention} if use_cache else None


class Block(GradientCheckpointingLayer):
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
        self, x: Tensor, state: State | None = None, mask: Tensor | None = None, persistent: int = 0, use_cache: bool = False
    ) -> tuple[Tensor, State | None]:
        y, state = self.mixer(self.mixer_norm(x), state, mask, persistent, use_cache)
        x = x + F.dropout(y, self.dropout, self.training)
        x = x + F.dropout(self.feedforward(self.feedforward_norm(x)), self.dropout, self.training)
        return x, state


MIXERS = {
    "lmm": MemoryMixer,
    "mag": GateMixer,
    "mal": LayerMixer,
    "swa": lambda config: AttentionMixer(config, config.attention_window),
    "attention": lambda config: AttentionMixer(config, None),
}
