"""Known models fall out of the memory: each against its own formula, written here as a plain loop or a masked matrix.

Shapes as in `loops.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from loops import (
    EXACT,
    B,
    D,
    E,
    H,
    T,
    apply,
    assert_same,
    f64,
    gate,
    gelu,
    mlp,
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
from mnemos.memory import Gates, MemorySpec, read

pytestmark = pytest.mark.usefixtures("seed")


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


def gelu_slope(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)


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
