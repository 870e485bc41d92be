"""Known models fall out of the memory: each against its own formula, written here as a plain loop or a masked matrix.

Nothing of the engine is used on the expected side; gradients of both sides come from autograd through their own code.
B batch, T time, H heads, D key dim, E value dim. Row-vector convention, x W.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from helpers import assert_close
from mnemos.memory import Gates, MemorySpec, newton_schulz, read, scan, step

B, T, H, D, E = 2, 37, 3, 5, 4
EXACT = 1e-10
f64 = torch.float64
MUON, CONVERGENT = (3.4445, -4.7750, 2.0315), (1.875, -1.25, 0.375)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=f64) * scale


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * torch.rand(*shape, dtype=f64)


def gate(low: float = 0.0, high: float = 1.0) -> Tensor:
    return uniform(B, T, H, low=low, high=high)


def tokens(key_dim: int = D, value_dim: int = E, key_scale: float = 0.6) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v: nothing is normalised, and no two of them have one scale."""
    q, k, v = (
        normal(B, T, H, key_dim, scale=3.0),
        normal(B, T, H, key_dim, scale=key_scale),
        normal(B, T, H, value_dim, scale=2.0),
    )
    return q, k, v


def outer(k: Tensor, d: Tensor) -> Tensor:  # B H D, B H E -> B H D E
    return k.unsqueeze(-1) * d.unsqueeze(-2)


def apply(x: Tensor, W: Tensor) -> Tensor:  # B H D, B H D E -> B H E
    return (x.unsqueeze(-2) @ W).squeeze(-2)


def scalar(x: Tensor) -> Tensor:  # B H -> B H 1 1
    return x[..., None, None]


def rows(W0: list[Tensor]) -> list[Tensor]:
    return [w.expand(B, *w.shape) for w in W0]


def run(spec: MemorySpec, q, k, v, gates: Gates, W0: list[Tensor]):
    """y and the weights after the last token."""
    y, state = scan(q, k, v, gates, spec.initial_state(W0, batch=k.shape[0]), spec)
    return y, state.weights


def assert_same(actual, expected, leaves: dict[str, Tensor], tolerance: float = EXACT) -> None:
    """Outputs, final weights, and the gradients of a random functional of both."""
    (y, W), (ry, rW) = actual, expected
    assert_close(y, ry, tolerance, "y")
    for a, b in zip(W, rW):
        assert_close(a, b, tolerance, "weights")
    weigh_y, weigh_W = torch.randn_like(ry), [torch.randn_like(w) for w in rW]

    def gradients(y: Tensor, W: list[Tensor]) -> tuple[Tensor, ...]:
        total = (y * weigh_y).sum() + sum((w * x).sum() for w, x in zip(W, weigh_W))
        return torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)

    for name, a, b in zip(leaves, gradients(y, W), gradients(ry, rW)):
        assert_close(a, b, tolerance, f"gradient of {name}")


def track(**named: Tensor | None) -> dict[str, Tensor]:
    return {name: x.requires_grad_() for name, x in named.items() if x is not None}


# Linear attention and its decayed form ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
@pytest.mark.parametrize("anchor", ["chunk", "token"])
def test_a_hebbian_linear_memory_is_linear_attention_at_any_chunk_size(chunk, anchor):
    q, k, v = tokens()
    lr = torch.ones(B, T, H, dtype=f64)
    leaves = track(q=q, k=k, v=v, lr=lr)
    spec = MemorySpec(D, E, structure="linear", objective="dot", chunk_size=chunk, anchor=anchor)
    actual = run(spec, q, k, v, Gates(lr=lr), [torch.zeros(H, D, E, dtype=f64)])

    scores = torch.einsum("bthd,bihd->bhti", q, k).tril()
    weighted = lr.unsqueeze(-1) * v
    expected = torch.einsum("bhti,bihe->bthe", scores, weighted), [torch.einsum("bihd,bihe->bhde", k, weighted)]
    assert_same(actual, expected, leaves)


