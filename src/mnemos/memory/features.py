"""Feature maps φ: what a key or query is lifted to before it meets the memory. One object serves both.

Shapes: H heads, D key dim (`dim_in`), F features (`dim_out`), p degree; every map takes (..., H, D) to (..., H, F).
Only `monomials`, and `sketch` approximately, raises the rank of what a linear memory can hold: C(D+p, p) instead of D.

All maps but identity compute in float32 or wider and return that. Random matrices are drawn from the map's own seed,
which leaves torch's random state alone, are shared by all heads (whose memories never meet) and are in the state_dict.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn


class FeatureMap(nn.Module):
    """Base of all feature maps. Subclass it, set `name`, and pass the class to `register_features`.

    dim: D. heads: H. degree: p. feature_dim: F where the map has a choice; the others have none and ignore it.

    >>> @register_features
    ... class Signed(FeatureMap):
    ...     name = "doc_signed"
    ...     lifted_dim = classmethod(lambda cls, key_dim, degree, feature_dim: 2 * key_dim)
    ...     def forward(self, x):
    ...         return torch.cat([x, -x], dim=-1)
    >>> FEATURES.pop("doc_signed")(dim=4, heads=2)(torch.ones(2, 4)).shape
    torch.Size([2, 8])
    """

    name: ClassVar[str]

    def __init__(self, dim: int, heads: int, degree: int = 2, feature_dim: int | None = None, *, seed: int = 0):
        super().__init__()
        sizes = {"dim": dim, "heads": heads, "degree": degree, "feature_dim": 1 if feature_dim is None else feature_dim}
        for argument, value in sizes.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{argument}={value!r} must be a whole number >= 1")
        self.dim_in, self.heads, self.degree, self.seed = dim, heads, degree, seed
        self.dim_out = self.lifted_dim(dim, degree, feature_dim)
        self.allocate()
        self.reset_parameters()

    @classmethod
    def lifted_dim(cls, key_dim: int, degree: int, feature_dim: int | None) -> int:
        """F for these arguments; a ValueError for those the map cannot serve."""
        return key_dim

    def allocate(self) -> None:
        """Create parameters and buffers, empty: the constructor's last step but one."""

    def reset_parameters(self) -> None:
        """Put the start values into parameters and buffers, in place: the constructor's last step."""

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

    >>> from mnemos.memory import MemorySpec
    >>> make_features(MemorySpec(key_dim=16, value_dim=64, features="monomials"), heads=2)
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

    >>> Elementwise(dim=2, heads=1, degree=2)(torch.tensor([[1.0, 2.0]])).tolist()
    [[1.5, 4.0]]
    """

    name = "elementwise"

    def allocate(self) -> None:
        self.coefficients = nn.Parameter(torch.empty(self.heads, self.degree))

    def reset_parameters(self) -> None:
        self.coefficients.data.copy_(_inverse_factorials(self.degree)[1:])

    def forward(self, x: Tensor) -> Tensor:
        x = _widen(x, self.coefficients)
        total, *lower = reversed(self.coefficients.to(x.dtype).unsqueeze(-1).unbind(1))  # p of (H 1)
        for coefficient in lower:
            total = total * x + coefficient
        return total * x


@register_features
class Monomials(FeatureMap):
    """All monomials of degree <= p, C(D+p, p) of them, scaled so that the inner product is a polynomial of q·k:

        φ(q)·φ(k) = Σ_{i=0..p} a_i (q·k)^i / Σ a_i,   a_i = exp(log_coefficients[:, i]) per head, start 1/i!

    Unit keys stay unit, so lr 1 stays an exact write.

    >>> phi = Monomials(dim=16, heads=1, degree=2)
    >>> q, k = torch.eye(16)[:2].unsqueeze(1)
    >>> phi(q).shape, round(phi(q).norm().item(), 4), round((phi(q) * phi(k)).sum().item(), 4)
    (torch.Size([1, 153]), 1.0, 0.4)
    """

    name = "monomials"

    @classmethod
    def lifted_dim(cls, key_dim: int, degree: int, feature_dim: int | None) -> int:
        return math.comb(key_dim + degree, degree)

    def allocate(self) -> None:
        self.log_coefficients = nn.Parameter(torch.empty(self.heads, self.degree + 1))
        # Not buffers: transformers' from_pretrained overwrites non-persistent ones with uninitialised memory.
        self._tables = self._placed = _monomial_tables(self.dim_in, self.degree)

    def reset_parameters(self) -> None:
        self.log_coefficients.data.copy_(_inverse_factorials(self.degree).log())

    def forward(self, x: Tensor) -> Tensor:
        x = _widen(x, self.log_coefficients)
        if self._placed[0][0].device != x.device:
            self._placed = [tuple(table.to(x.device) for table in tables) for tables in self._tables]
        batch, power = x.shape[:-1], x
        powers = [x.new_ones(*batch, 1), x]
        for parent, last, _ in self._placed[1:]:
            # gather by an expanded index: 2-4 times as fast as index_select on the last axis, both ways
            power = power.gather(-1, parent.expand(*batch, -1)) * x.gather(-1, last.expand(*batch, -1))
            powers.append(power)
        first, *rest = _kernel_roots(self.log_coefficients, x.dtype)
        roots = [first] + [a * multinomial.to(x.dtype).sqrt() for a, (_, _, multinomial) in zip(rest, self._placed)]
        return torch.cat(powers, dim=-1) * torch.cat(roots, dim=-1)


@register_features
class TensorProjection(FeatureMap):
    """[x, x⊗x] through a fixed Gaussian projection to `feature_dim` (default D) features, E‖φ(x)‖² = (‖x‖² + ‖x‖⁴) / 2.

    >>> TensorProjection(dim=8, heads=2, feature_dim=12)(torch.ones(3, 2, 8)).shape
    torch.Size([3, 2, 12])
    """

    name = "tensor"
    projection: Tensor

    @classmethod
    def lifted_dim(cls, key_dim: int, degree: int, feature_dim: int | None) -> int:
        if degree != 2:
            raise ValueError(f"degree={degree} must be 2 with features='tensor'; 'monomials' and 'sketch' take others")
        return feature_dim or key_dim

    def allocate(self) -> None:
        self.register_buffer("projection", torch.empty(self.dim_in + self.dim_in**2, self.dim_out))

    def reset_parameters(self) -> None:
        generator = torch.Generator("cpu").manual_seed(self.seed)
        gaussian = torch.randn(self.projection.shape, generator=generator, device="cpu")
        self.projection.copy_(gaussian / math.sqrt(2 * self.dim_out))

    def forward(self, x: Tensor) -> Tensor:
        x = _widen(x, self.projection)
        linear, quadratic = self.projection.to(x.dtype).split([self.dim_in, self.dim_in**2])
        outer = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)  # ... H D*D
        return (x @ linear + outer @ quadratic).to(x.dtype)


@register_features
class Sketch(FeatureMap):
    """A random sketch of `Monomials`: `feature_dim` features (default 4 D), the same inner products on average.

    Degrees 0 and 1 are exact (1 + D features); the higher ones share the rest by their part in the error, √3^i / i!.
    A feature of degree i is a product of i random projections of x, whose directions are orthogonal in blocks of D.
    That is one matmul, and at degree 2 less noise than count sketches with FFTs. Unit keys are unit on average only.

    >>> Sketch(dim=16, heads=2, degree=3, feature_dim=100)(torch.ones(5, 2, 16) / 4).shape
    torch.Size([5, 2, 100])
    """

    name = "sketch"
    projection: Tensor

    @classmethod
    def lifted_dim(cls, key_dim: int, degree: int, feature_dim: int | None) -> int:
        least = key_dim + degree
        if degree > 1 and feature_dim is not None and feature_dim < least:
            raise ValueError(f"feature_dim={feature_dim} must be >= key_dim + degree = {least} with features='sketch'")
        return least if degree == 1 else feature_dim or max(4 * key_dim, least)

    def allocate(self) -> None:
        self.log_coefficients = nn.Parameter(torch.empty(self.heads, self.degree + 1))
        degrees = range(2, self.degree + 1)
        self.widths = _share_out(self.dim_out - 1 - self.dim_in, [3 ** (i / 2) / math.factorial(i) for i in degrees])
        self.sizes = [i * width for i, width in zip(degrees, self.widths)]
        self.register_buffer("projection", torch.empty(self.dim_in, sum(self.sizes)))

    def reset_parameters(self) -> None:
        self.log_coefficients.data.copy_(_inverse_factorials(self.degree).log())
        generator = torch.Generator("cpu").manual_seed(self.seed)
        for width, block in zip(self.widths, self.projection.split(self.sizes, dim=-1)):
            factors = block.split(width, dim=-1)
            for factor in factors:
                directions = _orthogonal_directions(self.dim_in, width, generator)
                factor.copy_(directions * width ** (-0.5 / len(factors)))

    def forward(self, x: Tensor) -> Tensor:
        x = _widen(x, self.log_coefficients)
        roots = _kernel_roots(self.log_coefficients, x.dtype)
        features = [roots[0].expand(*x.shape[:-1], 1), x * roots[1]]
        projected = (x @ self.projection.to(x.dtype)).to(x.dtype)
        for product, width, block in zip(roots[2:], self.widths, projected.split(self.sizes, dim=-1)):
            for factor in block.split(width, dim=-1):
                product = product * factor
            features.append(product)
        return torch.cat(features, dim=-1)


def _widen(x: Tensor, parameter: Tensor) -> Tensor:
    return x.to(torch.promote_types(torch.promote_types(x.dtype, parameter.dtype), torch.float32))


def _inverse_factorials(degree: int) -> Tensor:
    return torch.tensor([1 / math.factorial(i) for i in range(degree + 1)], dtype=torch.float64)


def _kernel_roots(log_coefficients: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """√(a_i / Σ a) for i = 0..p, each (H, 1)."""
    return (log_coefficients.to(dtype).log_softmax(dim=-1) / 2).exp().unsqueeze(-1).unbind(1)


def _monomial_tables(dim: int, degree: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per degree i = 1..p, in lexicographic order: which monomial of degree i-1 to take, by which variable to multiply
    it (none of its own is larger), and how many ordered products give the result."""
    last = torch.arange(dim, device="cpu")
    parent, run, multinomial = torch.zeros_like(last), torch.ones_like(last), torch.ones_like(last)
    tables = [(parent, last, multinomial)]
    for i in range(2, degree + 1):
        children = dim - last
        parent = torch.repeat_interleave(children)
        rank = torch.arange(len(parent), device="cpu") - (children.cumsum(0) - children)[parent]
        run = torch.where(rank == 0, run[parent] + 1, 1)  # how often the last variable occurs
        last = last[parent] + rank
        multinomial = multinomial[parent] * i // run
        tables.append((parent, last, multinomial))
    return tables


def _share_out(total: int, weights: list[float]) -> list[int]:
    """`total` as a sum of whole numbers, one for each itself and the rest by weight."""
    spare, whole = total - len(weights), sum(weights)
    edges = [round(spare * sum(weights[:i]) / whole) for i in range(len(weights) + 1)] if weights else []
    return [1 + right - left for left, right in zip(edges, edges[1:])]


def _orthogonal_directions(dim: int, count: int, generator: torch.Generator) -> Tensor:
    """(dim, count): columns of length √dim, each uniform on the sphere, orthogonal within blocks of `dim`."""
    gaussian = torch.randn(-(-count // dim), dim, dim, generator=generator, device="cpu", dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2) * math.sqrt(dim)  # without the signs q is not uniform
    return q.transpose(0, 1).reshape(dim, -1)[:, :count]
