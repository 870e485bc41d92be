"""The elementwise functions between the fast maps of a chain, with the derivatives that a write and its backward need.

A joint maps pre-activations z to the next map's inputs u. `value` and `pull` serve the forward pass; `Gelu(z, ws)` and
`GeGlu(z, ws)` evaluate the costly functions once and serve everything a backward pass asks of the same z.
"""

from __future__ import annotations

import math

from torch import Tensor

from .workspace import Workspace


def _gelu_parts(z: Tensor, ws: Workspace, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """GELU (erf form, into `out` where given), its first and its second derivative."""
    cdf = ws.mul(math.sqrt(0.5), z).erf_().mul_(0.5).add_(0.5)
    square = ws.mul(z, z)
    pdf = ws.mul(-0.5, square).exp_().mul_(1.0 / math.sqrt(2.0 * math.pi))
    return ws.mul(cdf, z, out=out), cdf.addcmul_(z, pdf), pdf.mul_(square.neg_().add_(2.0))


class Gelu:
    """u = gelu(z)."""

    def __init__(self, z: Tensor, ws: Workspace, out: Tensor | None = None):
        self.ws = ws
        self.u, self.slope, self.curve = _gelu_parts(z, ws, out)

    @staticmethod
    def value(z: Tensor, ws: Workspace, out: Tensor | None = None) -> Tensor:
        return ws.gelu(z, out)

    @staticmethod
    def pull(z: Tensor, du: Tensor, ws: Workspace, out: Tensor | None = None) -> Tensor:
        """Gradient with respect to z, given the one with respect to u."""
        return ws.gelu_backward(du, z, out)

    def block(self, span: slice) -> Gelu:
        """Some of the entries, as views."""
        return _part(self, ("u", "slope", "curve"), span)

    def pulled(self, du: Tensor, out: Tensor | None = None) -> Tensor:
        """`pull` at the z of this object."""
        return self.ws.mul(self.slope, du, out=out)

    def add_pulled(self, into: Tensor, du: Tensor) -> Tensor:
        """into += pulled(du)."""
        return into.addcmul_(self.slope, du)

    def second(self, du: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of <t, pull(z, du)> with respect to du and z."""
        return self.ws.mul(self.slope, t), self.ws.mul(du, t).mul_(self.curve)


class GeGlu:
    """u = gelu(p) * r, with z = [p, r] side by side."""

    def __init__(self, z: Tensor, ws: Workspace, out: Tensor | None = None):
        p, self.r = z.chunk(2, -1)
        self.ws = ws
        self.g, self.slope, self.curve = _gelu_parts(p, ws)
        self.u = ws.mul(self.r, self.g, out=out)

    @staticmethod
    def value(z: Tensor, ws: Workspace, out: Tensor | None = None) -> Tensor:
        p, r = z.chunk(2, -1)
        return ws.gelu(p, out).mul_(r)

    @staticmethod
    def pull(z: Tensor, du: Tensor, ws: Workspace, out: Tensor | None = None) -> Tensor:
        p, r = z.chunk(2, -1)
        return ws.cat(ws.gelu_backward(ws.mul(r, du), p), ws.gelu(p).mul_(du), out)

    def block(self, span: slice) -> GeGlu:
        return _part(self, ("u", "g", "r", "slope", "curve"), span)

    def pulled(self, du: Tensor, out: Tensor | None = None) -> Tensor:
        ws = self.ws
        return ws.cat(ws.mul(self.r, du).mul_(self.slope), ws.mul(self.g, du), out)

    def add_pulled(self, into: Tensor, du: Tensor) -> Tensor:
        return into.add_(self.pulled(du))

    def second(self, du: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        ws = self.ws
        tp, tr = t.chunk(2, -1)
        along = ws.mul(self.r, tp)
        of_p = ws.mul(self.curve, along).addcmul_(tr, self.slope).mul_(du)
        of_r = ws.mul(self.slope, tp).mul_(du)
        return along.mul_(self.slope).addcmul_(tr, self.g), ws.cat(of_p, of_r)


def _part(joint, names: tuple[str, ...], span: slice):
    part = object.__new__(type(joint))
    part.ws = joint.ws
    for name in names:
        setattr(part, name, getattr(joint, name)[:, span])
    return part


JOINTS = {"gelu": Gelu, "geglu": GeGlu}
