"""Polynomial feature maps and the Taylor kernel of other implementations, as modules of their own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ... import memory as engine
from ..keywords import strict


@strict()
class PolynomialFeatures(nn.Module):
    """All monomials of x (..., input_dim) up to `degree`: -> (..., C(input_dim + degree, degree)), one less without the constant.

    >>> PolynomialFeatures(input_dim=64, degree=2)(torch.randn(3, 64)).shape
    torch.Size([3, 2145])
    """

    def __init__(self, input_dim: int, degree: int = 2, include_bias: bool = True):
        super().__init__()
        spec = engine.MemorySpec(
            key_dim=input_dim, value_dim=1, structure="linear", features="monomials", degree=degree
        )
        self.map = engine.make_features(spec, heads=1) or nn.Identity()
        self.first = 0 if include_bias else 1
        self.output_dim = spec.lifted_dim - self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x.reshape(1, -1, 1, x.shape[-1])).reshape(*x.shape[:-1], -1)[..., self.first :]


@strict()
class PolynomialFeatureMap(nn.Module):
    """Element-wise powers side by side, [a_1 x, a_2 x², …], a_i learned from 1/i! on: (..., input_dim) -> (..., degree * input_dim).

    >>> PolynomialFeatureMap(input_dim=64, degree=5)(torch.randn(3, 64)).shape
    torch.Size([3, 320])
    """

    def __init__(self, input_dim: int, degree: int = 3):
        super().__init__()
        self.output_dim = input_dim * degree
        self.coefficients = nn.Parameter(inverse_factorials(degree)[1:])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([a * x**i for i, a in enumerate(self.coefficients, start=1)], dim=-1)


@strict()
class LearnableTaylorKernel(nn.Module):
    """Σ_{i=0..order} a_i x^i of inner products x = q·k (...) -> (...); a_i are learned from 1/i! on, where the sum approximates exp(x).

    Monomials of the same degree have this kernel: `DeepTransformer(AtlasConfig(taylor_expansion_order=4))` uses them.

    >>> kernel = LearnableTaylorKernel(order=4)
    >>> [round(y, 4) for y in kernel(torch.tensor([0.0, 1.0])).tolist()]
    [1.0, 2.7083]
    """

    def __init__(self, order: int = 4, learnable: bool = True):
        super().__init__()
        if type(order) is not int or order < 1:
            raise ValueError(f"order={order!r} must be a whole number >= 1")
        self.order = order
        start = inverse_factorials(order)
        self.coeffs = nn.Parameter(start) if learnable else nn.Buffer(start)

    def forward(self, x: Tensor) -> Tensor:
        total, *lower = reversed(self.coeffs.unbind())
        for coefficient in lower:
            total = total * x + coefficient
        return total


def inverse_factorials(degree: int) -> Tensor:
    """1/i! for i = 0..degree: (degree + 1,)."""
    return torch.tensor([1.0 / math.factorial(i) for i in range(degree + 1)])
