"""docs/theory.md, sections 7 and 8: the Muon rule and the feature maps."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from formulas import (
    D,
    close,
    coefficients,
    errors_at_anchor,
    f64,
    memory,
    network,
    newton_schulz,
    newton_schulz_gram,
    oracle,
    rand,
    tokens,
    window_weights,
)
from torch import Tensor

from mnemos.memory.newton_schulz import NS_COEFFICIENTS

# --- section 7: the Muon rule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(NS_COEFFICIENTS))
@pytest.mark.parametrize("rank", [2, 16])
def test_newton_schulz_keeps_rank_ignores_scale_and_has_a_gram_form(name, rank):
    S = rand(16, rank) @ rand(rank, 40)
    step = newton_schulz(S, name=name)
    close(newton_schulz(37.0 * S, name=name), step, 1e-10)
    close(newton_schulz_gram(S, name=name), step, 1e-10)
    assert int((torch.linalg.svdvals(step) > 1e-6).sum()) == rank
    close(newton_schulz_gram(S.float(), name=name).double(), step, 1e-3)


def test_the_gram_form_is_unsafe_in_float32_beyond_five_steps():
    S = rand(64, 8) @ rand(8, 256)

    def error(form, steps: int) -> float:
        true = newton_schulz(S, steps)
        return ((form(S.float(), steps).double() - true).norm() / true.norm()).item()

    assert error(newton_schulz, 5) < 1e-3 and error(newton_schulz_gram, 5) < 1e-3
    assert error(newton_schulz, 10) < 0.1 and not error(newton_schulz_gram, 10) < 1


def test_a_muon_step_has_spectral_norm_at_most_1_2024_and_a_convergent_one_at_most_1():
    s = torch.linspace(0, 1, 400_001, dtype=f64)
    for name, bound in (("muon", 1.20237), ("convergent", 1.0 + 1e-12)):
        ((a, b, c),) = NS_COEFFICIENTS[name]
        x = s
        for _ in range(5):
            x = a * x + b * x**3 + c * x**5
            assert x.min() >= 0 and x.max() <= bound
        if name == "muon":
            assert x.max() > 1.2023  # attained: 1.2 is not a bound
            assert x[s >= 0.0016].min() > 0.68 and x[s < 0.0014].max() < 0.68
            assert x[s > 0.01].max() < 1.14
        else:
            assert x[s >= 0.035].min() > 0.68 > x[s < 0.034].max() and x[s > 0.01].min() > 0.22


def test_two_printings_of_the_atlas_rule_descend_and_table_one_ascends():
    k, v = F.normalize(rand(D, D), dim=-1), rand(D, D)

    def final_loss(into_S: float, into_W: float) -> float:
        W, S = torch.zeros(D, D, dtype=f64), torch.zeros(D, D, dtype=f64)
        for _ in range(60):
            S = 0.5 * S + into_S * k.mT @ (k @ W - v)
            W = W + into_W * 0.05 * newton_schulz(S)
        return (k @ W - v).square().sum().item()

    start = v.square().sum().item()
    assert final_loss(+1, -1) < 0.3 * start  # equations 32-33
    assert final_loss(-1, +1) < 0.3 * start  # equations 57-58, and this library
    assert final_loss(-1, -1) > 2 * start  # Table 1


def test_a_muon_memory_follows_the_commit_rule():
    b, every = 6, 3
    spec, W0 = memory("mlp", 2, rule="muon", chunk_size=b, commit_every=every)
    q, k, v, gates = tokens(b)
    y_true, _, W_true, S_true = oracle(q, k, v, gates, spec, W0)
    a, d = errors_at_anchor(spec, k, v, lambda i, x: x @ W0[i], lambda i, g: g @ W0[i].mT)
    strength = window_weights(gates, b, 1, k.new_zeros(0)).diagonal()
    W, S, ys = list(W0), [torch.zeros_like(w) for w in W0], []
    for t in range(b):
        S = [gates.momentum[t] * s - strength[t] * torch.outer(a[i][t], d[i][t]) for i, s in enumerate(S)]
        W = [gates.retain[t] * w for w in W]
        if (t + 1) % every == 0:
            steps = [newton_schulz(s) if s.shape[0] <= s.shape[1] else newton_schulz(s.mT).mT for s in S]
            W = [w + gates.lr[t] * step for w, step in zip(W, steps)]
        ys.append(network(spec, q[t : t + 1], lambda i, x, W=W: x @ W[i]))
    close(torch.cat(ys), y_true, 1e-9)
    for i in range(2):
        close(W[i], W_true[i], 1e-9)
        close(S[i], S_true[i])


# --- section 8: feature maps ------------------------------------------------------------------------------------------


def monomials(x: Tensor, p: int, a: list[float]) -> Tensor:
    features = []
    for i in range(p + 1):
        for powers in itertools.combinations_with_replacement(range(x.shape[-1]), i):
            counts = [powers.count(j) for j in set(powers)]
            ways = math.factorial(i) / math.prod(math.factorial(n) for n in counts)
            features.append(math.sqrt(a[i] / sum(a) * ways) * x[..., list(powers)].prod(-1))
    return torch.stack(features, -1)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_monomials_have_the_normalised_polynomial_kernel(p):
    a = [1 / math.factorial(i) for i in range(p + 1)]
    q, k = F.normalize(rand(5, D), dim=-1), F.normalize(rand(6, D), dim=-1)
    kernel = sum(a[i] * (q @ k.mT) ** i for i in range(p + 1)) / sum(a)
    close(monomials(q, p, a) @ monomials(k, p, a).mT, kernel)
    assert monomials(q, p, a).shape[-1] == math.comb(D + p, p)
    close(monomials(k, p, a).norm(dim=-1), torch.ones(6, dtype=f64))


def test_only_the_full_monomial_map_raises_the_rank():
    d, keys = 6, F.normalize(rand(100, 6), dim=-1)

    def rank(x: Tensor) -> int:
        return int(torch.linalg.matrix_rank(x))

    assert rank(keys) == d
    assert rank(keys + keys**2 / 2 + keys**3 / 6) == d
    lifted = torch.cat([keys, (keys.unsqueeze(-1) * keys.unsqueeze(-2)).flatten(-2)], -1)
    assert rank(lifted @ rand(d + d * d, d)) == d
    for p in (2, 3):
        a = [1 / math.factorial(i) for i in range(p + 1)]
        assert rank(monomials(rand(100, d), p, a)) == math.comb(d + p, p)
        # on the unit sphere x_1^2 + ... + x_d^2 = 1 ties monomials together
        assert rank(monomials(keys, p, a)) == math.comb(d + p - 1, p) + math.comb(d + p - 2, p - 1)
    assert math.comb(18, 2) == 153 and math.comb(17, 2) + math.comb(16, 1) == 152


def test_orthogonal_keys_overlap_under_the_polynomial_kernel():
    a = [1.0, 1.0, 0.5]
    e = torch.eye(D, dtype=f64)
    overlap = monomials(e, 2, a) @ monomials(e, 2, a).mT
    close(overlap[0, 1], torch.tensor(0.4, dtype=f64))


def test_a_growing_memory_needs_two_shares_per_key():
    """Section 8.4, with a finite map in place of the infinite one: W = sum w phi^T d, S = sum s phi^T d."""
    b, T = 4, 12
    spec, _ = memory(chunk_size=b)
    q, k, v, gates = tokens(T)
    y_true, *_ = oracle(q, k, v, gates, spec, [torch.zeros(D, D, dtype=f64)])
    stored_k, stored_d = torch.zeros(0, D, dtype=f64), torch.zeros(0, D, dtype=f64)
    w, s, ys = torch.zeros(0, dtype=f64), torch.zeros(0, dtype=f64), []
    for start in range(0, T, b):
        part = gates.map(lambda x, start=start: x[start : start + b])
        C, beta, f, m, n = coefficients(part, window_weights(part, b, 1, k.new_zeros(0)))
        own, query = k[start : start + b], q[start : start + b]
        d = (w * (own @ stored_k.mT)) @ stored_d - v[start : start + b]
        kept = beta[1:, None] * w + f[1:, None] * s
        ys.append((kept * (query @ stored_k.mT)) @ stored_d - (C[1:] * (query @ own.mT)) @ d)
        w, s = torch.cat([beta[-1] * w + f[-1] * s, -C[-1]]), torch.cat([m[-1] * s, -n[-1]])
        stored_k, stored_d = torch.cat([stored_k, own]), torch.cat([stored_d, d])
    close(torch.cat(ys), y_true)
