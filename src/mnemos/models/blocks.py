"""The residual block around a mixer: norm, mixer, norm, feed-forward.

Shapes: B batch, T time, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from ..dispatch import decode
from ..nn import SwiGLU
from ..nn.block import BlockParts, ResidualBlock
from ..nn.norm import RMSNorm
from .config import MnemosConfig
from .mixer import BLOCKS, Mixer, State

# Importing them registers the blocks, in the order in which errors list them.
from . import memory_mixers, mac, attention_mixers  # noqa: F401 # isort: skip

BLOCK_PARTS = "mixer_norm", "mixer", "feedforward_norm", "feedforward"


class Block(GradientCheckpointingLayer, ResidualBlock):
    """x + mixer(norm(x)), then x + feedforward(norm(x)). kind: the name of a registered block, which makes the mixer.

    >>> import torch
    >>> block = Block(MnemosConfig(hidden_size=32), "swa")
    >>> y, state = block(torch.randn(2, 5, 32), use_cache=True)
    >>> y.shape, list(state)
    (torch.Size([2, 5, 32]), ['attention'])
    """

    def __init__(self, config: MnemosConfig, kind: str):
        super().__init__()
        self.kind = kind
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = BLOCKS[kind](config)
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
        """x (B, T, D) after the tokens of `state` -> (B, T, D) and the new state. The arguments are those of `Mixer.forward`."""
        if state is not None and mask is None and use_cache:
            done = decode(self, x, state)
            if done is not None:
                return done
        y, state = self.mixer(self.mixer_norm(x), state, mask, persistent, use_cache)
        if use_cache and state is None:
            raise ValueError(f"block {self.kind!r} returned no state with use_cache=True, but a dict is expected")
        x = x + self._drop(y)
        return x + self._drop(self.feedforward(self.feedforward_norm(x))), state

    def parts(self) -> BlockParts | None:
        own: dict[str, Any] = self._modules  # faster than attributes; this runs at every decoded token
        first, mixer, last, feed = map(own.__getitem__, BLOCK_PARTS)
        if (self.training and self.dropout) or not isinstance(mixer, Mixer):
            return None
        parts = mixer.parts()
        return None if parts is None else BlockParts(*parts, first, last, feed)

    def _drop(self, y: Tensor) -> Tensor:
        return F.dropout(y, self.dropout) if self.training and self.dropout else y
