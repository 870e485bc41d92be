"""The form of a residual block, as backends see it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class BlockParts(NamedTuple):
    """Parts of x + mixer(norm(x)), then x + feedforward(norm(x)).

    The mixer is a memory, attention, both joined by a gate, or memory and then attention of norm(x + memory) with the norm `between`.
    """

    memory: Any
    attention: Any
    gate: Any
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