@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_constant_decay_per_head_is_retentive_linear_attention(chunk):
    q, k, v = tokens()
    lr, retain = torch.ones(B, T, H, dtype=f64), torch.tensor([0.97, 0.5, 1.0], dtype=f64)
    leaves = track(q=q, k=k, v=v, retain=retain)
    spec = MemorySpec(D, E, structure="linear", objective="dot", chunk_size=chunk, momentum=False)
    actual = run(spec, q, k, v, Gates(lr=lr, retain=retain.expand(B, T, H)), [torch.zeros(H, D, E, dtype=f64)])

    steps = torch.arange(T, dtype=f64)
    distance = (steps.unsqueeze(-1) - steps).clamp(min=0)
    decay = (retain[:, None, None] ** distance).tril()  # H T T
    y = torch.einsum("bthd,bihd,hti,bihe->bthe", q, k, decay, v)
    W = torch.einsum("hi,bihd,bihe->bhde", decay[:, -1], k, v)
    assert_same(actual, (y, [W]), leaves)


# The delta rule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_the_token_anchor_is_deltanet_at_any_chunk_size(chunk):
    q, k, v = tokens()
    beta, W0 = gate(high=0.9), normal(H, D, E)
    leaves = track(q=q, k=k, v=v, beta=beta, W0=W0)
    spec = MemorySpec(D, E, structure="linear", anchor="token", momentum=False, chunk_size=chunk)
    actual = run(spec, q, k, v, Gates(lr=beta), [W0])

    (W,), ys = rows([W0]), []
    for t in range(T):
        W = W - scalar(beta[:, t]) * outer(k[:, t], apply(k[:, t], W) - v[:, t])
        ys.append(apply(q[:, t], W))
    assert_same(actual, (torch.stack(ys, 1), [W]), leaves)


def test_deltanet_is_chunk_size_one_too():
    q, k, v = tokens()
    beta, W0 = gate(high=0.9), normal(H, D, E)
    token = run(MemorySpec(D, E, structure="linear", anchor="token", momentum=False), q, k, v, Gates(lr=beta), [W0])
    one = run(MemorySpec(D, E, structure="linear", chunk_size=1, momentum=False), q, k, v, Gates(lr=beta), [W0])
    assert_close(token[0], one[0], EXACT, "y")
    assert_close(token[1][0], one[1][0], EXACT, "weights")


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_measuring_the_error_after_the_decay_is_gated_deltanet(chunk):
    q, k, v = tokens()
    beta, alpha, W0 = gate(high=0.9), gate(low=0.6), normal(H, D, E)
    with torch.no_grad():
        alpha[0, 3], alpha[1, 20], alpha[:, 7] = 0.0, 0.0, 1.0
    leaves = track(q=q, k=k, v=v, beta=beta, alpha=alpha, W0=W0)
    spec = MemorySpec(D, E, structure="linear", anchor="token", momentum=False, chunk_size=chunk, decay_first=True)
    actual = run(spec, q, k, v, Gates(lr=beta, retain=alpha), [W0])

    (W,), ys = rows([W0]), []
    for t in range(T):
        W = scalar(alpha[:, t]) * W
        W = W + scalar(beta[:, t]) * outer(k[:, t], v[:, t] - apply(k[:, t], W))
        ys.append(apply(q[:, t], W))
    assert_same(actual, (torch.stack(ys, 1), [W]), leaves)


def test_titans_measures_the_error_before_the_decay_and_agrees_with_gated_deltanet_at_retain_one_only():
    q, k, v = tokens()
    beta, W0 = gate(high=0.9), normal(H, D, E)
    before = MemorySpec(D, E, structure="linear", anchor="token", momentum=False)
    after = dataclasses.replace(before, decay_first=True)
    same = Gates(lr=beta, retain=torch.ones(B, T, H, dtype=f64))
    assert_close(run(before, q, k, v, same, [W0])[0], run(after, q, k, v, same, [W0])[0], EXACT, "y at retain 1")

    alpha = torch.full((B, T, H), 0.9, dtype=f64)
    y, (W,) = run(before, q, k, v, Gates(lr=beta, retain=alpha), [W0])
    other, _ = run(after, q, k, v, Gates(lr=beta, retain=alpha), [W0])
    assert (y - other).abs().max() > 0.1
    (V,) = rows([W0])
    for t in range(T):
        V = scalar(alpha[:, t]) * V - scalar(beta[:, t]) * outer(k[:, t], apply(k[:, t], V) - v[:, t])
    assert_close(W, V, EXACT, "Titans' weights")


