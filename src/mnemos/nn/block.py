"""The form of a residual block that backends can compute as a whole."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class GatedSum(NamedTuple):
    """A gate of attention y and memory m: g y + (1 - g) m, or y + g m if additive, with g = sigmoid(linear(x) + offset + logit).

    module: the gate itself. linear: its map (heads, D). offset: (heads,). Each head gates D / heads channels.
    """

    module: nn.Module
    linear: Any
    offset: Tensor
    logit: float
    additive: bool
    heads: int


class MixerParts(NamedTuple):
    """Parts of a mixer that is a memory, attention, both joined by a gate, or a memory m and then attention of between(x + m)."""

    memory: Any = None
    attention: Any = None
    gate: GatedSum | None = None
    between: Any = None


class BlockParts(NamedTuple):
    """Parts of x + mixer(mixer_norm(x)), then x + feedforward(feedforward_norm(x)); the first four are those of the mixer."""

    memory: Any
    attention: Any
    gate: GatedSum | None
    between: Any
    mixer_norm: Any
    feedforward_norm: Any
    feedforward: Any


class ResidualBlock(nn.Module):
    """Base of blocks that a backend may compute as a whole when it decodes."""

    mixer: nn.Module

    def parts(self) -> BlockParts | None:
        """The parts, or None for a block of another form."""
        return None
