"""Newton–Schulz orthogonalisation of stacked matrices, the step of rule "muon".

One iteration is X ← Q X with Q = a + b A + c A², A = X Xᵀ; a, b, c may differ from one to the next. Several in a row are X ← (… Q₂ Q₁) X, and the Gram matrix of the next
iterate is Q A Q: wide matrices are touched once per stage of up to three iterations, the rest is products of small ones. (Longer
stages lose digits: rounding errors of a small eigenvalue of A grow twelvefold at each iteration; at a stage's start A is exact.)
G matrices of d x e with d <= e (tall ones are transposed first).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]  # a, b, c of a x + b x³ + c x⁵, one iteration's effect on a singular value


def _polar_express() -> tuple[Polynomial, ...]:
    """Amsel, Persson, Musco and Gower 2025 (arXiv 2505.16932), algorithm 1: the polynomial that brings the interval left by the
    iterations before it nearest to 1, beginning with [1e-3, 1]. As there, each but the last is taken at x / 1.01, for rounding; the
    division of the matrix by 1.01 times its norm is part of the first."""
    optimal = (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    )
    powers = (2, *(1 for _ in optimal[1:]))
    safe = [(a / 1.01**n, b / 1.01 ** (3 * n), c / 1.01 ** (5 * n)) for (a, b, c), n in zip(optimal, powers)]
    return (*safe, (1.875, -1.25, 0.375))


# one polynomial per iteration, the last one for all that follow
NS_COEFFICIENTS: dict[str, tuple[Polynomial, ...]] = {
    "muon": ((3.4445, -4.7750, 2.0315),),
    "convergent": ((1.875, -1.25, 0.375),),
    "polar_express": _polar_express(),
}

FLOOR = 1e-7  # Frobenius norm below which there is no step and no gradient
STAGE = 3  # iterations between two products with wide matrices, if they are at least WIDE times as wide as high
WIDE = 2

Schedule = Polynomial | tuple[Polynomial, ...]  # of all iterations, or of each in turn, the last for all that follow


def newton_schulz(S: Tensor, steps: int, coefficients: Schedule) -> Tensor:
    """Push the singular values of each (..., d_in, d_out) matrix towards 1, keeping its singular vectors.

    coefficients: (a, b, c) of all iterations, or one such triple per iteration, of which the last repeats.

    >>> _ = torch.manual_seed(0)
    >>> step = newton_schulz(torch.randn(3, 8, 16), 5, (3.4445, -4.7750, 2.0315))
    >>> bool((torch.linalg.svdvals(step) < 1.21).all())
    True
    """
    wide = S.shape[-2] <= S.shape[-1]
    X = (S if wide else S.mT).reshape(-1, min(S.shape[-2:]), max(S.shape[-2:]))
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
    large = norm >= FLOOR
    X = torch.where(large, X / torch.where(large, norm, 1.0), 0.0)
    schedule, length = polynomials(coefficients, steps), STAGE if X.shape[2] >= WIDE * X.shape[1] else 1
    for start in range(0, steps, length):
        gram, Q, product = torch.bmm(X, X.mT), None, None
        for a, b, c in schedule[start : start + length]:
            gram = gram if Q is None else torch.bmm(Q, torch.bmm(gram, Q))
            Q = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            Q.diagonal(dim1=-2, dim2=-1).add_(a)
            product = Q if product is None else torch.bmm(Q, product)
        X = torch.bmm(product, X)  # ty: ignore[invalid-argument-type]
    out = X.reshape(*S.shape[:-2], *X.shape[-2:])
    return out if wide else out.mT


def low_rank_newton_schulz(
    gram_in: Tensor, gram_out: Tensor, weight: Tensor, schedule: tuple[Polynomial, ...]
) -> Tensor:
    """Newton–Schulz of S = Aᵀ diag(weight) B without building S: the matrix M (..., c, c) with NS(S) = Aᵀ M B.

    A (c, d_in) and B (c, d_out) enter by their Gram matrices A Aᵀ and B Bᵀ (..., c, c) alone; weight: (..., c).
    One iteration is M ← (a + b Q + c Q²) M with Q = M (B Bᵀ) Mᵀ (A Aᵀ). Where M does not reach S (A or B have dependent rows), it grows by
    the factor a of each iteration, and rounding errors with it: `low_rank_growth` of a schedule must be small.

    >>> _ = torch.manual_seed(0)
    >>> A, B, w = torch.randn(3, 8), torch.randn(3, 6), torch.rand(3)
    >>> M = low_rank_newton_schulz(A @ A.mT, B @ B.mT, w, 5 * NS_COEFFICIENTS["muon"])
    >>> torch.allclose(A.mT @ M @ B, newton_schulz(A.mT @ (w[:, None] * B), 5, NS_COEFFICIENTS["muon"]), atol=1e-4)
    True
    """
    squared = (weight.unsqueeze(-1) * gram_out * weight.unsqueeze(-2) * gram_in).sum((-2, -1))[..., None, None]
    large = squared >= FLOOR**2
    scale = torch.where(large, torch.where(large, squared, torch.ones_like(squared)).rsqrt(), torch.zeros_like(squared))
    M = torch.diag_embed(weight) * scale
    for a, b, c in schedule:
        Q = M @ gram_out @ M.mT @ gram_in
        QM = Q @ M
        M = a * M + b * QM + c * (Q @ QM)
    return M


def low_rank_growth(schedule: tuple[Polynomial, ...]) -> float:
    """The factor by which `low_rank_newton_schulz` enlarges rounding errors: about 500 for five iterations of "muon"."""
    return math.prod(a for a, _, _ in schedule)


def polynomials(coefficients: Schedule, steps: int) -> tuple[Polynomial, ...]:
    """The polynomial of every iteration.

    >>> polynomials(((3.0, -3.0, 1.0), (1.875, -1.25, 0.375)), 3)
    ((3.0, -3.0, 1.0), (1.875, -1.25, 0.375), (1.875, -1.25, 0.375))
    """
    first = coefficients[0]
    schedule = coefficients if isinstance(first, tuple) else (coefficients,)
    return tuple(schedule[min(i, len(schedule) - 1)] for i in range(steps))  # ty: ignore[invalid-explicit-return]
