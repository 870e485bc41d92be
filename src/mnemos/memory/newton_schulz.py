"""Newton–Schulz orthogonalisation of stacked matrices, the step of rule "muon", with a backward that recomputes.

Forward keeps only the small Gram matrices X Xᵀ of each iteration; backward rebuilds the iterates from them.
G matrices of d x e with d <= e (tall ones are transposed first).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .workspace import without_autocast

FLOOR = 1e-7  # Frobenius norm below which there is no step and no gradient

Polynomial = tuple[float, float, float]


def newton_schulz(S: Tensor, steps: int, coefficients: Polynomial) -> Tensor:
    """Push the singular values of each (..., d_in, d_out) matrix towards 1, keeping its singular vectors.

    >>> _ = torch.manual_seed(0)
    >>> step = newton_schulz(torch.randn(3, 8, 16), 5, (3.4445, -4.7750, 2.0315))
    >>> bool((torch.linalg.svdvals(step) < 1.21).all())
    True
    """
    wide = S.shape[-2] <= S.shape[-1]
    flat = (S if wide else S.mT).reshape(-1, min(S.shape[-2:]), max(S.shape[-2:]))
    out = _NewtonSchulz.apply(flat, steps, coefficients)
    out = out.reshape(*S.shape[:-2], *out.shape[-2:])
    return out if wide else out.mT


class _NewtonSchulz(torch.autograd.Function):
    @staticmethod
    def forward(ctx, S: Tensor, steps: int, coefficients: Polynomial) -> Tensor:
        X, grams = orthogonalise(S, steps, coefficients)
        ctx.coefficients = coefficients
        ctx.save_for_backward(S, *grams)
        return X

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, DX: Tensor):
        S, *grams = ctx.saved_tensors
        return orthogonalise_backward(S, grams, ctx.coefficients, DX)[1], None, None


def orthogonalise(S: Tensor, steps: int, coefficients: Polynomial) -> tuple[Tensor, list[Tensor]]:
    """S (G, d, e) with d <= e -> the step and the Gram matrix of every iterate, (G, d, d)."""
    X, _, _ = _normalise(S)
    grams = []
    for _ in range(steps):
        gram = torch.bmm(X, X.mT)
        grams.append(gram)
        X = torch.baddbmm(X, _polynomial(gram, coefficients), X, beta=coefficients[0])
    return X, grams


def orthogonalise_backward(
    S: Tensor, grams: list[Tensor], coefficients: Polynomial, DX: Tensor
) -> tuple[Tensor, Tensor]:
    """The step again, and the gradient of S from that of the step."""
    a, b, c = coefficients
    X, norm, alive = _normalise(S)
    iterates, polynomials = [X], []
    for gram in grams:
        polynomials.append(_polynomial(gram, coefficients))
        iterates.append(torch.baddbmm(iterates[-1], polynomials[-1], iterates[-1], beta=a))
    step = iterates.pop()
    for X, gram, B in zip(reversed(iterates), reversed(grams), reversed(polynomials)):
        DB = torch.bmm(DX, X.mT)
        DB = DB + DB.mT  # only its symmetric part counts: X Xᵀ is symmetric
        Dgram = torch.baddbmm(DB, DB, gram, beta=b, alpha=c)
        Dgram.baddbmm_(gram, DB, alpha=c)
        DX = torch.baddbmm(DX, B, DX, beta=a)
        DX.baddbmm_(Dgram, X)
    X = iterates[0]
    along = (X * DX).sum((-2, -1), keepdim=True)
    return step, torch.addcmul(DX, X, along, value=-1).mul_(alive / norm)


def _normalise(S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """S over its norm, or 0 where it has none; the norm; and 1 or 0."""
    norm = torch.linalg.vector_norm(S, dim=(-2, -1), keepdim=True)
    alive = (norm >= FLOOR).to(S.dtype)
    norm = torch.where(norm >= FLOOR, norm, torch.ones_like(norm))
    return S * (alive / norm), norm, alive


def _polynomial(gram: Tensor, coefficients: Polynomial) -> Tensor:
    _, b, c = coefficients
    return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
