"""The feed-forward layer of a block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..dispatch import is_unmodified, operation
from .linear import Linear, linear


@operation
def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`SwiGLU` as a function of its weights: x (..., dim), gate_up (2 hidden, dim), down (dim, hidden) -> (..., dim)."""
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, down)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases. x (..., dim) -> (..., dim).

    hidden: the inner width, by default int(8/3 dim), which has as many parameters as a plain layer of width 4 dim.
    `gate_up` holds both input maps, the rows of the gate first.

    >>> import torch
    >>> layer = SwiGLU(48)
    >>> layer(torch.randn(2, 5, 48)).shape, layer.hidden
    (torch.Size([2, 5, 48]), 128)
    """

    def __init__(self, dim: int, hidden: int | None = None):
        super().__init__()
        self.hidden = int(dim * 4 * 2 / 3) if hidden is None else hidden
        if dim < 1 or self.hidden < 1:
            raise ValueError(f"dim={dim} and hidden={self.hidden} must be >= 1")
        self.gate_up = Linear(dim, 2 * self.hidden, bias=False)
        self.down = Linear(self.hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if is_unmodified(self.gate_up, self.down):
            return swiglu(x, self.gate_up.weight, self.down.weight)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
