"""Feature maps φ: what a key or query is lifted to before it meets the memory. One object serves both.

Shapes: H heads, D key dim (`dim_in`), F features (`dim_out`); every map takes (..., H, D) to (..., H, F).
Only `monomials`, and `sketch` approximately, raises the rank of what a linear memory can hold: C(D+p, p) instead of D.

All maps compute in float32 or wider, and return that. Random matrices are drawn from the map's own seed, so building
one leaves torch's random state alone, and they are buffers in the state_dict. `reset_parameters` redraws and refills
everything (after `to_empty`, say).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn


class FeatureMap(nn.Module):
    """Base of all feature maps. Subclass it, set `name`, and pass the class to `register_features`.

    dim: D. heads: H. degree: highest power, for the maps that have one. feature_dim: F, for the maps that can choose it.

    >>> from mnemos.memory.features import FEATURES, FeatureMap, register_features
    >>> @register_features
    ... class Doubled(FeatureMap):
    ...     name = "doc_doubled"
    ...     @classmethod
    ...     def lifted_dim(cls, key_dim, degree, feature_dim):
    ...         return 2 * key_dim
    ...     def forward(self, x):
    ...         return torch.cat([x, -x], dim=-1)
    >>> FEATURES.pop("doc_doubled")(dim=4, heads=2)(torch.ones(2, 4)).shape
    torch.Size([2, 8])
    """

    name: ClassVar[str]

    def __init__(self, dim: int, heads: int, degree: int = 2, feature_dim: int | None = None):
        super().__init__()
        for argument, value in (("dim", dim), ("heads", heads), ("degree", degree), ("feature_dim", feature_dim or 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{argument}={value!r} must be a whole number >= 1")
        self.dim_in, self.heads, self.degree = dim, heads, degree
        self.dim_out = self.lifted_dim(dim, degree, feature_dim)

    @classmethod
    def lifted_dim(cls, key_dim: int, degree: int, feature_dim: int | None) -> int:
        """F for these arguments; refuses what the map cannot do."""
        return key_dim

    def reset_parameters(self) -> None:
        """Fill parameters and buffers with their start values, in place."""

    def forward(self, x: Tensor) -> Tensor:  # ... H D -> ... H F
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.dim_in} -> {self.dim_out}, heads={self.heads}, degree={self.degree}"


FEATURES: dict[str, type[FeatureMap]] = {}


def register_features(cls: type[FeatureMap]) -> type[FeatureMap]:
    """Make a feature map available under its `name`; usable as a decorator (example: `FeatureMap`)."""
    FEATURES[cls.name] = cls
    return cls


def make_features(spec, heads: int) -> FeatureMap | None:
    """The feature map a `MemorySpec` asks for; None for identity, which needs no module.

    >>> from types import SimpleNamespace
    >>> make_features(SimpleNamespace(features="monomials", key_dim=16, degree=2, feature_dim=None), heads=2)
    Monomials(16 -> 153, heads=2, degree=2)
    """
    if spec.features not in FEATURES:
        raise ValueError(f"features={spec.features!r} is unknown; choose one of {', '.join(map(repr, FEATURES))}")
    if spec.features == "identity":
        return None
    return FEATURES[spec.features](spec.key_dim, heads, spec.degree, spec.feature_dim)


@register_features
class Identity(FeatureMap):
    """φ(x) = x, dtype included.

    >>> Identity(dim=4, heads=2)(torch.ones(2, 4, dtype=torch.bfloat16)).dtype
    torch.bfloat16
    """

    name = "identity"

    def forward(self, x: Tensor) -> Tensor:
        return x


@register_features
class Elementwise(FeatureMap):
    """φ(x) = Σ_{i=1..p} a_i x^i, a_i learnable per head: keeps the dimension, so it does not raise the memory's rank.

    >>> Elementwise(dim=2, heads=1, degree=2)(torch.tensor([[1.0, 2.0]]))
    tensor([[1.5000, 4.0000]], grad_fn=<MulBackward0>)
    """

    name = "elementwise"

    def __init__(self, dim: int, heads: int, degree: int = 2, feature_dim: int | None = None):
        super().__init__(dim, heads, degree, feature_dim)
        self.coefficients = nn.Parameter(torch.empty(heads, degree))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.coefficients.copy_(torch.tensor(inverse_factorials(self.degree)[1:]))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x, self.coefficients))
        a = self.coefficients.to(x.dtype).unsqueeze(-1).unbind(1)  # p of (H 1)
        total = a[-1]
        for coefficient in reversed(a[:-1]):
            total = total * x + coefficient
        return total * x


@register_features
class Monomials(FeatureMap):
    """All monomials of degree <= p, C(D+p, p) of them, scaled so that the inner product is a polynomial of q·k:

        φ(q)·φ(k) = Σ_{i=0..p} a_i (q·k)^i / Σ a_i,   a_i = exp(log_coefficients[:, i]), learnable per head, start 1/i!

    Unit keys stay unit, so lr 1 stays an exact write.

    >>> phi = Monomials(dim=16, heads=1, degree=2)
    >>> q, k = torch.ones(2, 1, 16) / 4
    >>> phi(q).shape, round((phi(q) * phi(k)).sum().item(), 5)
    (torch.Size([1, 153]), 1.0)
    """

    name = "monomials"

    def __init__(self, dim: int, heads: int, degree: int = 2, feature_dim: int | None = None):
        super().__init__(dim, heads, degree, feature_dim)
        self.log_coefficients = nn.Parameter(torch.empty(heads, degree + 1))
        # Plain attributes: loaders refill non-persistent buffers with garbage, and .bfloat16() would round them.
        self._tables = self._placed = monomial_tables(dim, degree)
        self.reset_parameters()

    @classmethod
    def lifted_dim(cls, key_dim: int, degree: int, feature_dim: int | None) -> int:
        return math.comb(key_dim + degree, degree)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.log_coefficients.copy_(torch.tensor(inverse_factorials(self.degree)).log())

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x, self.log_coefficients))
        scale = kernel_scale(self.log_coefficients, x.dtype)  # p+1 of (H 1)
        if self._placed[-1][-1].device != x.device:
            self._placed = [tuple(table.to(x.device) for table in tables) for tables in self._tables]
        features = [scale[0].expand(*x.shape[:-1], 1), x * scale[1]]
        power = x
        for (parent, last, multinomial), s in zip(self._placed[1:], scale[2:]):
            power = power.index_select(-1, parent) * x.index_select(-1, last)
            features.append(power * (s * multinomial.to(x.dtype).sqrt()))
        return torch.cat(features, dim=-1)


@register_features
class TensorProjection(FeatureMap):
    """[x, x⊗x] through a fixed Gaussian projection to `feature_dim` (or D) features, E‖φ(x)‖² = (‖x‖² + ‖x‖⁴) / 2.

    One projection serves all heads: heads have fast weights of their own and never meet, so nothing is lost.

    >>> TensorProjection(dim=8, heads=2, feature_dim=12)(torch.ones(3, 2, 8)).shape
    torch.Size([3, 2, 12])
    """

    name = "tensor"

    def __init__(self, dim: int, heads: int, degree: int = 2, feature_dim: int | None = None, *, seed: int = 0):
        super().__init__(dim, heads, degree, feature_dim)
        self.seed = seed
        self.projection: Tensor
        self.register_buffer("projection", torch.empty(dim + dim * dim, self.dim_out))
        self.reset_parameters()

    @classmethod
    def lifted_dim(cls, key_dim: int, degree: int, feature_dim: int | None) -> int:
        if degree != 2:
            raise ValueError(
                f"degree={degree} must be 2 with features='tensor'; 'monomials' and 'sketch' take any degree"
            )
        return feature_dim or key_dim

    def reset_parameters(self) -> None:
        generator = torch.Generator("cpu").manual_seed(self.seed)
        drawn = torch.randn(self.projection.shape, generator=generator, device="cpu", dtype=torch.float64)
        self.projection.copy_(drawn / math.sqrt(2 * self.dim_out))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x, self.projection))
        linear, quadratic = self.projection.to(x.dtype).split([self.dim_in, self.dim_in**2])
        outer = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)  # ... H D*D
        return (x @ linear + outer @ quadratic).to(x.dtype)


@register_features
class Sketch(FeatureMap):
    """A random sketch of `Monomials`: `feature_dim` features (default 4 D) with the same inner products on average.

    Degrees 0 and 1 are exact (1 + D features). The others share the rest, in proportion to √3^i / i! (the standard
    deviation a degree contributes at the start). A feature of degree i is a product of i random projections of x, whose
    directions are orthogonal within blocks of D: unbiased, half the variance of independent signs for similar q and k,
    and one matmul, where count sketches need complex FFTs that neither bfloat16 nor the compiler likes.
    One set of projections serves all heads. Unit keys are unit on average only.

    >>> phi = Sketch(dim=16, heads=2, degree=3, feature_dim=100)
    >>> phi(torch.ones(5, 2, 16) / 4).shape
    torch.Size([5, 2, 100])
    """

    name = "sketch"

    def __init__(self, dim: int, heads: int, degree: int = 2, feature_dim: int | None = None, *, seed: int = 0):
        super().__init__(dim, heads, degree, feature_dim)
        self.seed = seed
        self.widths = self._share_out(self.dim_out - 1 - dim, degree)
        self.log_coefficients = nn.Parameter(torch.empty(heads, degree + 1))
        self.projection: Tensor
        self.register_buffer("projection", torch.empty(dim, sum(i * m for i, m in enumerate(self.widths, start=2))))
        self.reset_parameters()

    @classmethod
    def lifted_dim(cls, key_dim: int, degree: int, feature_dim: int | None) -> int:
        if degree == 1:
            return 1 + key_dim
        least = key_dim + degree
        if feature_dim is not None and feature_dim < least:
            raise ValueError(
                f"feature_dim={feature_dim} must be >= {least} (key_dim + degree) with features='sketch', degree={degree}"
            )
        return feature_dim or max(4 * key_dim, least)

    @staticmethod
    def _share_out(total: int, degree: int) -> list[int]:
        """Features of degrees 2..p: at least one each, `total` together."""
        widths, weights = [], [3 ** (i / 2) / math.factorial(i) for i in range(2, degree + 1)]
        for i, weight in enumerate(weights):
            later = len(weights) - i - 1
            widths.append(min(total - later, max(1, round(total * weight / sum(weights[i:])))))
            total -= widths[-1]
        return widths

    def reset_parameters(self) -> None:
        generator = torch.Generator("cpu").manual_seed(self.seed)
        drawn = []
        for i, m in enumerate(self.widths, start=2):
            # m^(-1/2) of the whole feature, spread over its i factors
            drawn += [orthogonal_directions(self.dim_in, m, generator) * m ** (-0.5 / i) for _ in range(i)]
        with torch.no_grad():
            if drawn:
                self.projection.copy_(torch.cat(drawn, dim=1))
            self.log_coefficients.copy_(torch.tensor(inverse_factorials(self.degree)).log())

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x, self.log_coefficients))
        scale = kernel_scale(self.log_coefficients, x.dtype)  # p+1 of (H 1)
        features = [scale[0].expand(*x.shape[:-1], 1), x * scale[1]]
        projected = (x @ self.projection.to(x.dtype)).to(x.dtype)
        sizes = [i * m for i, m in enumerate(self.widths, start=2)]
        for m, block, s in zip(self.widths, projected.split(sizes, dim=-1), scale[2:]):
            factors = block.split(m, dim=-1)
            product = factors[0]
            for factor in factors[1:]:
                product = product * factor
            features.append(product * s)
        return torch.cat(features, dim=-1)


def inverse_factorials(degree: int) -> list[float]:
    return [1 / math.factorial(i) for i in range(degree + 1)]


def compute_dtype(x: Tensor, parameter: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, parameter.dtype), torch.float32)


def kernel_scale(log_coefficients: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """√(a_i / Σ a) for i = 0..p, each (H, 1)."""
    return (log_coefficients.to(dtype).log_softmax(dim=-1) / 2).exp().unsqueeze(-1).unbind(1)


def monomial_tables(dim: int, degree: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per degree i = 1..p, in lexicographic order: index of the monomial of degree i-1 to multiply, the variable to
    multiply it by (never smaller than its own variables), and how many ordered products give the result.

    >>> [table.tolist() for table in monomial_tables(dim=2, degree=2)[1]]
    [[0, 0, 1], [0, 1, 1], [1, 2, 1]]
    """
    variable = torch.arange(dim, device="cpu")
    parent, last = torch.zeros_like(variable), variable
    run = multinomial = torch.ones_like(variable)
    tables = [(parent, last, multinomial)]
    for i in range(2, degree + 1):
        parent = torch.repeat_interleave(dim - last)
        first_child = (dim - last).cumsum(0) - (dim - last)
        before, position = last[parent], torch.arange(len(parent), device="cpu")
        last = before + position - first_child[parent]
        run = torch.where(last == before, run[parent] + 1, 1)
        multinomial = multinomial[parent] * i // run
        tables.append((parent, last, multinomial))
    return tables


def orthogonal_directions(dim: int, count: int, generator: torch.Generator) -> Tensor:
    """(dim, count) columns of length √dim, each uniform on the sphere, orthogonal within blocks of `dim`; float64."""
    blocks = -(-count // dim)
    gaussian = torch.randn(blocks, dim, dim, generator=generator, device="cpu", dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2) * math.sqrt(dim)  # signs make q uniform
    return q.transpose(0, 1).reshape(dim, -1)[:, :count]
