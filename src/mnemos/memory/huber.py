"""Huber losses (Miras, eqs. 14 to 16): quadratic for small residuals r = output - value, linear for large ones.

Each takes its threshold delta_t per token (`Gates.threshold`), as the last channel of the value. B tokens, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .losses import InnerLoss, register_loss
from .smooth import smooth_abs, smooth_sign


class ThresholdLoss(InnerLoss):
    """Base of losses with a threshold per token. delta: the threshold of tokens that have none of their own."""

    has_threshold = True
    of_difference = True

    def __init__(self, delta: float = 1.0):
        if not delta > 0:
            raise ValueError(f"objective={self.name!r} needs delta > 0, not {delta}")
        self.initial_threshold = delta

    def residual(self, output: Tensor | None, value: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals (..., V) and thresholds (..., 1), of outputs (..., V) and values (..., V + 1)."""
        assert output is not None
        return output - value[..., :-1], value[..., -1:]


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
        r, delta = self.residual(output, value)
        clipped = r.clamp(-delta, delta)
        return (clipped * (r - 0.5 * clipped)).sum(-1)

    def error(self, output: Tensor | None, value: Tensor) -> Tensor:
        r, delta = self.residual(output, value)
        return r.clamp(-delta, delta)


@register_loss
class HuberNorm(ThresholdLoss):
    """On the norm of the residual: ½ ‖r‖² up to ‖r‖ = delta, then delta (‖r‖ - ½ delta), which clips the gradient of each token.

    >>> HuberNorm().error(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0, 1.0]]))
    tensor([[0.6000, 0.8000]])
    """

    name = "huber_norm"
    description = "Huber, on the norm"

    def loss(self, output: Tensor, value: Tensor) -> Tensor:
        r, delta = self.residual(output, value)
        squared = r.square().sum(-1, keepdim=True)
        far = squared > delta.square()
        norm = torch.where(far, squared, torch.ones_like(squared)).sqrt()  # the root has no gradient at 0
        return torch.where(far, delta * (norm - 0.5 * delta), 0.5 * squared).squeeze(-1)

    def error(self, output: Tensor | None, value: Tensor) -> Tensor:
        r, delta = self.residual(output, value)
        squared = r.square().sum(-1, keepdim=True)
        far = squared > delta.square()
        norm = torch.where(far, squared, torch.ones_like(squared)).sqrt()
        return torch.where(far, delta * r / norm, r)


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
        r, delta = self.residual(output, value)
        squared = r.square().sum(-1, keepdim=True)
        absolute = smooth_abs(r).sum(-1, keepdim=True)
        return torch.where(squared > delta.square(), delta * absolute, 0.5 * squared).squeeze(-1)

    def error(self, output: Tensor | None, value: Tensor) -> Tensor:
        r, delta = self.residual(output, value)
        far = r.square().sum(-1, keepdim=True) > delta.square()
        return torch.where(far, delta * smooth_sign(r), r)
