"""Capacity of a memory without training: random (key, value) pairs are written, the keys are read back, and the result is compared to the bound.

Two measures, both on the keys that were written: the relative error |M(k) - v| / |v|, mean over pairs; and recall, the fraction of
pairs whose value is the nearest to M(k) among all n values. Keys and values are random directions. One pass writes every pair once;
further passes write the same pairs in the same order.

Linear memories with anchor "token" (feature maps, float64): a pass is an affine map W -> P W + Q, so that k squarings are 2^k passes.
Other memories (structures x rules x windows, float32): every pass is run. For the recall of a whole model see pair_recall.py.

R rows (seeds), n pairs, D key dim, V value dim, F features, L candidates for lr.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..memory import Gates, MemorySpec, MemoryState, make_features, read, scan
from ..memory.features import FEATURES

EXACT = 1e-3  # relative error below which a pair counts as recalled exactly
DOUBLINGS = {"1 pass": 0, "64 passes": 6, "2^20 passes": 20}  # squarings of one pass, for the feature maps
LEAST_SQUARES = "least squares"  # the lower bound of the error over all weights
Phi = Callable[[Tensor], Tensor] | None


# --- pairs and measures -----------------------------------------------------------------------------------------------


def directions(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return F.normalize(torch.randn(*shape, dtype=dtype), dim=-1)


def relative_error(y: Tensor, v: Tensor) -> Tensor:
    """(..., n, V) -> (...): |y - v| / |v|, mean over pairs; infinite if the memory has diverged."""
    error = ((y - v).norm(dim=-1) / v.norm(dim=-1)).mean(-1)
    return error.nan_to_num(nan=math.inf, posinf=math.inf)


def recall(y: Tensor, v: Tensor) -> Tensor:
    """(..., n, V) -> (...): fraction of pairs whose own value is the nearest of all n."""
    nearest = torch.cdist(y.nan_to_num(), v).argmin(-1)
    return (nearest == torch.arange(v.shape[-2])).to(v.dtype).mean(-1)


def lift(keys: Tensor, phi: Phi) -> Tensor:  # ... n D -> ... n F
    with torch.no_grad():
        return keys if phi is None else phi(keys.unsqueeze(-2)).squeeze(-2)


# --- orthonormal keys: one pass is exact ------------------------------------------------------------------------------


def orthonormal_error(dim: int, n: int, dtype: torch.dtype = torch.float64) -> float:
    """Largest relative error of n <= dim orthonormal keys after one pass with anchor token and lr 1."""
    spec = MemorySpec(key_dim=dim, value_dim=dim, structure="linear", anchor="token", momentum=False)
    k = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64)).Q[:n].to(dtype).reshape(1, n, 1, dim)
    v = torch.randn(1, n, 1, dim, dtype=dtype)
    state = spec.initial_state([torch.zeros(1, dim, dim, dtype=dtype)], batch=1)
    _, state = scan(None, k, v, Gates(lr=torch.ones(1, n, 1, dtype=dtype)), state, spec)
    return ((read(k, state, spec) - v).norm(dim=-1) / v.norm(dim=-1)).max().item()


# --- feature maps: rank -----------------------------------------------------------------------------------------------


def linear_spec(features: str, degree: int = 2, feature_dim: int | None = None, dim: int = 8) -> MemorySpec:
    return MemorySpec(
        key_dim=dim,
        value_dim=dim,
        structure="linear",
        features=features,
        degree=degree,
        feature_dim=feature_dim,
        anchor="token",
        momentum=False,
    )


def name_of(spec: MemorySpec) -> str:
    degree = "" if FEATURES[spec.features].is_identity else f", degree {spec.degree}"
    return spec.features + degree + (f", {spec.feature_dim} features" if spec.feature_dim else "")


def theoretical_rank(spec: MemorySpec, unit: bool) -> int:
    """Rank of the lifted keys, given enough of them; for sketches an upper bound.

    unit: keys of norm 1, which lowers the rank of polynomials.
    """
    return FEATURES[spec.features].rank(spec.key_dim, spec.degree, spec.feature_dim, unit)


def measured_rank(spec: MemorySpec, unit: bool) -> int:
    """Numerical rank, in float64, of 50 more lifted keys than there are features."""
    keys = torch.randn(spec.lifted_dim + 50, spec.key_dim, dtype=torch.float64)
    return int(torch.linalg.matrix_rank(lift(F.normalize(keys, dim=-1) if unit else keys, make_features(spec, 1))))


def ranks(specs: list[MemorySpec]) -> list[dict]:
    return [
        {
            "map": name_of(spec),
            "dim": spec.key_dim,
            "features": spec.lifted_dim,
            "unit keys": measured_rank(spec, unit=True),
            "unit keys, theory": theoretical_rank(spec, unit=True),
            "Gaussian keys": measured_rank(spec, unit=False),
            "Gaussian keys, theory": theoretical_rank(spec, unit=False),
        }
        for spec in specs
    ]


# --- feature maps: recall after 1, 64, 2^20 passes --------------------------------------------------------------------


def exact_lr(lifted: Tensor) -> Tensor:
    """The learning rate that writes a pair exactly, 1 / |phi(k)|^2: 1 for unit keys under identity and monomials."""
    return 1 / lifted.square().sum(-1)


def literal_passes(k: Tensor, v: Tensor, spec: MemorySpec, phi: Phi, passes: int) -> Tensor:
    """W (R, F, V) after `passes` passes of `scan` over k (R, n, D), v (R, n, V), from W = 0."""
    state = spec.initial_state([k.new_zeros(1, *spec.shapes[0])], batch=len(k))
    gates = Gates(lr=exact_lr(lift(k, phi)).unsqueeze(-1))
    with torch.no_grad():
        for _ in range(passes):
            _, state = scan(None, k.unsqueeze(2), v.unsqueeze(2), gates, state, spec, phi)
    return state.weights[0].squeeze(1)


def pass_map(k: Tensor, v: Tensor, spec: MemorySpec, phi: Phi) -> tuple[Tensor, Tensor]:
    """P (R, F, F) and Q (R, F, V) of one pass, W -> P W + Q.

    Columns of a linear memory are independent, so one scan gives both: it starts at [0 | I] and writes [v | 0].
    """
    features, values = spec.shapes[0]
    both = dataclasses.replace(spec, value_dim=values + features)
    start = torch.cat([k.new_zeros(features, values), torch.eye(features, dtype=k.dtype)], -1).unsqueeze(0)
    gates = Gates(lr=exact_lr(lift(k, phi)).unsqueeze(-1))
    with torch.no_grad():
        padded = F.pad(v, (0, features)).unsqueeze(2)
        _, state = scan(None, k.unsqueeze(2), padded, gates, both.initial_state([start], batch=len(k)), both, phi)
    Q, P = state.weights[0].squeeze(1).split([values, features], dim=-1)
    return P, Q


def weights_after(k: Tensor, v: Tensor, spec: MemorySpec, phi: Phi, doublings: list[int]) -> list[Tensor]:
    """W (R, F, V) after 2^i passes from W = 0, for each i of `doublings` (ascending)."""
    P, Q = pass_map(k, v, spec, phi)
    result = {}
    for i in range(doublings[-1] + 1):
        result[i] = Q
        P, Q = P @ P, P @ Q + Q
    return [result[i] for i in doublings]


def least_squares(k: Tensor, v: Tensor, phi: Phi) -> Tensor:
    return torch.linalg.lstsq(lift(k, phi), v, driver="gelsd").solution


def feature_point(spec: MemorySpec, n: int, seeds: int) -> dict[str, dict[str, float]]:
    """Error and recall of n unit keys for each number of passes, and for the least-squares weights."""
    torch.manual_seed(n)
    k, v = directions(seeds, n, spec.key_dim), directions(seeds, n, spec.value_dim)
    phi = make_features(spec, 1)
    weights = dict(zip(DOUBLINGS, weights_after(k, v, spec, phi, list(DOUBLINGS.values()))))
    weights[LEAST_SQUARES] = least_squares(k, v, phi)
    lifted = lift(k, phi)
    return {
        name: {"error": relative_error(lifted @ W, v).mean().item(), "recall": recall(lifted @ W, v).mean().item()}
        for name, W in weights.items()
    }


def largest_exact(point: Callable[[int], dict], most: int, passes: str) -> int:
    """The largest n <= most whose mean error stays below EXACT, by bisection."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if point(middle)[passes]["error"] < EXACT:
            low = middle
        else:
            high = middle
    return low


