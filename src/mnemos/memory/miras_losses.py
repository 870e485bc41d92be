"""Inner losses of Miras: Huber (eqs. 14 to 16), quadratic for small residuals r = output - value and linear for large ones, and lp (10, 11).

Huber losses take their threshold delta_t per token (`Gates.threshold`), as the last channel of the value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .losses import InnerLoss, register_loss

EPSILON = 1e-6
MAX_P = 8.0


def smooth_abs(x: Tensor) -> Tensor:
    """sqrt(x² + ε): the outer gradient needs second derivatives of the inner loss."""
    return (x.square() + EPSILON).sqrt()


class ThresholdLoss(InnerLoss):
    """Base of losses with a threshold per token. delta: the threshold of tokens that have none of their own."""

    has_threshold = True
    of_difference = True

    def __init__(self, delta: float = 1.0):
        if not delta > 0:
            raise ValueError(f"objective={self.name!r} needs delta > 0, not {delta}")
        self.initial_threshold = delta

    def residual(self, output: Tensor | None, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Residuals (..., V), thresholds and squared norms (..., 1), of outputs (..., V) and values (..., V + 1)."""
        assert output is not None
        r = output - value[..., :-1]
        return r, value[..., -1:], r.square().sum(-1, keepdim=True)


@register_loss
class Huber(ThresholdLoss):
    """Per coordinate: ½ r² up to |r| = delta, then delta (|r| - ½ delta).

    >>> value = torch.tensor([[0.0, 0.0, 1.0]])  # two coordinates and the threshold
    >>> Huber().error(torch.tensor([[0.5, -3.0]]), value).tolist()
    [[0.5, -1.0]]
    """

    name = "huber"
    description = "Huber, per coordinate"

    def loss(self, output: Tensor, value: Tensor) -> Tensor:
        r, delta, _ = self.residual(output, value)
        clipped = r.clamp(-delta, delta)
        return (clipped * (r - 0.5 * clipped)).sum(-1)

    def error(self, output: Tensor | None, value: Tensor) -> Tensor:
        r, delta, _ = self.residual(output, value)
        return r.clamp(-delta, delta)


def _norm(squared: Tensor, far: Tensor) -> Tensor:
    """The norm where it is `far`, else 1: the root has no gradient at 0."""
    return torch.where(far, squared, torch.ones_like(squared)).sqrt()


@register_loss
class HuberNorm(ThresholdLoss):
    """On the norm of the residual: ½ ‖r‖² up to ‖r‖ = delta, then delta (‖r‖ - ½ delta), which clips the gradient of each token.

    >>> HuberNorm().error(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0, 1.0]]))
    tensor([[0.6000, 0.8000]])
    """

    name = "huber_norm"
    description = "Huber, on the norm"

    def loss(self, output: Tensor, value: Tensor) -> Tensor:
        _, delta, squared = self.residual(output, value)
        far = squared > delta.square()
        return torch.where(far, delta * (_norm(squared, far) - 0.5 * delta), 0.5 * squared).squeeze(-1)

    def error(self, output: Tensor | None, value: Tensor) -> Tensor:
        r, delta, squared = self.residual(output, value)
        far = squared > delta.square()
        return torch.where(far, delta * r / _norm(squared, far), r)


@register_loss
class HuberSwitch(ThresholdLoss):
    """Yaad's: ½ ‖r‖² up to ‖r‖ = delta, beyond it delta ‖r‖₁ with a smooth |x|. The loss has a jump at the threshold; the gradient,
    which is all that a write uses, is bounded by delta in each coordinate.

    >>> HuberSwitch().error(torch.tensor([[3.0, -4.0]]), torch.tensor([[0.0, 0.0, 1.0]])).round(decimals=3)
    tensor([[ 1., -1.]])
    """

    name = "huber_switch"
    description = "Huber (L2 or L1 by the norm)"

    def loss(self, output: Tensor, value: Tensor) -> Tensor:
        r, delta, squared = self.residual(output, value)
        absolute = smooth_abs(r).sum(-1, keepdim=True)
        return torch.where(squared > delta.square(), delta * absolute, 0.5 * squared).squeeze(-1)

    def error(self, output: Tensor | None, value: Tensor) -> Tensor:
        r, delta, squared = self.residual(output, value)
        return torch.where(squared > delta.square(), delta * (r / smooth_abs(r)), r)


@register_loss
class Lp(InnerLoss):
    """Moneta's: 1/p Σ |output - value|^p with a smooth |x|. The gradient is |r|^(p-1) sign(r), without the factor p.

    >>> Lp(p=3).error(torch.tensor([[2.0, -0.5]]), torch.zeros(1, 2))
    tensor([[ 4.0000, -0.2500]])
    """

    name = "lp"
    of_difference = True

    def __init__(self, p: float = 3.0):
        if not 1 <= p <= MAX_P:
            raise ValueError(f"objective='lp' needs p from 1 to {MAX_P:g}, not {p}")
        self.p = p
        self.description = f"L{p:g}"

    def loss(self, output: Tensor, value: Tensor) -> Tensor:
        return (smooth_abs(output - value) ** self.p).sum(-1) / self.p

    def error(self, output: Tensor | None, value: Tensor) -> Tensor:
        assert output is not None
        r = output - value
        return r * smooth_abs(r) ** (self.p - 2)

    def max_curvature(self, error: float) -> float:
        return max(1.0, (self.p - 1) * error ** (self.p - 2)) if self.p > 2 else 1.0
