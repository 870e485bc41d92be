"""Newton–Schulz orthogonalisation of stacked matrices, the step of rule "muon", with a backward that recomputes.

One iteration is X ← Q X with Q = a + b A + c A², A = X Xᵀ; a, b, c may differ from one to the next. Several in a row are X ← (… Q₂ Q₁) X, and the Gram matrix of the next
iterate is Q A Q: wide matrices are touched once per stage of up to three iterations, the rest is products of small ones. (Longer
stages lose digits: what rounding leaves of a small eigenvalue of A grows twelvefold at each iteration; at a stage's start A is exact.)
Forward keeps only the Gram matrices; backward rebuilds the rest from them. G matrices of d x e with d <= e (tall ones are transposed first).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .recompute import gradients
from .spec import Polynomial
from .workspace import without_autocast

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
    flat = (S if wide else S.mT).reshape(-1, min(S.shape[-2:]), max(S.shape[-2:]))
    out = _NewtonSchulz.apply(flat, polynomials(coefficients, steps))
    out = out.reshape(*S.shape[:-2], *out.shape[-2:])
    return out if wide else out.mT


def polynomials(coefficients: Schedule, steps: int) -> tuple[Polynomial, ...]:
    """The polynomial of every iteration.

    >>> polynomials(((3.0, -3.0, 1.0), (1.875, -1.25, 0.375)), 3)
    ((3.0, -3.0, 1.0), (1.875, -1.25, 0.375), (1.875, -1.25, 0.375))
    """
    first = coefficients[0]
    schedule = coefficients if isinstance(first, tuple) else (coefficients,)
    return tuple(schedule[min(i, len(schedule) - 1)] for i in range(steps))  # ty: ignore[invalid-explicit-return]


class _NewtonSchulz(torch.autograd.Function):
    @staticmethod
    def forward(ctx, S: Tensor, coefficients: tuple[Polynomial, ...]) -> Tensor:
        X, grams = orthogonalise(S, coefficients)
        ctx.coefficients = coefficients
        ctx.save_for_backward(S, *grams)
        return X

    @staticmethod
    @without_autocast
    def backward(ctx, DX: Tensor):
        S, *grams = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # second derivatives are autograd's

            def function(S: Tensor) -> tuple[Tensor]:
                return (orthogonalise(S, ctx.coefficients)[0],)

            return gradients(function, (S,), (True,), (DX,))[0], None
        with torch.no_grad():
            return orthogonalise_backward(S, grams, ctx.coefficients, DX)[1], None


def orthogonalise(S: Tensor, coefficients: tuple[Polynomial, ...]) -> tuple[Tensor, list[Tensor]]:
    """S (G, d, e) with d <= e -> the step and the Gram matrix of every iterate, (G, d, d). coefficients: of each iteration."""
    X, _, _ = _normalise(S)
    grams = []
    for stage in _stages(S, len(coefficients)):
        gram, product = torch.bmm(X, X.mT), None
        for i in stage:
            grams.append(gram)
            Q = _polynomial(gram, coefficients[i])
            product = Q if product is None else torch.bmm(Q, product)
            if i != stage[-1]:
                gram = torch.bmm(Q, torch.bmm(gram, Q))
        assert product is not None
        X = torch.bmm(product, X)
    return X, grams


def orthogonalise_backward(
    S: Tensor, grams: list[Tensor], coefficients: tuple[Polynomial, ...], DX: Tensor
) -> tuple[Tensor, Tensor]:
    """From the gradient of the step: its inner product with the step (G,), and the gradient of S (G, d, e)."""
    X, norm, alive = _normalise(S)
    Q = [_polynomial(gram, abc) for gram, abc in zip(grams, coefficients)]
    starts, products, stages = [], {}, list(_stages(S, len(grams)))
    for stage in stages:
        starts.append(X)
        for i in stage:
            products[i] = Q[i] if i == stage[0] else torch.bmm(Q[i], products[i - 1])
        if stage is not stages[-1]:
            X = torch.bmm(products[stage[-1]], X)
    inner = None
    for stage, X in zip(reversed(stages), reversed(starts)):
        Dgram = _stage_backward(stage, grams, Q, products, coefficients, torch.bmm(DX, X.mT))
        DX = torch.bmm(products[stage[-1]], DX)
        inner = (X * DX).sum((-2, -1)) if inner is None else inner
        DX.baddbmm_(Dgram, X)
    assert inner is not None
    along = (X * DX).sum((-2, -1), keepdim=True)
    return inner, torch.addcmul(DX, X, along, value=-1).mul_(alive / norm)


def _stage_backward(stage: range, grams, Q, products, coefficients: tuple[Polynomial, ...], DP: Tensor) -> Tensor:
    """From the gradient of a stage's product: twice that of its first Gram matrix. Every Q and A is symmetric, so only symmetric
    parts count; they are formed with their transpose, which is where the 2 comes from."""
    DP, Dgram = DP + DP.mT, None
    for i in reversed(stage):
        _, b, c = coefficients[i]
        half = torch.bmm(DP, products[i - 1]).mul_(0.5) if i != stage[0] else 0.5 * DP
        if Dgram is None:
            DQ, carried = half + half.mT, None
        else:
            carried = torch.bmm(Dgram, Q[i])
            half.baddbmm_(carried, grams[i])
            DQ, carried = half + half.mT, torch.bmm(Q[i], carried)
        around = torch.bmm(DQ, grams[i]).mul_(c)
        Dgram = DQ.mul_(b).add_(around).add_(around.mT)
        Dgram = Dgram if carried is None else Dgram.add_(carried)
        if i != stage[0]:
            DP = torch.bmm(Q[i], DP)
    assert Dgram is not None
    return Dgram


def _stages(S: Tensor, steps: int) -> Iterator[range]:
    """Iterations 0..steps-1 in runs that share one product with the wide matrices."""
    length = STAGE if S.shape[2] >= WIDE * S.shape[1] else 1
    return (range(i, min(i + length, steps)) for i in range(0, steps, length))


def _normalise(S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """S over its norm, or 0 where it has none; the norm; and 1 or 0."""
    norm = torch.linalg.vector_norm(S, dim=(-2, -1), keepdim=True)
    alive = (norm >= FLOOR).to(S.dtype)
    norm = torch.where(norm >= FLOOR, norm, torch.ones_like(norm))
    return S * (alive / norm), norm, alive


def _polynomial(gram: Tensor, coefficients: Polynomial) -> Tensor:
    """a + b gram + c gram²"""
    a, b, c = coefficients
    Q = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    Q.diagonal(dim1=-2, dim2=-1).add_(a)
    return Q
