"""What the mixers share: the gate that joins attention and memory, and the choices of attention.

Shapes: B batch, T time, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..dispatch import operation
from ..memory.gating import logit
from ..nn.linear import Linear, linear
from ..nn.modules import is_unmodified
from ..nn.norm import RMSNorm
from .config import MnemosConfig

State = dict[str, Any]  # the states of one layer by name


class Gate(nn.Module):
    """Joins attention y and memory m (B, T, D): the gate modes of `MnemosConfig`; x is what both were made from.

    The initial value `gate_init` is a constant of the config; `offset` is learned, and 0 at first.
    """

    def __init__(self, config: MnemosConfig):
        super().__init__()
        D, self.mode = config.hidden_size, config.gate_mode
        self.start, self.heads = logit(config.gate_init), _gate_heads(config)
        self.norms = (
            nn.ModuleList(RMSNorm(D, config.rms_norm_eps) for _ in range(2)) if self.mode == "product" else None
        )
        scalar = self.mode in ("convex", "additive")
        self.linear = Linear(D, self.heads, bias=False) if scalar else None
        self.offset = nn.Parameter(torch.empty(self.heads)) if scalar else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.linear is not None and self.offset is not None:
            nn.init.zeros_(self.linear.weight)
            nn.init.zeros_(self.offset)

    def forward(self, y: Tensor, m: Tensor, x: Tensor) -> Tensor:
        if self.norms is not None:
            return F.silu(self.norms[0](y) * self.norms[1](m))
        if self.linear is None or self.offset is None:
            return y * m.sigmoid()
        additive = self.mode == "additive"
        if is_unmodified(self.linear) and self.linear.weight.shape == (self.heads, x.shape[-1]):
            return gated_sum(x, y, m, self.linear.weight, self.offset, self.start, additive)
        return _joined(self.opening(self.linear(x)), y, m, additive)

    def opening(self, mapped: Tensor) -> Tensor:
        """What `linear` made of x (B, T, D) -> the gate's numbers, (B, T, heads) in [0, 1]."""
        if self.offset is None or mapped.shape[-1] != self.heads:
            raise ValueError(f"the gate's linear map has {mapped.shape[-1]} outputs, but {self.heads} are expected")
        return _opening(mapped, self.offset, self.start)


@operation
def gated_sum(x: Tensor, y: Tensor, m: Tensor, weight: Tensor, offset: Tensor, start: float, additive: bool) -> Tensor:
    """g y + (1 - g) m, or y + g m if additive, with g = sigmoid(x weightᵀ + offset + start): x, y, m (B, T, D), weight (heads, D)."""
    return _joined(_opening(linear(x, weight), offset, start), y, m, additive)


def _opening(mapped: Tensor, offset: Tensor, start: float) -> Tensor:
    return (mapped + (offset + start).to(mapped.dtype)).sigmoid()


def _joined(g: Tensor, y: Tensor, m: Tensor, additive: bool) -> Tensor:
    """Gates g (B, T, heads), each for as many channels of y and m (B, T, D)."""
    g = g.repeat_interleave(y.shape[-1] // g.shape[-1], dim=-1)  # B T D
    return y + g * m if additive else g * y + (1 - g) * m


def _gate_heads(config: MnemosConfig) -> int:
    """As many gates as attention heads, where they divide the width; else one per channel."""
    heads = config.num_attention_heads
    return heads if config.hidden_size % heads == 0 else config.hidden_size


def attention_choices(config: MnemosConfig) -> dict:
    return {
        "head_dim": config.head_dim,
        "kv_heads": config.num_key_value_heads,
        "qk_norm": config.qk_norm,
        "rope_theta": config.rope_theta,
        "eps": config.rms_norm_eps,
    }
