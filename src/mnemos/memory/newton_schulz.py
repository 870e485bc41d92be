"""Newton–Schulz orthogonalisation of stacked matrices, the step of rule "muon"."""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = 1e-7  # Frobenius norm below which there is no step and no gradient


def newton_schulz(S: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """Push the singular values of each (..., d_in, d_out) matrix towards 1, keeping its singular vectors.

    >>> step = newton_schulz(torch.randn(3, 8, 16), 5, (3.4445, -4.7750, 2.0315))
    >>> bool((torch.linalg.svdvals(step) < 1.2).all())
    True
    """
    a, b, c = coefficients
    norm = torch.linalg.vector_norm(S, dim=(-2, -1), keepdim=True)
    alive = norm >= FLOOR
    safe = torch.where(alive, S, torch.ones((), dtype=S.dtype, device=S.device))
    X = safe / torch.linalg.vector_norm(safe, dim=(-2, -1), keepdim=True)
    tall = S.shape[-2] > S.shape[-1]
    X = X.mT if tall else X
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    X = X.mT if tall else X
    return torch.where(alive, X, torch.zeros((), dtype=S.dtype, device=S.device))
