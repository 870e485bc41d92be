"""The blocks of the family: what mixes tokens, and the residual block around it.

A mixer takes x (B, T, D) with the state of the call before (None at a row's start) and gives what the block adds, and its state.
`mask` (B, T) marks each row's valid tokens, which lie in front; it is only needed where a state is kept. The first `persistent`
tokens of a row's first call are the model's persistent tokens. Shapes: B batch, T time, D hidden size, H heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..memory import NeuralMemory
from ..memory.mode import FEW, Shape, plain, token_kernels
from ..memory.norm import RMSNorm
from ..nn import Attention, QKProjection, SwiGLU
from .config import MnemosConfig
from .context import ContextMixer
from .gate import Gate, State, attention_choices


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
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        persistent: int = 0,
        use_cache: bool = False,
    ) -> tuple[Tensor, State | None]:
        if state is not None and x.shape[1] == 1 and mask is None and use_cache:
            done = self._token(x, state)
            if done is not None:
                return done
        y, state = self.mixer(self.mixer_norm(x), state, mask, persistent, use_cache)
        x = x + self._drop(y)
        return x + self._drop(self.feedforward(self.feedforward_norm(x))), state

    def _token(self, x: Tensor, state: State) -> tuple[Tensor, State] | None:
        """`forward` of one token, as one call of a kernel; None where there is none for this block or call. What is called and what
        it reads is looked up anew at every token: a block may be hooked, adapted or given other weights between two of them."""
        own: dict[str, Any] = self._modules
        first, mixer, last, feed = map(own.__getitem__, BLOCK_PARTS)
        parts = parts_of(mixer)
        if parts is None or x.numel() > FEW or (self.training and self.dropout):
            return None
        if not (type(feed) is SwiGLU and type(first) is type(last) is RMSNorm):
            return None
        memory, attention, gate, between = parts
        if memory is not None and not memory.has_token_kernel:
            return None
        up, down, joint = feed.gate_up, feed.down, None if gate is None else gate.linear
        if (joint is None) != (gate is None) or not plain(mixer, feed, first, last, *parts, up, down, joint):
            return None
        norms = first.weight, None if between is None else between.weight, last.weight
        join, maps = () if gate is None or joint is None else (joint.weight, gate.offset), (up.weight, down.weight)
        dim, hidden = x.shape[-1], feed.hidden
        shapes: list[Shape | None] = [None if norm is None else (dim,) for norm in norms]
        shapes += [] if gate is None else [(gate.heads, dim), (gate.heads,)]
        shapes += [(2 * hidden, dim), (dim, hidden)]
        kernels = token_kernels(x, parameters=(*norms, *join, *maps), shapes=shapes)
        if kernels is None:
            return None
        begin = {}
        for name, part in (("memory", memory), ("attention", attention)):
            if part is not None:
                function = part.begin_token(x, state[name])
                if function is None:
                    return None
                begin[name] = function
        calls, after = {}, {}
        for name, function in begin.items():
            calls[name], after[name] = function()
        eps = first.eps, 0.0 if between is None else between.eps, last.eps
        start, additive = (0.0, False) if gate is None else (gate.start, gate.mode == "additive")
        y = kernels.block(x, norms, eps, join, start, additive, maps, **calls)
        return None if y is None else (y, {name: after[name]() for name in state})

    def _drop(self, y: Tensor) -> Tensor:
        return F.dropout(y, self.dropout) if self.training and self.dropout else y


class Parts(NamedTuple):
    """What a mixer is made of; attention reads norm(x + memory) where there is a norm `between`."""

    memory: NeuralMemory | None = None
    attention: Attention | None = None
    gate: Gate | None = None
    between: RMSNorm | None = None


def parts_of(mixer: nn.Module) -> Parts | None:
    """The parts of a mixer that kernels know; None for another one, or where something else has taken the place of a part."""
    if type(mixer) is MemoryMixer:
        parts = Parts(mixer.memory)
    elif type(mixer) is AttentionMixer:
        parts = Parts(None, mixer.attention)
    elif type(mixer) is GateMixer:
        parts = Parts(mixer.memory, mixer.attention, mixer.gate)
    elif type(mixer) is LayerMixer:
        parts = Parts(mixer.memory, mixer.attention, None, mixer.norm)
    else:
        return None
    kinds = NeuralMemory, Attention, Gate, RMSNorm
    return parts if all(x is None or type(x) is kind for x, kind in zip(parts, kinds)) else None


MIXERS = {
    "lmm": MemoryMixer,
    "mag": GateMixer,
    "mal": LayerMixer,
    "mac": ContextMixer,
    "qk": QKMixer,
    "swa": lambda config: AttentionMixer(config, config.attention_window),
    "attention": lambda config: AttentionMixer(config, None),
}
