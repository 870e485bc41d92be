"""The elementwise functions between the fast maps of a chain, with the derivatives that a write and its backward need.

A joint maps pre-activations z to the next map's inputs u. `value` and `pull` serve the forward pass; `Gelu(z)` and
`GeGlu(z)` evaluate the costly functions once and serve everything a backward pass asks of the same z.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

gelu_backward = torch.ops.aten.gelu_backward  # (grad, z) -> grad * gelu'(z)


def _gelu_parts(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """GELU (erf form), its first and its second derivative."""
    cdf = (z * math.sqrt(0.5)).erf_().mul_(0.5).add_(0.5)
    square = z * z
    pdf = (square * -0.5).exp_().mul_(1.0 / math.sqrt(2.0 * math.pi))
    return z * cdf, cdf.addcmul_(z, pdf), pdf.mul_(square.neg_().add_(2.0))


class Gelu:
    """u = gelu(z)."""

    def __init__(self, z: Tensor):
        self.u, self.slope, self.curve = _gelu_parts(z)

    @staticmethod
    def value(z: Tensor) -> Tensor:
        return F.gelu(z)

    @staticmethod
    def pull(z: Tensor, du: Tensor) -> Tensor:
        """Gradient with respect to z, given the one with respect to u."""
        return gelu_backward(du, z)

    def block(self, j: int, J: int) -> Gelu:
        """The j-th of J parts of the entries, as views."""
        return _part(self, ("u", "slope", "curve"), j, J)

    def pulled(self, du: Tensor) -> Tensor:
        """`pull` at the z of this object."""
        return du * self.slope

    def second(self, du: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of <t, pull(z, du)> with respect to du and z."""
        return t * self.slope, (t * du).mul_(self.curve)


class GeGlu:
    """u = gelu(p) * r, with z = [p, r] side by side."""

    def __init__(self, z: Tensor):
        p, self.r = z.chunk(2, -1)
        self.g, self.slope, self.curve = _gelu_parts(p)
        self.u = self.g * self.r

    @staticmethod
    def value(z: Tensor) -> Tensor:
        p, r = z.chunk(2, -1)
        return F.gelu(p) * r

    @staticmethod
    def pull(z: Tensor, du: Tensor) -> Tensor:
        p, r = z.chunk(2, -1)
        return torch.cat([gelu_backward(du * r, p.contiguous()), du * F.gelu(p)], -1)

    def block(self, j: int, J: int) -> GeGlu:
        return _part(self, ("u", "g", "r", "slope", "curve"), j, J)

    def pulled(self, du: Tensor) -> Tensor:
        return torch.cat([du * self.r * self.slope, du * self.g], -1)

    def second(self, du: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        tp, tr = t.chunk(2, -1)
        along = tp * self.r
        Dz = torch.cat([du * (along * self.curve + tr * self.slope), du * tp * self.slope], -1)
        return along * self.slope + tr * self.g, Dz


def _part(joint, names: tuple[str, ...], j: int, J: int):
    part = object.__new__(type(joint))
    for name in names:
        x = getattr(joint, name)
        size = x.shape[1] // J
        setattr(part, name, x[:, j * size : (j + 1) * size])
    return part


JOINTS = {"gelu": Gelu, "geglu": GeGlu}
