"""What the tests of the kernels for one token share."""

from __future__ import annotations

import torch

from mnemos.memory import MemoryState


def tensors(state: MemoryState) -> list[torch.Tensor]:
    matrices = *state.weights, *state.momentum, *state.anchor, *state.start
    return [*matrices, state.window_key, state.window_value, state.window_gate]


class Adapted(torch.nn.Module):
    """What adapters put in a linear map's place: it shows the map's weight, and adds something of its own."""

    def __init__(self, base: torch.nn.Linear):
        super().__init__()
        self.base, self.extra = base, torch.nn.Linear(base.in_features, base.out_features, bias=False).to(base.weight)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.extra(x)
