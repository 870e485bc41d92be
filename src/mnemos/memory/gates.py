"""`Gates`: the numbers that steer a memory, per token and head."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TIMED = ("lr", "momentum", "retain", "gate", "lag", "threshold")  # gates with a time axis


@dataclass
class Gates:
    """Per-token, per-head numbers that steer the memory; None means momentum 0, retain 1, gate 1.

    lr, momentum, retain, gate: (B, T, H). decay: (H,), weight decay^j of the token j steps back in the window.
    lag: (B, T, H, window), lag[..., j] weights token t-j. All lie in [0, 1], but lr and threshold, which are any numbers >= 0.
    threshold: (B, T, H), the parameter of inner losses that take one per token (Huber); None is the loss's own.
    """

    lr: Tensor
    momentum: Tensor | None = None
    retain: Tensor | None = None
    gate: Tensor | None = None
    decay: Tensor | None = None
    lag: Tensor | None = None
    threshold: Tensor | None = None

    def map(self, function) -> Gates:
        """Apply `function` to every gate that has a time axis; `decay` has none and stays."""
        timed = {name: getattr(self, name) for name in TIMED}
        mapped: dict[str, Any] = {name: None if x is None else function(x) for name, x in timed.items()}
        return Gates(**mapped, decay=self.decay)

    def masked(self, write_mask: Tensor, window: int) -> Gates:
        """Gates under which tokens where write_mask (B, T) is False write nothing: the gradient at their position is 0 for the whole
        window, and theirs has weight 0 in the windows of later tokens. momentum, retain and lr are the same.

        >>> Gates(lr=torch.ones(1, 3, 1)).masked(torch.tensor([[True, False, True]]), window=1).gate.flatten()
        tensor([1., 0., 1.])
        """
        writes = write_mask.to(self.lr.dtype).unsqueeze(-1).expand_as(self.lr)  # B T H
        gate, lag = writes if self.gate is None else self.gate * writes, self.lag
        if window > 1:
            lag = writes.unsqueeze(-1).expand(*writes.shape, window) if lag is None else lag * writes.unsqueeze(-1)
        return dataclasses.replace(self, gate=gate, lag=lag)

    def lag_weights(self, window: int, dtype: torch.dtype) -> Tensor | None:
        """decay^j * lag_j, the weight of the token j steps back: (B, T, H, window), or None if all are 1."""
        lag = None if self.lag is None else self.lag.to(dtype)
        if self.decay is None or window == 1:
            return lag
        powers = torch.arange(window, device=self.decay.device)
        decay = self.decay.to(dtype).unsqueeze(-1) ** powers  # H c
        return decay.expand(*self.lr.shape, window) if lag is None else lag * decay
