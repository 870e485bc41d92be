"""docs/theory.md, sections 3 to 6: coefficients, the dual form of a chunk, tiles of several, and the anchor `token`."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from formulas import (
    STRUCTURES,
    D,
    close,
    coefficients,
    dual,
    end_of_tile,
    errors_at_anchor,
    f64,
    memory,
    network,
    oracle,
    products,
    rand,
    tokens,
    window_weights,
)

from mnemos.memory.spec import Gates

# --- sections 3 and 4.1-4.3: coefficients and dual form ---------------------------------------------------------------


@pytest.mark.parametrize("structure, depth", STRUCTURES)
@pytest.mark.parametrize("c", [1, 3])
@pytest.mark.parametrize("read", ["after", "before"])
def test_the_dual_form_of_a_chunk_is_the_token_rule(structure, depth, c, read):
    b = 6
    spec, W0 = memory(structure, depth, window=c, chunk_size=b, read=read)
    q, k, v, gates = tokens(2 * b, c)
    first, second = gates.map(lambda x: x[:b]), gates.map(lambda x: x[b:])
    _, state, W, S = oracle(q[:b], k[:b], v[:b], first, spec, W0)
    y_true, _, W_true, S_true = oracle(q[b:], k[b:], v[b:], second, spec, W0, state)

    window = window_weights(second, b, c, gates.gate[b - c + 1 : b])
    C, beta, f, m, n = coefficients(second, window)
    # the c-1 tokens before the chunk enter again, at the new anchor, which is W at the chunk's start
    a, d = errors_at_anchor(spec, k[b - c + 1 :], v[b - c + 1 :], lambda i, x: x @ W[i], lambda i, g: g @ W[i].mT)
    rows = slice(1, None) if read == "after" else slice(0, -1)
    y = network(spec, q[b:], lambda i, x: dual(x, W[i], S[i], a[i], d[i], C[rows], beta[rows], f[rows]))
    close(y, y_true)
    for i in range(len(W)):
        W_end, S_end = end_of_tile(W[i], S[i], a[i], d[i], C, beta, f, m, n)
        close(W_end, W_true[i])
        close(S_end, S_true[i])


def test_a_chunk_entered_in_its_middle_keeps_its_anchor_while_the_weights_move():
    b, split = 8, 5
    spec, W0 = memory("mlp", 2, chunk_size=b)
    q, k, v, gates = tokens(b)
    _, state, W, S = oracle(q[:split], k[:split], v[:split], gates.map(lambda x: x[:split]), spec, W0)
    rest = gates.map(lambda x: x[split:])
    y_true, _, W_true, _ = oracle(q[split:], k[split:], v[split:], rest, spec, W0, state)
    C, beta, f, m, n = coefficients(rest, window_weights(rest, b - split, 1, k.new_zeros(0)))
    a, d = errors_at_anchor(spec, k[split:], v[split:], lambda i, x: x @ W0[i], lambda i, g: g @ W0[i].mT)
    y = network(spec, q[split:], lambda i, x: dual(x, W[i], S[i], a[i], d[i], C[1:], beta[1:], f[1:]))
    close(y, y_true)
    close(end_of_tile(W[1], S[1], a[1], d[1], C, beta, f, m, n)[0], W_true[1])


def test_the_valid_factor_skips_masked_tokens():
    T = 7
    spec, _ = memory(chunk_size=T)
    q, k, v, gates = tokens(T)
    mask = torch.tensor([[True, True, False, True, False, False, True]])
    W, S = [rand(D, D)], [rand(D, D)]
    state = spec.initial_state([w.unsqueeze(0) for w in W], batch=1)
    state.momentum = [s.reshape(1, 1, D, D) for s in S]
    y_true, _, W_true, S_true = oracle(q, k, v, gates, spec, W, state, mask)
    valid = mask[0].to(f64)
    C, beta, f, m, n = coefficients(gates, window_weights(gates, T, 1, k.new_zeros(0)), valid)
    d = k @ W[0] - v
    y = dual(q, W[0], S[0], k, d, C[1:], beta[1:], f[1:]) * valid[:, None]
    close(y, y_true)
    W_end, S_end = end_of_tile(W[0], S[0], k, d, C, beta, f, m, n)
    close(W_end, W_true[0])
    close(S_end, S_true[0])


def test_no_gate_value_expresses_a_skip():
    W, S = rand(D, D), rand(D, D)
    for momentum, retain in itertools.product(torch.linspace(0, 1, 21, dtype=f64), repeat=2):
        S_next = momentum * S  # lr 0
        W_next = retain * W + S_next
        assert (S_next - S).norm() + (W_next - W).norm() > 0.5 * S.norm()


# --- section 5: what a chunk changes ----------------------------------------------------------------------------------


def test_one_key_twice_in_a_chunk_is_written_twice_and_across_chunks_once():
    k = F.normalize(rand(1, D), dim=-1).repeat(2, 1)
    v = rand(1, D).repeat(2, 1)
    gates = Gates(lr=torch.ones(2, dtype=f64))
    for b, times in ((2, 2.0), (1, 1.0)):
        spec, _ = memory(chunk_size=b)
        y, *_ = oracle(k, k, v, gates, spec, [torch.zeros(D, D, dtype=f64)])
        close(y[1], times * v[0])


# --- section 4.4: several chunks in one tile --------------------------------------------------------------------------


@pytest.mark.parametrize("structure, depth", STRUCTURES)
@pytest.mark.parametrize("c", [1, 3])
def test_the_anchor_of_a_later_chunk_in_a_tile_needs_no_weights(structure, depth, c):
    b, J = 4, 3
    L, block = b * J, c - 1 + b
    spec, W0 = memory(structure, depth, window=c, chunk_size=b)
    q, k, v, gates = tokens(L, c)
    W, S = W0, [rand(*w.shape) for w in W0]
    state = spec.initial_state([w.unsqueeze(0) for w in W], batch=1)
    state.momentum = [s.unsqueeze(0).unsqueeze(0) for s in S]
    y_true, _, W_true, S_true = oracle(q, k, v, gates, spec, W0, state)

    # every chunk has entries of its own: its tokens and the c-1 before them
    source = [j * b + e - (c - 1) for j in range(J) for e in range(block)]
    plain = window_weights(gates, L, c, torch.zeros(c - 1, dtype=f64))
    window = torch.zeros(L, J * block, dtype=f64)
    for t, e in itertools.product(range(L), range(J * block)):
        if t // b == e // block:
            window[t, e] = plain[t, source[e] + c - 1]
    C, beta, f, m, n = coefficients(gates, window)
    padded = [torch.cat([torch.zeros(c - 1, D, dtype=f64), x]) for x in (k, v)]
    keys, values = (x[[s + c - 1 for s in source]] for x in padded)

    a = [torch.zeros(0, shape[0], dtype=f64) for shape in spec.shapes]
    d = [torch.zeros(0, shape[1], dtype=f64) for shape in spec.shapes]
    for j in range(J):
        s, known = j * b, slice(0, j * block)  # row s: the state after the tile's first s tokens
        at = (C[s, known].unsqueeze(0), beta[s : s + 1], f[s : s + 1])

        def forward(i, x, a=a, d=d, at=at):
            return dual(x, W[i], S[i], a[i], d[i], *at)

        def backward(i, g, a=a, d=d, at=at):  # a and d exchanged, W and S transposed
            return dual(g, W[i].mT, S[i].mT, d[i], a[i], *at)

        own = slice(j * block, (j + 1) * block)
        a_new, d_new = errors_at_anchor(spec, keys[own], values[own], forward, backward)
        a = [torch.cat(pair) for pair in zip(a, a_new)]
        d = [torch.cat(pair) for pair in zip(d, d_new)]
    close(network(spec, q, lambda i, x: dual(x, W[i], S[i], a[i], d[i], C[1:], beta[1:], f[1:])), y_true)
    for i in range(len(W)):
        W_end, S_end = end_of_tile(W[i], S[i], a[i], d[i], C, beta, f, m, n)
        close(W_end, W_true[i])
        close(S_end, S_true[i])


# --- section 6: anchor token ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay_first", [False, True])
@pytest.mark.parametrize("c", [1, 3])
def test_the_online_rule_is_a_unit_lower_triangular_solve(decay_first, c):
    L = 9
    spec, W0 = memory(window=c, anchor="token", decay_first=decay_first)
    q, k, v, gates = tokens(L, c)
    state = spec.initial_state([w.unsqueeze(0) for w in W0], batch=1)
    W, S = W0[0], rand(D, D)
    state.momentum = [S.reshape(1, 1, D, D)]
    y_true, _, W_true, S_true = oracle(q, k, v, gates, spec, W0, state)

    R = products(gates.retain)[:, 1:] @ products(gates.momentum)[1:, 1:]  # (L+1, L): what a push at s is worth in W_t
    beta, m = products(gates.retain)[:, 0], products(gates.momentum)[:, 0]
    f = products(gates.retain)[:, 1:] @ m[1:]
    plain = window_weights(gates, L, c, torch.zeros(c - 1, dtype=f64))
    pairs = [(t, i) for t in range(1, L + 1) for i in range(t - c + 1, t + 1) if i >= 1]  # token t, window token i
    when = torch.tensor([t for t, _ in pairs])
    keys = torch.stack([k[i - 1] for _, i in pairs])
    values = torch.stack([v[i - 1] for _, i in pairs])
    strength = torch.stack([gates.lr[t - 1] * plain[t - 1, i + c - 2] for t, i in pairs])
    after = gates.retain[when - 1] if decay_first else torch.ones(len(pairs), dtype=f64)

    system = after[:, None] * R[when - 1][:, when - 1] * strength * (keys @ keys.mT)
    assert torch.equal(system.triu(), torch.zeros_like(system))  # with the identity added: unit lower triangular
    known = after[:, None] * (beta[when - 1, None] * (keys @ W) + f[when - 1, None] * (keys @ S)) - values
    identity = torch.eye(len(pairs), dtype=f64)
    e = torch.linalg.solve_triangular(identity + system, known, upper=False, unitriangular=True)

    C = R[:, when - 1] * strength
    close(dual(q, W, S, keys, e, C[1:], beta[1:], f[1:]), y_true)
    n = products(gates.momentum)[-1, when] * strength
    close(beta[-1] * W + f[-1] * S - keys.mT @ (C[-1][:, None] * e), W_true[0])
    close(m[-1] * S - keys.mT @ (n[:, None] * e), S_true[0])
    close(gates.retain * beta[:-1], beta[1:])  # the two identities behind decay_first
    close(gates.retain * f[:-1], f[1:] - m[1:])


@pytest.mark.parametrize("decay_first", [False, True])
def test_without_momentum_and_window_the_online_rule_is_deltanet_and_gated_deltanet(decay_first):
    T = 12
    spec, W0 = memory(anchor="token", decay_first=decay_first)
    q, k, v, gates = tokens(T)
    retain = gates.retain if decay_first else torch.ones(T, dtype=f64)
    y, *_ = oracle(q, k, v, Gates(lr=gates.lr, retain=retain), spec, W0)
    W = W0[0]
    for t in range(T):
        erase = torch.eye(D, dtype=f64) - gates.lr[t] * torch.outer(k[t], k[t])
        W = retain[t] * erase @ W + gates.lr[t] * torch.outer(k[t], v[t])
        close(y[t], q[t] @ W)


def test_chunk_size_one_is_the_online_rule_for_a_linear_memory():
    q, k, v, gates = tokens(10, 3)
    token, W0 = memory(window=3, anchor="token", chunk_size=5)
    chunk, _ = memory(window=3, chunk_size=1)
    close(oracle(q, k, v, gates, token, W0)[0], oracle(q, k, v, gates, chunk, W0)[0])
