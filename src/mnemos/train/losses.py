"""The number of tokens that a batch predicts, and the loss that polarises gates.

Shapes: b batch rows, T time, H heads of a gate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.loss import IGNORED


def predicted_tokens(batch: dict[str, Tensor]) -> int:
    """The number of tokens in the model's loss: all labelled tokens except the first of each batch row and of each packed document.

    >>> ids = torch.zeros(1, 6, dtype=torch.long)
    >>> predicted_tokens({"labels": ids}), predicted_tokens({"labels": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])})
    (5, 4)
    """
    counted = batch["labels"][:, 1:] != IGNORED
    if "position_ids" in batch:
        counted = counted & (batch["position_ids"][:, 1:] != 0)
    return int(counted.sum())


def polarisation_loss(gates: list[Tensor]) -> Tensor:
    """mean(1 - |2g - 1|) over gates in [0, 1]: 1 if all are 0.5, 0 if all are 0 or 1, or if there is no gate.

    >>> polarisation_loss([torch.tensor([0.5, 1.0]), torch.tensor([0.0, 0.75])]).item()
    0.375
    """
    if not gates:  # no layer has a gate between attention and memory, or memory is off
        return torch.zeros(())
    return torch.cat([1 - (2 * g.flatten() - 1).abs() for g in gates]).mean()
