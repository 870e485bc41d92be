"""docs/theory.md, section 9: which steps stay bounded."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from formulas import (
    D,
    close,
    errors_at_anchor,
    f64,
    gelu_slope,
    memory,
    network,
    rand,
)
from torch import Tensor

# --- section 9: stability ---------------------------------------------------------------------------------------------


def chunk_map(step: float, momentum: float, b: int, retain: float = 1.0, present: int | None = None) -> Tensor:
    """(error, momentum) along one key over a chunk whose last `present` tokens carry it; step = lr g |phi|^2."""
    columns = []
    for e, z in ((1.0, 0.0), (0.0, 1.0)):
        anchor = e
        for t in range(b):
            z = momentum * z - (step * anchor if present is None or t >= b - present else 0.0)
            e = retain * e + z
        columns.append((e, z))
    return torch.tensor(columns, dtype=f64).mT


def radius(M: Tensor) -> float:
    return torch.linalg.eigvals(M).abs().max().item()


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("b", [1, 2, 16, 64])
def test_repeated_keys_are_stable_exactly_up_to_the_two_conditions(momentum, b):
    q = momentum**b
    f = momentum * (1 - q) / (1 - momentum)
    flip = 2 * (1 - momentum) / (b - 2 * f / (1 + q))
    spiral = math.inf if f - q * b < 1e-12 else (1 - q) * (1 - momentum) / (f - q * b)
    limit = min(flip, spiral)
    assert radius(chunk_map(0.999 * limit, momentum, b)) <= 1 + 1e-9
    assert radius(chunk_map(1.001 * limit, momentum, b)) > 1
    assert 2 * (1 - momentum) / b <= limit * (1 + 1e-12)  # the rule of thumb suffices
    if b == 1:
        assert limit == pytest.approx(2 * (1 + momentum))


def test_a_chunk_of_one_key_followed_by_silence_is_stable_exactly_up_to_the_rule():
    for momentum, b in ((0.0, 16), (0.5, 16), (0.9, 64)):
        silence = torch.linalg.matrix_power(chunk_map(0.0, momentum, b), 50)
        rule = 2 * (1 - momentum) / b
        assert radius(silence @ chunk_map(0.999 * rule, momentum, b)) <= 1 + 1e-9
        assert radius(silence @ chunk_map(1.001 * rule, momentum, b)) > 1


BURSTS = [(0.5, 1, 1.0), (0.9, 1, 0.0320), (0.9, 4, 0.0230), (0.9, 16, 0.0125), (0.95, 16, 0.00397)]


@pytest.mark.parametrize("momentum, b, expected", BURSTS)
def test_bursts_and_gaps_make_momentum_diverge_earlier(momentum, b, expected):
    gap = chunk_map(0.0, momentum, b)
    gaps = [torch.linalg.matrix_power(gap, n) for n in (*range(12), 16, 24, 40, 80)]

    def diverges(step: float) -> bool:
        for present in {b, b // 2 or 1}:
            M, burst = chunk_map(step, momentum, b, present=present), torch.eye(2, dtype=f64)
            for _ in range(30):
                burst = M @ burst
                if torch.linalg.eigvals(torch.stack([g @ burst for g in gaps])).abs().max() > 1 + 1e-9:
                    return True
        return False

    assert diverges(1.02 * expected) and not diverges(0.98 * expected)


def test_a_recurring_key_diverges_under_high_momentum_and_not_under_the_proven_bound():
    keys, value = torch.eye(D, dtype=f64), torch.ones(1, D, dtype=f64)

    def largest(lr: float) -> float:
        W, S, peak = torch.zeros(D, D, dtype=f64), torch.zeros(D, D, dtype=f64), 0.0
        for t in range(1000):
            k = keys[:1] if t % 45 < 5 else keys[1 + t % (D - 1)][None]
            S = 0.9 * S - lr * k.mT @ (k @ W - value)
            W = W + S
            peak = max(peak, W.norm().item())
        return peak

    assert largest(0.1) > 1e6
    assert largest(2 * 0.1**2 / 1.9) < 2 * D


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("c", [1, 3])
def test_the_online_rule_has_a_lyapunov_function_for_any_keys(momentum, c):
    bound = 2 * (1 - momentum) ** 2 / (1 + momentum)
    kappa, rho = momentum / (1 - momentum), momentum / (1 - momentum) ** 2
    W, S, keys = rand(3, 3), rand(3, 3), []
    energy = (W + kappa * S).square().sum() + rho * S.square().sum()
    for t in range(300):
        fresh = F.normalize(rand(1, 3), dim=-1)
        keys = ([*keys, fresh] if t % 7 else [*keys, keys[-1] if keys else fresh])[-c:]
        lr = bound / len(keys) * (1.0 if t % 3 else torch.rand(()).item())
        S = momentum * S - lr * sum(k.mT @ (k @ W) for k in keys)  # W is the distance to a W that fits all tokens
        W = W + S
        now = (W + kappa * S).square().sum() + rho * S.square().sum()
        assert now <= energy * (1 + 1e-12)
        energy = now


def test_retain_bounds_the_weights_and_shrinks_recall():
    retain, lr, b = 0.95, 0.8, 8
    k, v = F.normalize(rand(1, D), dim=-1), rand(1, D)
    W = torch.zeros(D, D, dtype=f64)
    for _ in range(2000):
        W = retain * W - lr * k.mT @ (k @ W - v)
        assert W.norm() <= lr * v.norm() / (1 - retain)
    close(k @ W, lr / (1 - retain + lr) * v)
    limit = (1 + retain**b) * (1 - retain) / (1 - retain**b)
    assert radius(chunk_map(0.999 * limit, 0.0, b, retain)) < 1 < radius(chunk_map(1.001 * limit, 0.0, b, retain))
    for lr in (0.3, 1.0):
        for kept in (0.0, 0.3, 1.0):
            step = kept * torch.eye(D, dtype=f64) - lr * k.mT @ k
            assert torch.linalg.matrix_norm(step, 2) <= 1 + 1e-12


def test_decay_alone_bounds_the_dot_objective():
    lr, momentum, retain = 0.5, 0.6, 0.9
    W, S = torch.zeros(D, D, dtype=f64), torch.zeros(D, D, dtype=f64)
    k, v = F.normalize(rand(1, D), dim=-1), F.normalize(rand(1, D), dim=-1)
    for _ in range(400):
        S = momentum * S + lr * k.mT @ v
        W = retain * W + S
    close(W.norm(), torch.tensor(lr / ((1 - momentum) * (1 - retain)), dtype=f64))


def test_random_keys_allow_a_larger_step_than_equal_keys():
    b = d = 64
    K = F.normalize(rand(20, b, d), dim=-1)
    top = torch.linalg.eigvalsh(K.mT @ K)[:, -1].mean().item()
    assert top == pytest.approx((1 + math.sqrt(b / d)) ** 2, rel=0.1)


def test_the_step_a_deep_memory_sees_is_its_tangent_kernel():
    spec, W0 = memory("mlp", 3)
    k, v = F.normalize(rand(1, D), dim=-1), rand(1, D)
    a, d = errors_at_anchor(spec, k, v, lambda i, x: x @ W0[i], lambda i, g: g @ W0[i].mT)
    lr, e = 1e-6, d[-1]
    moved = network(spec, k, lambda i, x: x @ (W0[i] - lr * a[i].mT @ d[i]))
    z = [x @ w for x, w in zip(a, W0)]
    J2 = torch.eye(D, dtype=f64)
    J1 = torch.diag(gelu_slope(z[1][0])) @ W0[2] @ J2
    J0 = torch.diag(gelu_slope(z[0][0])) @ W0[1] @ J1
    kernel = sum(x.square().sum() * J.mT @ J for x, J in zip(a, (J0, J1, J2)))
    change = moved - (d[-1] + v)
    close(change / lr, -e @ kernel, 1e-4)
