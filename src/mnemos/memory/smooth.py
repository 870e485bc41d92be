"""Smooth |x| and sign(x), as Miras uses them: the outer gradient needs second derivatives of the inner loss."""

from __future__ import annotations

from torch import Tensor

EPSILON = 1e-6


def smooth_abs(x: Tensor) -> Tensor:
    """sqrt(x² + ε)."""
    return (x.square() + EPSILON).sqrt()


def smooth_sign(x: Tensor) -> Tensor:
    """x / sqrt(x² + ε), the derivative of `smooth_abs`."""
    return x / smooth_abs(x)
