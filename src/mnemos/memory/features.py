"""Feature maps φ: what a key or query is lifted to before it meets the memory. One object serves both.

Shapes: H heads, D key dim (`dim_in`), F features (`dim_out`), p degree; every map takes (..., H, D) to (..., H, F).
`monomials`, and `sketch` approximately, raise the rank of what a linear memory can hold to C(D+p, p), `elementwise_concat` to p D.

All maps but identity compute in float32 or wider and return that. Random matrices are drawn from the map's own seed,
which leaves torch's random state alone, are shared by all heads (whose memories never meet) and are in the state_dict.
Coefficients start at constants; what is learned are offsets to these, 0 at first, as an initialisation from outside makes them.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..nn.constant import Constant
from ..nn.derivatives import transformed
from .registry import Registry


class FeatureMap(nn.Module):
    """Base of all feature maps. Subclass it, set `name`, and pass the class to `register_features`.

    dim: D. heads: H. degree: p. feature_dim: F where the map has a choice; the others have none and ignore it.

    >>> @register_features
    ... class Cubed(FeatureMap):
    ...     name = "doc_cubed"
    ...     def forward(self, x):
    ...         return x**3
    >>> FEATURES.pop("doc_cubed")(dim=2, heads=1)(torch.tensor([[1.0, 2.0]])).tolist()
    [[1.0, 8.0]]
    """

    name: ClassVar[str]
    infinite: ClassVar[bool] = False  # never built: the first fast map is a list of keys, which grows
    is_identity: ClassVar[bool] = False

    def __init__(self, dim: int, heads: int, degree: int = 2, feature_dim: int | None = None, *, seed: int = 0):
        super().__init__()
        sizes = {"dim": dim, "heads": heads, "degree": degree, "feature_dim": 1 if feature_dim is None else feature_dim}
        for argument, value in sizes.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{argument}={value!r} must be a whole number >= 1")
        self.heads, self.degree, self.feature_dim, self.seed = heads, degree, feature_dim, seed
        self.dim_in, self.dim_out = dim, self.lifted_dim(dim, degree, feature_dim)
        self.build()

    @classmethod
    def lifted_dim(cls, key_dim: int, degree: int, feature_dim: int | None) -> int:
        """F for these arguments; a ValueError for those the map cannot serve."""
        return key_dim

    @classmethod
    def rank(cls, key_dim: int, degree: int, feature_dim: int | None, unit: bool) -> int:
        """The largest rank of lifted keys, or an upper bound of it. unit: keys of norm 1."""
        return cls.lifted_dim(key_dim, degree, feature_dim)

    def build(self) -> None:
        """Create parameters and buffers: the last step of the constructor."""

    def reset_parameters(self) -> None:
        """Reset all initial values in place, for example after `to_empty`."""
        fresh = type(self)(self.dim_in, self.heads, self.degree, self.feature_dim, seed=self.seed)
        self.load_state_dict(fresh.state_dict())

    def forward(self, x: Tensor) -> Tensor:  # ... H D -> ... H F
        raise NotImplementedError


FEATURES: Registry[FeatureMap] = Registry("features")
register_features = FEATURES.register


def make_features(spec, heads: int) -> FeatureMap | None:
    """The feature map a `MemorySpec` asks for; None for identity, which needs no module.

    >>> from mnemos.memory import MemorySpec
    >>> make_features(MemorySpec(key_dim=16, value_dim=64, features="monomials"), heads=2).dim_out
    153
    """
    kind = FEATURES[spec.features]
    return None if kind is Identity else kind(spec.key_dim, heads, spec.degree, spec.feature_dim)


@register_features
class Identity(FeatureMap):
    """φ(x) = x, dtype included.

    >>> Identity(dim=4, heads=2)(torch.ones(2, 4, dtype=torch.bfloat16)).dtype
    torch.bfloat16
    """

    name = "identity"
    is_identity = True

    def forward(self, x: Tensor) -> Tensor:
        return x


@register_features
class Elementwise(FeatureMap):
    """φ(x) = Σ_{i=1..p} a_i x^i, a_i learnable per head: keeps the dimension, so it does not raise the memory's rank.

    >>> Elementwise(dim=2, heads=1, degree=2)(torch.tensor([[1.0, 2.0]])).tolist()
    [[1.5, 4.0]]
    """

    name = "elementwise"

    def build(self) -> None:
        self.coefficients_offset = nn.Parameter(torch.zeros(self.heads, self.degree))
        self._start = Constant(_inverse_factorials(self.degree)[1:])

    @property
    def coefficients(self) -> Tensor:
        """a_1..a_p per head: (H, p), float32 or wider."""
        return self._start.plus(self.coefficients_offset)

    def forward(self, x: Tensor) -> Tensor:
        x = _widen(x, self.coefficients_offset)
        total, *lower = reversed(self.coefficients.to(x.dtype).unsqueeze(-1).unbind(1))  # p of (H 1)
        for coefficient in lower:
            total = total * x + coefficient
        return total * x


class _RankOfPolynomials(FeatureMap):
    """Base of maps to polynomials of the key."""

    @classmethod
    def rank(cls, key_dim: int, degree: int, feature_dim: int | None, unit: bool) -> int:
        """On the unit sphere x·x = 1 makes every monomial of degree <= p - 2 a combination of those two degrees higher, so that only
        degrees p and p - 1 count."""
        d, p = key_dim, degree
        polynomials = math.comb(d + p - 1, p) + math.comb(d + p - 2, p - 1) if unit else math.comb(d + p, p)
        return min(cls.lifted_dim(key_dim, degree, feature_dim), polynomials)


class _Polynomial(_RankOfPolynomials):
    """Kernels Σ a_i (q·k)^i / Σ a_i with learned a_i = exp(log_coefficients[:, i])."""

    def build(self) -> None:
        self.log_coefficients_offset = nn.Parameter(torch.zeros(self.heads, self.degree + 1))
        self._start = Constant([math.log(a) for a in _inverse_factorials(self.degree)])

    @property
    def log_coefficients(self) -> Tensor:
        """log a_0..log a_p per head: (H, p+1), float32 or wider."""
        return self._start.plus(self.log_coefficients_offset)


@register_features
class ElementwiseConcat(Elementwise):
    """φ(x) = [a_1 x, a_2 x², …, a_p x^p] side by side, p D features; a_i learnable per head, 1/i! at first.

    The linear part keeps its size and no power of a coordinate of a unit key exceeds 1, so a unit key has norm 1 at least and
    √(Σ a_i²) at most, 1.13 at the start: nothing is rescaled.

    >>> ElementwiseConcat(dim=2, heads=1, degree=2)(torch.tensor([[1.0, 2.0]])).tolist()
    [[1.0, 2.0, 0.5, 2.0]]
    """

    name = "elementwise_concat"

    @classmethod
    def lifted_dim(cls, key_dim: int, degree: int, feature_dim: int | None) -> int:
        return key_dim * degree

    def forward(self, x: Tensor) -> Tensor:
        x = _widen(x, self.coefficients_offset)
        powers = [x]
        for _ in range(self.degree - 1):
            powers.append(powers[-1] * x)
        return (torch.stack(powers, dim=-2) * self.coefficients.to(x.dtype).unsqueeze(-1)).flatten(-2)


@register_features
class Monomials(_Polynomial):
    """All monomials of degree <= p, C(D+p, p) of them, scaled so that φ(q)·φ(k) = Σ_{i=0..p} a_i (q·k)^i / Σ a_i.

    a_i = exp(log_coefficients[:, i]) per head, 1/i! at first. Unit keys stay unit, so lr 1 stays an exact write.

    >>> phi = Monomials(dim=16, heads=1, degree=2)
    >>> q, k = torch.eye(16)[:2].unsqueeze(1)
    >>> phi(q).shape, round(phi(q).norm().item(), 4), round((phi(q) * phi(k)).sum().item(), 4)
    (torch.Size([1, 153]), 1.0, 0.4)
    """

    name = "monomials"

    @classmethod
    def lifted_dim(cls, key_dim: int, degree: int, feature_dim: int | None) -> int:
        return math.comb(key_dim + degree, degree)

    def build(self) -> None:
        super().build()
        # Not buffers: transformers' from_pretrained overwrites non-persistent ones with uninitialised memory.
        self._tables = self._placed = _monomial_tables(
            self.dim_in, self.degree
        )  # placed: as the last input, roots of counts

    def forward(self, x: Tensor) -> Tensor:
        x = _widen(x, self.log_coefficients_offset)
        placed = self._placed
        if placed[0][2].dtype != x.dtype or placed[0][2].device != x.device:
            placed = [(p.to(x.device), i.to(x.device), n.to(x).sqrt()) for p, i, n in self._tables]
            if type(placed[0][2]) is Tensor and not torch.compiler.is_compiling() and not transformed():
                self._placed = placed
        batch, power = x.shape[:-1], x
        powers = [x.new_ones(*batch, 1), x]
        for parent, last, _ in placed[1:]:
            # gather by an expanded index: 2-4 times as fast as index_select on the last axis, both ways
            power = power.gather(-1, parent.expand(*batch, -1)) * x.gather(-1, last.expand(*batch, -1))
            powers.append(power)
        first, *rest = _kernel_roots(self.log_coefficients.to(x.dtype))
        scales = [first] + [root * scale for root, (_, _, scale) in zip(rest, placed)]
        return torch.cat(powers, dim=-1) * torch.cat(scales, dim=-1)


@register_features
class TensorProjection(_RankOfPolynomials):
    """[x, x⊗x] through a fixed Gaussian projection to `feature_dim` (default D) features, E‖φ(x)‖² = (‖x‖² + ‖x‖⁴) / 2.

    >>> TensorProjection(dim=8, heads=2, feature_dim=12)(torch.ones(3, 2, 8)).shape
    torch.Size([3, 2, 12])
    """

    name = "tensor"

    @classmethod
    def lifted_dim(cls, key_dim: int, degree: int, feature_dim: int | None) -> int:
        if degree != 2:
            raise ValueError(f"degree={degree} must be 2 with features='tensor'; 'monomials' and 'sketch' take others")
        return feature_dim or key_dim

    def build(self) -> None:
        self.projection = nn.Buffer(torch.empty(self.dim_in + self.dim_in**2, self.dim_out))
        generator = torch.Generator("cpu").manual_seed(self.seed)
        gaussian = torch.randn(self.projection.shape, generator=generator, device="cpu", dtype=torch.float64)
        self.projection.copy_(gaussian / math.sqrt(2 * self.dim_out))

    def forward(self, x: Tensor) -> Tensor:
        x = _widen(x, self.projection)
        linear, quadratic = self.projection.to(x.dtype).split([self.dim_in, self.dim_in**2])
        outer = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)  # ... H D*D
        return (x @ linear + outer @ quadratic).to(x.dtype)


@register_features
class Sketch(_Polynomial):
    """A random sketch of `Monomials`: `feature_dim` features (default 4 D), the same inner products on average.

    Degrees 0 and 1 are exact (1 + D features), the higher ones share the rest equally. A feature of degree i is a
    product of i random projections of x, whose directions are orthogonal in blocks of D: one matmul for all, and at
    degree 2 less noise than count sketches with FFTs. Unit keys are unit on average only.

    >>> Sketch(dim=16, heads=2, degree=3, feature_dim=100)(torch.ones(5, 2, 16) / 4).shape
    torch.Size([5, 2, 100])
    """

    name = "sketch"

    @classmethod
    def lifted_dim(cls, key_dim: int, degree: int, feature_dim: int | None) -> int:
        least = key_dim + degree
        if degree > 1 and feature_dim is not None and feature_dim < least:
            raise ValueError(f"feature_dim={feature_dim} must be >= key_dim + degree = {least} with features='sketch'")
        return least if degree == 1 else feature_dim or max(4 * key_dim, least)

    def build(self) -> None:
        super().build()
        rest, degrees = self.dim_out - 1 - self.dim_in, range(2, self.degree + 1)
        self.widths = [rest // len(degrees) + (i - 2 < rest % len(degrees)) for i in degrees]
        self.factor_widths = [width for i, width in zip(degrees, self.widths) for _ in range(i)]
        self.projection = nn.Buffer(torch.empty(self.dim_in, sum(self.factor_widths)))
        generator = torch.Generator("cpu").manual_seed(self.seed)
        for factor in self.projection.split(self.factor_widths, dim=-1):
            factor.copy_(_directions(*factor.shape, generator))

    def forward(self, x: Tensor) -> Tensor:
        x = _widen(x, self.log_coefficients_offset)
        roots = _kernel_roots(self.log_coefficients.to(x.dtype))
        features = [roots[0].expand(*x.shape[:-1], 1), x * roots[1]]
        factors = iter((x @ self.projection.to(x.dtype)).to(x.dtype).split(self.factor_widths, dim=-1))
        for i, width in enumerate(self.widths, start=2):
            feature = roots[i] / math.sqrt(width)
            for _ in range(i):
                feature = feature * next(factors)
            features.append(feature)
        return torch.cat(features, dim=-1)


@register_features
class Exp(FeatureMap):
    """φ* with φ*(q)·φ*(k) = exp(τ (q·k - |k|²)): infinitely many features, of which only the kernel is ever computed.

    Returns √τ x; the memory takes the exponential of inner products of such, plus `offset`, -τ |k|². τ > 0 is learnable
    per head; key_norm: |k|, the norm that keys have, which makes lr 1 an exact write. τ starts at √D / |k|², so that a key
    and a query of that norm in one direction have exp(√D) times the kernel of orthogonal ones, as in attention.
    A memory without this module (features=None) has the kernel exp(q·k).

    >>> phi = Exp(dim=16, heads=1)
    >>> q, k = torch.eye(16)[:2].unsqueeze(1)
    >>> [round(((phi(q) * phi(x)).sum() + phi.offset).exp().item(), 4) for x in (q, k)]
    [1.0, 0.0183]
    """

    name = "exp"
    infinite = True

    def __init__(self, dim: int, heads: int, degree=2, feature_dim=None, *, seed: int = 0, key_norm: float = 1.0):
        if not key_norm > 0:
            raise ValueError(f"key_norm={key_norm!r} must be > 0")
        self.key_norm = key_norm
        super().__init__(dim, heads, degree, feature_dim, seed=seed)

    def build(self) -> None:
        self.log_scale_offset = nn.Parameter(torch.zeros(self.heads))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.log_scale_offset)

    @property
    def log_scale(self) -> Tensor:
        """log τ per head: (H,), float32 or wider."""
        return _widen(self.log_scale_offset, self.log_scale_offset) + math.log(self.dim_in**0.5 / self.key_norm**2)

    @property
    def offset(self) -> Tensor:
        """The offset of inner products before the exponential: (H,)."""
        return -(self.key_norm**2) * self.log_scale.exp()

    def forward(self, x: Tensor) -> Tensor:
        x = _widen(x, self.log_scale_offset)
        return x * (self.log_scale.to(x.dtype) / 2).exp().unsqueeze(-1)


def _widen(x: Tensor, parameter: Tensor) -> Tensor:
    return x.to(torch.promote_types(torch.promote_types(x.dtype, parameter.dtype), torch.float32))


def _inverse_factorials(degree: int) -> list[float]:
    """1/0!..1/p!."""
    return [1 / math.factorial(i) for i in range(degree + 1)]


def _kernel_roots(log_coefficients: Tensor) -> tuple[Tensor, ...]:
    """√(a_i / Σ a) for i = 0..p, each (H, 1)."""
    return (log_coefficients.log_softmax(dim=-1) / 2).exp().unsqueeze(-1).unbind(1)


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


def _directions(dim: int, count: int, generator: torch.Generator) -> Tensor:
    """(dim, count): columns of length √dim, in all directions alike, orthogonal within blocks of `dim`."""
    gaussian = torch.randn(-(-count // dim), dim, dim, generator=generator, device="cpu", dtype=torch.float64)
    q, _ = torch.linalg.qr(gaussian)  # uniform but for the signs of its columns, which cancel in φ(q)·φ(k)
    return q.transpose(0, 1).reshape(dim, -1)[:, :count] * math.sqrt(dim)
