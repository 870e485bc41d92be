"""A short hash of a model's weights, by which results are matched with the model that they were measured on."""

from __future__ import annotations

import hashlib
from typing import Any


def fingerprint(model: Any) -> str:
    """A fingerprint of a model's weights: equal for equal weights, almost surely different for others.

    >>> import torch
    >>> fingerprint(torch.nn.Linear(2, 3)) == fingerprint(torch.nn.Linear(2, 3))
    False
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    parameters = model.named_parameters() if hasattr(model, "named_parameters") else ()
    for name, parameter in parameters:
        x = parameter.detach().float()
        digest.update(f"{name}{tuple(x.shape)}{x.sum().item()!r}{x.abs().sum().item()!r}".encode())
    return digest.hexdigest()[:16]
