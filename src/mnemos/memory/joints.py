"""The elementwise functions between the fast maps of a chain, with the derivatives that a write and its backward need."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

gelu_backward = torch.ops.aten.gelu_backward  # (grad, z) -> grad * gelu'(z)


def gelu_curvature(z: Tensor) -> Tensor:
    """Second derivative of GELU (erf form): (2 - z^2) times the normal density."""
    square = z.square()
    density = square.mul(-0.5).exp_().mul_(1.0 / math.sqrt(2.0 * math.pi))
    return torch.rsub(square, 2.0).mul_(density)


class Gelu:
    """u = gelu(z)."""

    widens = 1  # width of z over width of u

    @staticmethod
    def value(z: Tensor) -> Tensor:
        return F.gelu(z)

    @staticmethod
    def pull(z: Tensor, du: Tensor) -> Tensor:
        """Gradient with respect to z, given the one with respect to u."""
        return gelu_backward(du, z)

    @staticmethod
    def second(z: Tensor, du: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of <t, pull(z, du)> with respect to du and z."""
        return gelu_backward(t, z), gelu_curvature(z).mul_(t).mul_(du)


class GeGlu:
    """u = gelu(p) * r, with z = [p, r] side by side."""

    widens = 2

    @staticmethod
    def value(z: Tensor) -> Tensor:
        p, r = z.chunk(2, -1)
        return F.gelu(p) * r

    @staticmethod
    def pull(z: Tensor, du: Tensor) -> Tensor:
        p, r = z.chunk(2, -1)
        return torch.cat([gelu_backward(du * r, p.contiguous()), du * F.gelu(p)], -1)

    @staticmethod
    def second(z: Tensor, du: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        (p, r), (tp, tr) = (x.contiguous() for x in z.chunk(2, -1)), t.chunk(2, -1)
        slope = gelu_backward(torch.ones_like(p), p)
        back = tp * r * slope + tr * F.gelu(p)
        return back, torch.cat([du * (tp * r * gelu_curvature(p) + tr * slope), du * tp * slope], -1)


JOINTS = {"gelu": Gelu, "geglu": GeGlu}