# Gradients at the start of a chunk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4, 16, 64])
def test_a_linear_memory_is_ttt_linear_with_mini_batches(batch_size):
    q, k, v = tokens()
    lr, W0 = gate(high=0.2), normal(H, D, E)
    leaves = track(q=q, k=k, v=v, lr=lr, W0=W0)
    spec = MemorySpec(D, E, structure="linear", chunk_size=batch_size, momentum=False)
    actual = run(spec, q, k, v, Gates(lr=lr), [W0])

    (start,), ys = rows([W0]), []
    for first in range(0, T, batch_size):
        W = start
        for t in range(first, min(first + batch_size, T)):
            W = W - scalar(lr[:, t]) * outer(k[:, t], apply(k[:, t], start) - v[:, t])
            ys.append(apply(q[:, t], W))
        start = W
    assert_same(actual, (torch.stack(ys, 1), [start]), leaves)


def gelu(z: Tensor) -> Tensor:
    return z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))


def gelu_slope(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def mlp(x: Tensor, W: list[Tensor]) -> Tensor:
    return x + apply(gelu(apply(x, W[0])), W[1])


def mlp_gradient(k: Tensor, v: Tensor, W: list[Tensor]) -> list[Tensor]:
    """d/dW of half the squared error of k + GELU(k W1) W2, by hand."""
    z = apply(k, W[0])
    error = mlp(k, W) - v
    back = apply(error, W[1].mT) * gelu_slope(z)
    return [outer(k, back), outer(gelu(z), error)]


@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize("with_momentum", [False, True])
def test_a_two_layer_memory_is_titans(chunk, with_momentum):
    spec = MemorySpec(D, D, structure="mlp", depth=2, expansion=2, chunk_size=chunk, momentum=with_momentum)
    q, k, v = tokens(D, D)
    lr, retain = gate(high=0.1), gate(low=0.8)
    momentum = gate(high=0.9) if with_momentum else None
    W0 = [normal(H, *shape, scale=0.4) for shape in spec.shapes]
    assert [tuple(w.shape) for w in W0] == [(H, D, 2 * D), (H, 2 * D, D)]
    leaves = track(q=q, k=k, v=v, lr=lr, retain=retain, momentum=momentum, W1=W0[0], W2=W0[1])
    actual = run(spec, q, k, v, Gates(lr=lr, retain=retain, momentum=momentum), W0)

    W, ys = rows(W0), []
    S = [torch.zeros_like(w) for w in W]
    for t in range(T):
        if t % chunk == 0:
            anchor = W
        G = mlp_gradient(k[:, t], v[:, t], anchor)
        carried = [torch.zeros_like(s) if momentum is None else scalar(momentum[:, t]) * s for s in S]
        S = [s - scalar(lr[:, t]) * g for s, g in zip(carried, G)]
        W = [scalar(retain[:, t]) * w + s for w, s in zip(W, S)]
        ys.append(mlp(q[:, t], W))
    assert_same(actual, (torch.stack(ys, 1), W), leaves)


def test_every_structure_is_its_formula_with_the_unlifted_query_added_where_the_dimensions_agree():
    x = normal(B, T, H, D)
    flat = x.transpose(1, 2)  # B H T D
    for depth in (1, 2, 3):
        for value_dim, residual in ((D, flat), (E, 0.0)):
            spec = MemorySpec(D, value_dim, structure="mlp", depth=depth, expansion=1.5)
            hidden = round(1.5 * value_dim)
            widths = [D, *[hidden] * (depth - 1), value_dim]
            W0 = [normal(H, a, b) for a, b in itertools.pairwise(widths)]
            z = flat
            for w in W0[:-1]:
                z = gelu(z @ w)
            expected = (z @ W0[-1] + residual).transpose(1, 2)
            assert_close(read(x, spec.initial_state(W0, batch=B), spec), expected, 1e-13, f"mlp {depth}")
    spec = MemorySpec(D, D, structure="gated_mlp", expansion=2)
    Wg, Wv, Wo = normal(H, D, 2 * D), normal(H, D, 2 * D), normal(H, 2 * D, D)
    expected = (flat + (gelu(flat @ Wg) * (flat @ Wv)) @ Wo).transpose(1, 2)
    assert_close(read(x, spec.initial_state([Wg, Wv, Wo], batch=B), spec), expected, 1e-13, "gated mlp")


# The Omega rule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "chunk"), [(1, 4), (5, 8), (11, 4), (T, 16), (50, 64)])
@pytest.mark.parametrize("structure", ["linear", "mlp"])
def test_the_omega_rule_sums_over_the_last_tokens_at_the_anchor_of_the_current_chunk(window, chunk, structure):
    value_dim = E if structure == "linear" else D
    spec = MemorySpec(D, value_dim, structure=structure, expansion=2, window=window, chunk_size=chunk)
    q, k, v = tokens(D, value_dim)
    lr, momentum, retain, strength = gate(high=0.15 / window), gate(high=0.8), gate(low=0.8), gate()
    decay, lag = uniform(H, low=0.3), uniform(B, T, H, window)
    W0 = [normal(H, *shape, scale=0.4) for shape in spec.shapes]
    leaves = track(q=q, k=k, v=v, lr=lr, gate=strength, decay=decay, lag=lag)
    gates = Gates(lr=lr, momentum=momentum, retain=retain, gate=strength, decay=decay, lag=lag)
    actual = run(spec, q, k, v, gates, W0)

    W, ys = rows(W0), []
    S = [torch.zeros_like(w) for w in W]
    for t in range(T):
        if t % chunk == 0:
            anchor = W
        G = [torch.zeros_like(w) for w in W]
        for i in range(max(0, t - window + 1), t + 1):
            weight = scalar(strength[:, i] * decay ** (t - i) * lag[:, t, :, t - i])
            if structure == "linear":
                u = [outer(k[:, i], apply(k[:, i], anchor[0]) - v[:, i])]
            else:
                u = mlp_gradient(k[:, i], v[:, i], anchor)
            G = [g + weight * x for g, x in zip(G, u)]
        S = [scalar(momentum[:, t]) * s - scalar(lr[:, t]) * g for s, g in zip(S, G)]
        W = [scalar(retain[:, t]) * w + s for w, s in zip(W, S)]
        ys.append(apply(q[:, t], W[0]) if structure == "linear" else mlp(q[:, t], W))
    assert_same(actual, (torch.stack(ys, 1), W), leaves)


def test_the_omega_rule_with_the_token_anchor_re_measures_the_whole_window_at_the_last_weights():
    window = 6
    spec = MemorySpec(D, E, structure="linear", anchor="token", window=window)
    q, k, v = tokens()
    lr, momentum, retain, strength, W0 = gate(high=0.05), gate(high=0.8), gate(low=0.8), gate(), normal(H, D, E)
    leaves = track(q=q, k=k, v=v, lr=lr, momentum=momentum, retain=retain, gate=strength, W0=W0)
    actual = run(spec, q, k, v, Gates(lr=lr, momentum=momentum, retain=retain, gate=strength), [W0])

    (W,), ys = rows([W0]), []
    S = torch.zeros_like(W)
    for t in range(T):
        G = torch.zeros_like(W)
        for i in range(max(0, t - window + 1), t + 1):
            G = G + scalar(strength[:, i]) * outer(k[:, i], apply(k[:, i], W) - v[:, i])
        S = scalar(momentum[:, t]) * S - scalar(lr[:, t]) * G
        W = scalar(retain[:, t]) * W + S
        ys.append(apply(q[:, t], W))
    assert_same(actual, (torch.stack(ys, 1), [W]), leaves)


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


# Reading and writing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["gd", "muon"])
@pytest.mark.parametrize("structure", ["linear", "mlp"])
def test_reading_before_the_write_sees_the_weights_after_the_token_before(structure, rule):
    after = MemorySpec(D, D, structure=structure, expansion=2, rule=rule, chunk_size=4, window=2)
    before = dataclasses.replace(after, read="before")
    q, k, v = tokens(D, D)
    gates = Gates(lr=gate(high=0.1), momentum=gate(high=0.9), retain=gate(low=0.8))
    W0 = [normal(H, *shape, scale=0.4) for shape in after.shapes]
    leaves = track(q=q, k=k, v=v, lr=gates.lr)
    actual = run(before, q, k, v, gates, W0)

    state, ys = after.initial_state(W0, batch=B), []
    for t in range(T):
        W = state.weights
        ys.append(apply(q[:, t], W[0]) if structure == "linear" else mlp(q[:, t], W))
        at = slice(t, t + 1)
        _, state = step(q[:, at], k[:, at], v[:, at], gates.map(lambda x, at=at: x[:, at]), state, after)
    assert_same(actual, (torch.stack(ys, 1), state.weights), leaves)


@pytest.mark.parametrize("anchor", ["token", "chunk"])
def test_a_memory_recalls_orthonormal_keys_exactly_without_training(anchor):
    keys = torch.linalg.qr(normal(B, H, 8, 8)).Q.transpose(1, 2).contiguous()  # B 8 H 8, orthonormal over tokens
    values = normal(B, 8, H, E)
    spec = MemorySpec(8, E, structure="linear", anchor=anchor, chunk_size=4)
    gates = Gates(lr=torch.ones(B, 8, H, dtype=f64))
    y, state = scan(keys, keys, values, gates, spec.initial_state([torch.zeros(H, 8, E, dtype=f64)], batch=B), spec)
    assert_close(y, values, 1e-12, "read at once")
    assert_close(read(keys, state, spec), values, 1e-12, "read at the end")
    for t in range(8):
        assert_close(read(keys[:, t : t + 1], state, spec), values[:, t : t + 1], 1e-12, f"token {t}")


FALLING = {
    "gd": {"lr": 0.1},
    "gd with momentum": {"lr": 0.02, "momentum": 0.9},
    "window 4": {"lr": 0.03, "window": 4},
    "window 4 with momentum": {"lr": 0.005, "momentum": 0.9, "window": 4},
    "muon": {"lr": 0.04, "momentum": 0.9, "rule": "muon"},
    "muon, convergent": {"lr": 0.04, "momentum": 0.9, "rule": "muon", "ns_coefficients": "convergent"},
    "muon with window 4": {"lr": 0.04, "momentum": 0.9, "rule": "muon", "window": 4},
    "muon per token": {"lr": 0.01, "momentum": 0.9, "rule": "muon", "commit_every": 1},
}


def write_repeatedly(structure: str, objective: str, options: dict) -> list[float]:
    """Mean inner loss (l2) or alignment (dot) on three pairs, before and after each of eight rounds of writing them."""
    options = dict(options)
    lr, momentum = options.pop("lr"), options.pop("momentum", None)
    spec = MemorySpec(6, 6, structure=structure, expansion=2, objective=objective, chunk_size=4, **options)
    k = torch.nn.functional.normalize(normal(B, 3, H, 6), dim=-1)
    v = k + normal(B, 3, H, 6)
    state = spec.initial_state([normal(H, *shape, scale=0.3) for shape in spec.shapes], batch=B)
    many_k, many_v = k.repeat(1, 8, 1, 1), v.repeat(1, 8, 1, 1)
    gates = Gates(
        lr=torch.full((B, 24, H), lr, dtype=f64),
        momentum=None if momentum is None else torch.full((B, 24, H), momentum, dtype=f64),
    )
    scores = []
    for _ in range(9):
        output = read(k, state, spec)
        scores.append(((output - v).square().sum(-1) / 2 if objective == "l2" else (output * v).sum(-1)).mean().item())
        _, state = scan(many_k, many_k, many_v, gates, state, spec)
    return scores


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("structure", ["linear", "mlp", "gated_mlp"])
def test_the_inner_loss_falls_when_the_same_pairs_are_written_again(structure, name):
    losses = write_repeatedly(structure, "l2", FALLING[name])
    assert losses[1] < losses[0], losses
    assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("structure", ["linear", "mlp", "gated_mlp"])
def test_the_alignment_grows_under_the_dot_objective(structure, name):
    options = FALLING[name]
    scores = write_repeatedly(structure, "dot", options | {"lr": options["lr"] / 10})
    assert all(b > a for a, b in itertools.pairwise(scores)), scores


# What the window counts ---------------------------------------------------------------------------------------------


def weights_after(spec: MemorySpec, k: Tensor, v: Tensor, gates: Gates, cuts: list[int]) -> Tensor:
    """The weights of a linear memory after all tokens, written in calls that end at `cuts`."""
    state = spec.initial_state([torch.ones(1, D, E, dtype=f64)], batch=1)
    for lo, hi in zip([0, *cuts], [*cuts, k.shape[1]]):
        part = (k[:, lo:hi], k[:, lo:hi], v[:, lo:hi], gates.map(lambda x, lo=lo, hi=hi: x[:, lo:hi]))
        _, state = (step if hi - lo == 1 else scan)(*part, state, spec)
    return state.weights[0]


@pytest.mark.parametrize("anchor", ["chunk", "token"])
@pytest.mark.parametrize("cuts", [[], [11], [9, 10, 13], list(range(1, 16))], ids=["one call", "two", "four", "steps"])
@pytest.mark.parametrize(("window", "chunk"), [(1, 4), (3, 4), (5, 16), (7, 4), (4, 1)])
def test_the_window_counts_tokens_across_chunks_and_calls(window, chunk, cuts, anchor):
    spec = MemorySpec(D, E, structure="linear", objective="dot", window=window, chunk_size=chunk, anchor=anchor)
    t = 13  # the only token that writes
    k, v = normal(1, 16, 1, D), normal(1, 16, 1, E)
    lr = torch.zeros(1, 16, 1, dtype=f64)
    lr[:, t] = 1
    gates = Gates(lr=lr)
    W = weights_after(spec, k, v, gates, cuts)
    for i in range(16):
        inside = t - window < i <= t
        for changed_k, changed_v in ((k.clone(), v), (k, v.clone())):
            (changed_k if changed_k is not k else changed_v)[:, i] += 1
            moved = (weights_after(spec, changed_k, changed_v, gates, cuts) - W).abs().max().item()
            assert (moved > 0.1) if inside else (moved == 0.0), f"token {i}: {moved}"


# Gates at their ends ------------------------------------------------------------------------------------------------

ENDS = [
    MemorySpec(D, E, structure="linear", chunk_size=8, window=3),
    MemorySpec(D, E, structure="linear", anchor="token", window=3),
    MemorySpec(D, E, structure="linear", anchor="token", decay_first=True),
    MemorySpec(D, D, structure="mlp", expansion=2, chunk_size=4),
    MemorySpec(D, D, structure="mlp", expansion=2, chunk_size=4, momentum=False),
    MemorySpec(D, D, structure="gated_mlp", expansion=2, chunk_size=1),
    MemorySpec(D, D, structure="mlp", expansion=2, chunk_size=8, rule="muon", window=3, commit_every=4),
]
every_end = pytest.mark.parametrize("spec", ENDS, ids=[f"{s.structure},{s.rule},{s.anchor},{s.momentum}" for s in ENDS])


def ordinary(spec: MemorySpec) -> tuple:
    q, k, v = tokens(spec.key_dim, spec.value_dim)
    W0 = [normal(H, *shape, scale=0.4) for shape in spec.shapes]
    gates = Gates(lr=gate(high=0.05), momentum=gate() if spec.momentum else None, retain=gate(low=0.5), gate=gate())
    return q, k, v, gates, W0


@every_end
def test_a_learning_rate_of_zero_leaves_the_memory_exactly_as_it_was(spec):
    q, k, v, gates, W0 = ordinary(spec)
    silent = dataclasses.replace(gates, lr=torch.zeros(B, T, H, dtype=f64), retain=None)
    y, W = run(spec, q, k, v, silent, W0)
    for a, b in zip(W, rows(W0)):
        assert torch.equal(a, b)
    at_start = read(q, spec.initial_state(W0, batch=B), spec)
    assert_close(y, at_start, 1e-14, "y")


@every_end
def test_a_learning_rate_of_zero_leaves_nothing_but_the_decay(spec):
    q, k, v, gates, W0 = ordinary(spec)
    silent = dataclasses.replace(gates, lr=torch.zeros(B, T, H, dtype=f64))
    _, W = run(spec, q, k, v, silent, W0)
    kept = torch.ones(B, H, dtype=f64)
    for t in range(T):
        kept = kept * gates.retain[:, t]
    for a, b in zip(W, rows(W0)):
        assert_close(a, scalar(kept) * b, 1e-13, "weights")


@every_end
def test_a_gate_of_zero_everywhere_leaves_memory_and_momentum_as_they_were(spec):
    q, k, v, gates, W0 = ordinary(spec)
    silent = dataclasses.replace(gates, gate=torch.zeros(B, T, H, dtype=f64), retain=None)
    _, state = scan(q, k, v, silent, spec.initial_state(W0, batch=B), spec)
    for a, b in zip(state.weights, rows(W0)):
        assert torch.equal(a, b)
    assert all(s.abs().max() == 0 for s in state.momentum)


@every_end
def test_retain_zero_wipes_the_memory_exactly(spec):
    """After a wipe with no momentum carried over it, nothing of W0 or of earlier tokens is left."""
    q, k, v, gates, W0 = ordinary(spec)
    t = 18  # in the middle of a chunk
    gates.retain[:, t] = 0
    gates.lr[:, t:] = 0
    if gates.momentum is not None:
        gates.momentum[:, t] = 0
    if spec.rule == "muon":
        gates.gate[:] = 0
    y, W = run(spec, q, k, v, gates, W0)
    assert all(w.abs().max() == 0 for w in W)
    nothing = q[:, t:] if spec.residual else torch.zeros(B, T - t, H, spec.value_dim, dtype=f64)
    assert torch.equal(y[:, t:], nothing)


def test_after_a_wipe_a_hebbian_memory_does_not_depend_on_what_was_before_at_all():
    spec = MemorySpec(D, E, structure="linear", objective="dot", chunk_size=8, window=3)
    q, k, v, gates, W0 = ordinary(spec)
    t = 18
    gates.retain[:, t] = gates.momentum[:, t] = 0
    y, W = run(spec, q, k, v, gates, W0)
    other_k, other_v = k.clone(), v.clone()
    other_k[:, : t - 2] += 1  # beyond the window of token t
    other_v[:, : t - 2] *= 3
    z, V = run(spec, q, other_k, other_v, gates, [5 * W0[0]])
    assert torch.equal(W[0], V[0]) and torch.equal(y[:, t:], z[:, t:])
    assert not torch.equal(y[:, :t], z[:, :t])


@every_end
def test_a_token_with_gate_zero_writes_nothing_now_or_later_but_still_decays(spec):
    q, k, v, gates, W0 = ordinary(spec)
    silent = [0, 3, 17, 18, 36]
    gates.gate[:, silent] = 0
    y, W = run(spec, q, k, v, gates, W0)
    other_k, other_v = k.clone(), v.clone()
    other_k[:, silent] = normal(B, len(silent), H, spec.key_dim)
    other_v[:, silent] += 5
    z, V = run(spec, q, other_k, other_v, gates, W0)
    assert torch.equal(y, z) and all(torch.equal(a, b) for a, b in zip(W, V))

    cuts = [0, 18, 19, T]  # a silent token stays silent in the window buffers of the next call
    state, pieces = spec.initial_state(W0, batch=B), []
    for lo, hi in itertools.pairwise(cuts):
        at = slice(lo, hi)
        y_part, state = scan(q[:, at], k[:, at], v[:, at], gates.map(lambda x, at=at: x[:, at]), state, spec)
        pieces.append(y_part)
    assert_close(torch.cat(pieces, 1), y, EXACT, "y in three calls")

    alone = gates.map(lambda x: x[:, :1])
    _, once = run(spec, q[:, :1], k[:, :1], v[:, :1], alone, W0)
    for a, b in zip(once, rows(W0)):
        assert_close(a, scalar(gates.retain[:, 0]) * b, 1e-14, "one silent token")