# --- structures, rules, windows ---------------------------------------------------------------------------------------


def candidates(spec: MemorySpec) -> list[float]:
    """Learning rates to try, from safe to too large: with a window of 16 each pair is written up to 16 times."""
    if spec.update_rule.unit_step:
        return [0.01, 0.03, 0.1, 0.3, 1.0]
    return [x / (1 if spec.window == 1 else 8) for x in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)]


def start(spec: MemorySpec, seeds: int, batch: int) -> MemoryState:
    """W0 = 0 for linear; a deep memory needs random initial weights to have a gradient at all. Heads are seeds."""
    scale = 0.0 if spec.network.is_matrix else 1.0
    return spec.initial_state([scale * torch.randn(seeds, *shape) / shape[0] ** 0.5 for shape in spec.shapes], batch)


def write_passes(k: Tensor, v: Tensor, lr: Tensor, state: MemoryState, spec: MemorySpec, passes: int) -> MemoryState:
    """`passes` passes over k, v (L, n, R, D). lr (L,) decays linearly to 0, because muon's steps do not shrink with the gradient.

    Muon sums the gradients since its last commit: momentum 1, and 0 at the first token of each interval.
    """
    L, n, R, _ = k.shape
    together = max(1, 256 // n)  # passes per call of scan
    for first in range(0, passes, together):
        count = min(together, passes - first)
        fall = (1 - torch.arange(first, first + count) / passes).repeat_interleave(n)
        rate = (lr[:, None] * fall)[..., None].expand(L, count * n, R)
        inside = (torch.arange(count * n) % spec.chunk_size != 0).to(k.dtype)[None, :, None].expand_as(rate)
        gates = Gates(lr=rate, momentum=inside if spec.momentum else None)
        with torch.no_grad():
            _, state = scan(None, k.repeat(1, count, 1, 1), v.repeat(1, count, 1, 1), gates, state, spec)
    return state


def structure_point(spec: MemorySpec, n: int, passes: int, seeds: int) -> dict:
    """Error and recall at the best of the candidate learning rates, that learning rate, and those that diverged."""
    assert n % spec.chunk_size == 0, "a pass must end with a commit"
    torch.manual_seed(n)
    k, v = (directions(n, seeds, dim, dtype=torch.float32) for dim in (spec.key_dim, spec.value_dim))
    rates = candidates(spec)
    k, v = (x.expand(len(rates), *x.shape) for x in (k, v))  # L n R D
    state = write_passes(k, v, torch.tensor(rates), start(spec, seeds, len(rates)), spec, passes)
    y, v = read(k, state, spec).transpose(1, 2), v.transpose(1, 2)  # L R n D
    errors = relative_error(y, v).mean(-1)  # L
    best = int(errors.argmin())
    return {
        "error": errors[best].item(),
        "recall": recall(y[best], v[best]).mean().item(),
        "lr": rates[best],
        "diverged": [rate for rate, error in zip(rates, errors.tolist()) if not error < 10],
    }


# --- against the bound ------------------------------------------------------------------------------------------------


def bound(spec: MemorySpec) -> int:
    """Upper bound on the number of random pairs: for a linear memory the rank of the lifted unit keys; for a deep one the number of
    weights per component of a value."""
    if spec.network.is_matrix:
        return theoretical_rank(spec, unit=True)
    return sum(a * b for a, b in spec.shapes) // spec.value_dim


def bare_capacity(spec: MemorySpec, seeds: int = 4) -> dict[str, int]:
    """The bound of a linear memory with anchor "token", and the largest n whose pairs are recalled exactly after 1, 64 and 2^20 passes, and
    with the least-squares weights.

    >>> bare_capacity(linear_spec("identity", dim=4), seeds=2)["least squares"]
    4
    """
    if not spec.network.is_matrix or spec.anchor != "token":
        raise ValueError(
            f"structure={spec.structure!r} with anchor={spec.anchor!r} has no closed form; see structure_point, or give linear and token"
        )
    point = functools.cache(functools.partial(feature_point, spec, seeds=seeds))
    return {"bound": bound(spec)} | {x: largest_exact(point, spec.lifted_dim, x) for x in (*DOUBLINGS, LEAST_SQUARES)}
