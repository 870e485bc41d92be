"""The Muon rule and Newton–Schulz against their textbook forms. Shapes as in `loops.py`."""

from __future__ import annotations

import pytest
import torch
from loops import (
    EXACT,
    D,
    E,
    H,
    T,
    apply,
    assert_same,
    f64,
    gate,
    normal,
    outer,
    rows,
    run,
    scalar,
    tokens,
    track,
    uniform,
)
from torch import Tensor

from helpers import assert_close
from mnemos.memory import Gates, MemorySpec, MemoryState, NeuralMemory, newton_schulz, rules

MUON, CONVERGENT = (3.4445, -4.7750, 2.0315), (1.875, -1.25, 0.375)

pytestmark = pytest.mark.usefixtures("seed")


# Muon ---------------------------------------------------------------------------------------------------------------


def textbook_newton_schulz(S: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """X <- a X + b (X Xᵀ) X + c (X Xᵀ)² X from X = S / |S|, for one matrix."""
    a, b, c = coefficients
    X = S / S.norm()
    for _ in range(steps):
        G = X @ X.T
        X = a * X + b * G @ X + c * G @ G @ X
    return X


def each_matrix(S: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    return torch.stack([torch.stack([textbook_newton_schulz(m, 5, coefficients) for m in row]) for row in S])


@pytest.mark.parametrize(("commit", "chunk"), [(1, 8), (4, 8), (8, 8), (1, 1)])
@pytest.mark.parametrize("name", ["muon", "convergent"])
def test_muon_on_a_linear_memory_steps_along_the_orthogonalised_momentum_at_every_commit(commit, chunk, name):
    q, k, v = tokens()
    lr, momentum, retain, strength, W0 = gate(high=0.5), gate(low=0.5), gate(low=0.8), gate(), normal(H, D, E)
    leaves = track(q=q, k=k, v=v, lr=lr, momentum=momentum, retain=retain, gate=strength, W0=W0)
    spec = MemorySpec(
        D, E, structure="linear", rule="muon", chunk_size=chunk, commit_every=commit, window=3, ns_coefficients=name
    )
    actual = run(spec, q, k, v, Gates(lr=lr, momentum=momentum, retain=retain, gate=strength), [W0])

    (W,), ys = rows([W0]), []
    S = torch.zeros_like(W)
    for t in range(T):
        if t % chunk == 0:
            anchor = W
        G = torch.zeros_like(W)
        for i in range(max(0, t - 2), t + 1):
            G = G + scalar(strength[:, i]) * outer(k[:, i], apply(k[:, i], anchor) - v[:, i])
        S = scalar(momentum[:, t]) * S - G
        W = scalar(retain[:, t]) * W
        if (t + 1) % commit == 0:
            W = W + scalar(lr[:, t]) * each_matrix(S, MUON if name == "muon" else CONVERGENT)
        ys.append(apply(q[:, t], W))
    assert_same(actual, (torch.stack(ys, 1), [W]), leaves)


@pytest.mark.parametrize("steps", [1, 5])
def test_muon_steps_along_the_momentum_whatever_the_weights_are(steps):
    q, k, v = tokens()
    gates = Gates(lr=gate(), momentum=gate(), gate=gate())
    spec = MemorySpec(
        D, E, structure="linear", objective="dot", rule="muon", chunk_size=8, commit_every=2, ns_steps=steps
    )
    W0 = normal(H, D, E)
    _, (W,) = run(spec, q, k, v, gates, [W0])
    _, (V,) = run(spec, q, k, v, gates, [10 * W0])
    assert_close(V - 10 * W0, W - W0, 1e-12, "step")


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("shape", [(4, 4), (5, 9), (5, 10), (4, 17), (17, 4)])
@pytest.mark.parametrize("name", ["muon", "convergent"])
def test_newton_schulz_and_its_gradient_are_the_textbook_s(shape, steps, name):
    """Wide matrices go through their Gram matrices, three iterations at a time; others directly."""
    coefficients = MUON if name == "muon" else CONVERGENT
    S = normal(3, *shape).requires_grad_()
    actual = newton_schulz(S, steps, coefficients)
    wide = S if shape[0] <= shape[1] else S.mT
    expected = torch.stack([textbook_newton_schulz(m, steps, coefficients) for m in wide])
    expected = expected if shape[0] <= shape[1] else expected.mT
    assert_close(actual, expected, 1e-12, "step")
    weight = normal(*actual.shape)
    found, wanted = (torch.autograd.grad(y, S, weight)[0] for y in (actual, expected))
    assert_close(found, wanted, 1e-11, "gradient")


@pytest.mark.parametrize("steps", [5, 10])
@pytest.mark.parametrize("least", [-3.0, -6.0, -12.0])
def test_newton_schulz_in_float32_keeps_the_small_singular_values_of_wide_matrices(least, steps):
    U = torch.linalg.qr(normal(4, 32, 32)).Q
    V = torch.linalg.qr(normal(4, 128, 32)).Q
    S = U * torch.logspace(0, least, 32, dtype=f64) @ V.mT
    exact = newton_schulz(S, steps, MUON)
    direct = torch.stack([textbook_newton_schulz(m, steps, MUON) for m in S.float()]).double()
    lost = (newton_schulz(S.float(), steps, MUON).double() - exact).norm() / exact.norm()
    assert lost < 3 * (direct - exact).norm() / exact.norm() + 1e-6


def newton_schulz_inputs() -> dict[str, Tensor]:
    """Stacks of matrices, wide, square and tall: random, ill-conditioned, of rank one, zero."""
    made = {}
    for shape in ((4, 4), (5, 9), (9, 5), (1, 6), (16, 16), (4, 13), (24, 8)):
        d = min(shape)
        U = torch.linalg.qr(normal(300, shape[0], d)).Q
        V = torch.linalg.qr(normal(300, shape[1], d)).Q
        spread = torch.logspace(0, -8, d, dtype=f64).expand(300, d) if d > 1 else torch.ones(300, 1, dtype=f64)
        log_uniform = 10 ** uniform(300, d, low=-6, high=3)
        made[f"random {shape}"] = normal(300, *shape, scale=100.0)
        made[f"small {shape}"] = normal(300, *shape, scale=1e-5)
        made[f"ill-conditioned {shape}"] = U * spread.unsqueeze(-2) @ V.mT
        made[f"any spectrum {shape}"] = U * log_uniform.unsqueeze(-2) @ V.mT
        made[f"rank one {shape}"] = U[..., :1] @ V[..., :1].mT * 7.0
        made[f"zero {shape}"] = torch.zeros(2, *shape, dtype=f64)
    return made


def peak(coefficients: tuple[float, float, float]) -> float:
    """Largest a x + b x³ + c x⁵ over the values that iterates can have: 0 <= x <= the largest so far."""
    a, b, c = coefficients
    top = 1.0
    for _ in range(3):
        x = torch.linspace(0, top, 200_001, dtype=f64)
        top = max(top, (a * x + b * x**3 + c * x**5).max().item())
    return top


def test_the_muon_polynomial_peaks_at_1_2024_and_the_convergent_one_at_1():
    assert peak(CONVERGENT) == 1.0
    assert 1.2 < peak(MUON) < 1.2024
    small = 10 ** torch.linspace(-4, 0, 4001, dtype=f64)  # some small singular value is at the peak after five steps
    S = torch.diag_embed(torch.stack([torch.ones_like(small), small], -1))
    largest = torch.linalg.svdvals(newton_schulz(S, 5, MUON)).max().item()
    assert abs(largest - peak(MUON)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("coefficients", [MUON, CONVERGENT])
@pytest.mark.parametrize("steps", [1, 3, 5, 12])
def test_singular_values_of_the_muon_step_never_exceed_the_peak_of_its_polynomial(coefficients, steps, dtype):
    bound = peak(coefficients) + (1e-9 if dtype == f64 else 1e-5)
    for name, S in newton_schulz_inputs().items():
        largest = torch.linalg.svdvals(newton_schulz(S.to(dtype), steps, coefficients).double()).max().item()
        assert largest <= bound, f"{name}: {largest} > {bound}"


def test_the_convergent_coefficients_bring_every_singular_value_to_one():
    for shape in ((4, 4), (5, 9), (9, 5)):
        d = min(shape)
        U, V = torch.linalg.qr(normal(100, shape[0], d)).Q, torch.linalg.qr(normal(100, shape[1], d)).Q
        S = U * uniform(100, d, low=1.0, high=4.0).unsqueeze(-2) @ V.mT
        values = torch.linalg.svdvals(newton_schulz(S, 8, CONVERGENT))
        assert (values - 1).abs().max() <= 1e-2
        assert_close(newton_schulz(S, 12, CONVERGENT), U @ V.mT, 1e-9, "the orthogonal factor")


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (3, 3)])
def test_a_zero_momentum_takes_no_step_and_gives_no_gradient(shape):
    for coefficients in (MUON, CONVERGENT):
        S = torch.zeros(2, *shape, dtype=f64, requires_grad=True)
        step_ = newton_schulz(S, 5, coefficients)
        (gradient,) = torch.autograd.grad(step_.sum(), S)
        assert torch.equal(step_, torch.zeros_like(step_)) and torch.equal(gradient, torch.zeros_like(S))


def test_a_zero_matrix_among_others_leaves_their_steps_alone():
    S = normal(3, 4, 6)
    S[1] = 0
    S.requires_grad_()
    out = newton_schulz(S, 5, MUON)
    (gradient,) = torch.autograd.grad(out.square().sum(), S)
    assert out[1].abs().max() == 0 and gradient[1].abs().max() == 0 and gradient.isfinite().all()
    for i in (0, 2):
        assert_close(out[i], newton_schulz(S[i], 5, MUON), 1e-12, f"matrix {i}")


def test_newton_schulz_orthogonalises_each_matrix_by_itself():
    S = normal(2, 3, 4, 6)
    out = newton_schulz(S, 5, MUON)
    assert_close(out, each_matrix(S, MUON), EXACT, "against one matrix at a time")
    changed = S.clone()
    changed[0, 1] *= 1000
    changed[0, 1, 0] += 3
    other = newton_schulz(changed, 5, MUON)
    keep = torch.ones(2, 3, dtype=torch.bool)
    keep[0, 1] = False
    assert torch.equal(other[keep], out[keep])
    assert not torch.equal(other[~keep], out[~keep])


def test_newton_schulz_does_not_see_the_scale_of_its_matrix():
    S = normal(3, 4, 6)
    assert_close(newton_schulz(1e4 * S, 5, MUON), newton_schulz(S, 5, MUON), 1e-12, "scaled")


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 5, 3), (1, 2, 4, 4)])
@pytest.mark.parametrize("coefficients", [MUON, CONVERGENT])
def test_gradients_of_newton_schulz_are_those_of_finite_differences(shape, coefficients):
    S = normal(*shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: newton_schulz(x, 3, coefficients), (S,), atol=1e-7, rtol=1e-6)


def test_a_step_iterates_only_for_the_rows_that_commit(monkeypatch):
    """Sessions at different places would else pay for a commit at every token."""
    memory, x = NeuralMemory(16, heads=2, rule="muon", chunk_size=8, commit_every=4).double(), normal(3, 30, 16)
    iterated = []

    def counted(S: Tensor, *choices) -> Tensor:
        iterated.append(len(S))
        return newton_schulz(S, *choices)

    with torch.no_grad():
        starts = (2, 7, 9)  # commits come after the 2nd, the 1st and the 3rd token from there
        state = MemoryState.stack([memory(x[row : row + 1, :start])[1] for row, start in enumerate(starts)])
        expected = memory(x)[0]
        monkeypatch.setattr(rules, "newton_schulz", counted)
        for i in range(4):
            token = torch.stack([x[row, start + i] for row, start in enumerate(starts)]).unsqueeze(1)
            y, state = memory(token, state)
            right = torch.stack([expected[row, start + i] for row, start in enumerate(starts)])
            assert_close(y[:, 0], right, 1e-10, f"token {i}")
    maps = len(memory.spec.shapes)
    assert iterated == [2] * maps * 3  # three tokens at which one row of two heads commits, and one without
