"""Every formula of docs/theory.md, in float64, against a token loop or autograd. Section numbers are the document's.

Nothing here uses the engine: the formulas are written out again, and `reference_scan` (a token loop) is the oracle.
L tokens of a tile (row t of 0..L is the state after t tokens), N entries (gradients) of a tile, c window, b chunk size.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mnemos.memory.reference import reference_scan
from mnemos.memory.spec import NS_COEFFICIENTS, Gates, MemorySpec

f64 = torch.float64
D = 4  # key and value dim of the small memories below
STRUCTURES = [("linear", 1), ("mlp", 2), ("mlp", 3), ("gated_mlp", 2)]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-11) -> None:
    error, size = (a - b).square().mean().sqrt().item(), b.square().mean().sqrt().item()
    assert error <= tolerance * max(size, 1e-30), f"relative RMS {error / max(size, 1e-30):.3e} > {tolerance:.0e}"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=f64)


def uniform(low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(*shape, dtype=f64)


def memory(structure: str = "linear", depth: int = 1, **fields) -> tuple[MemorySpec, list[Tensor]]:
    spec = MemorySpec(key_dim=D, value_dim=D, structure=structure, depth=depth, expansion=1.5, **fields)
    return spec, [rand(*shape) / shape[0] ** 0.5 for shape in spec.shapes]


def tokens(T: int, c: int = 1) -> tuple[Tensor, Tensor, Tensor, Gates]:
    """q, k, v (T, D) and every kind of gate, one row, one head."""
    gates = Gates(
        lr=uniform(0.05, 0.4, T),
        momentum=uniform(0.2, 0.9, T),
        retain=uniform(0.6, 1.0, T),
        gate=uniform(0.1, 1.0, T),
        decay=uniform(0.5, 0.9, 1),
        lag=uniform(0.2, 1.0, T, c),
    )
    return rand(T, D), F.normalize(rand(T, D), dim=-1), rand(T, D), gates


def oracle(q: Tensor, k: Tensor, v: Tensor, gates: Gates, spec: MemorySpec, W0: list[Tensor], state=None, mask=None):
    """`reference_scan` on one row and one head: y (T, D), state, and the lists W, S of matrices."""
    state = spec.initial_state([w.unsqueeze(0) for w in W0], batch=1) if state is None else state
    lead = gates.map(lambda x: x.unsqueeze(1).unsqueeze(0))  # T ... -> 1 T 1 ...
    one = [x.reshape(1, -1, 1, D) for x in (q, k, v)]
    y, state = reference_scan(*one, lead, state, spec, mask=mask)
    return y[0, :, 0], state, [w[0, 0] for w in state.weights], [s[0, 0] for s in state.momentum]


# --- sections 3 and 4.1-4.3: coefficients and dual form ---------------------------------------------------------------


def products(x: Tensor) -> Tensor:
    """P[t,s] = product of x_{s+1}..x_t, rows and columns 0..L, by the definition."""
    L = len(x)
    one = torch.ones((), dtype=f64)
    rows = [[x[s:t].prod() if s <= t else 0 * one for s in range(L + 1)] for t in range(L + 1)]
    return torch.stack([torch.stack([e if e.dim() == 0 else e.squeeze() for e in row]) for row in rows])


def window_weights(gates: Gates, T: int, c: int, before: Tensor) -> Tensor:
    """Gamma[t,i]: columns are the c-1 tokens before the tile (gates `before`), then the tile's own T."""
    gate = torch.cat([before, gates.gate])
    G = torch.zeros(T, c - 1 + T, dtype=f64)
    for t, j in itertools.product(range(T), range(c)):
        G[t, c - 1 + t - j] = gate[c - 1 + t - j] * gates.decay[0] ** j * gates.lag[t, j]
    return G


def coefficients(gates: Gates, window: Tensor, valid: Tensor | None = None):
    """Sections 3.2 and 3.4: C (L+1, N), beta, f, m (L+1), n (L+1, N), all with row 0."""
    L, N = window.shape
    valid = torch.ones(L, dtype=f64) if valid is None else valid
    retain = torch.where(valid > 0, gates.retain, 1.0)
    momentum = torch.where(valid > 0, gates.momentum, 1.0)
    lr = gates.lr * valid
    P_momentum, P_retain = products(momentum), products(retain)
    n = torch.cat([torch.zeros(1, N, dtype=f64), P_momentum[1:, 1:] @ (lr[:, None] * window)])
    m = P_momentum[:, 0]
    pushes = torch.cat([torch.zeros(1, dtype=f64), valid])  # the `valid` factor: a skipped token adds no S to W
    P = P_retain * pushes
    return P @ n, P_retain[:, 0], P @ m, m, n


def gelu_slope(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z / 2**0.5)) + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def gelu_curvature(z: Tensor) -> Tensor:
    return (2 - z * z) * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def network(spec: MemorySpec, x: Tensor, apply) -> Tensor:
    y = spec.network.forward(x, apply)
    return y + x if spec.residual else y


def errors_at_anchor(spec: MemorySpec, k: Tensor, v: Tensor, forward, backward) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs a and errors d of every map for the L2 loss, by hand. forward(i, x) = x A_i, backward(i, g) = g A_i^T."""
    a, z = {}, {}

    def fast(i: int, x: Tensor) -> Tensor:
        a[i], z[i] = x, forward(i, x)
        return z[i]

    top = network(spec, k, fast) - v
    maps = len(spec.shapes)
    d = {maps - 1: top}
    if spec.structure == "gated_mlp":
        p = backward(2, top)
        d[0], d[1] = p * z[1] * gelu_slope(z[0]), p * F.gelu(z[0])
    else:
        for i in range(maps - 2, -1, -1):
            d[i] = backward(i + 1, d[i + 1]) * gelu_slope(z[i])
    return [a[i] for i in range(maps)], [d[i] for i in range(maps)]


def dual(x: Tensor, W: Tensor, S: Tensor, a: Tensor, d: Tensor, C: Tensor, beta: Tensor, f: Tensor) -> Tensor:
    """Section 4.1: row t of x times W_t, without W_t."""
    return beta[:, None] * (x @ W) + f[:, None] * (x @ S) - (C * (x @ a.mT)) @ d


def end_of_tile(W, S, a, d, C, beta, f, m, n) -> tuple[Tensor, Tensor]:
    return beta[-1] * W + f[-1] * S - a.mT @ (C[-1][:, None] * d), m[-1] * S - a.mT @ (n[-1][:, None] * d)


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


# --- section 7: the Muon rule -----------------------------------------------------------------------------------------


def newton_schulz(S: Tensor, steps: int = 5, name: str = "muon") -> Tensor:
    """Direct form, on a wide matrix."""
    a, b, c = NS_COEFFICIENTS[name]
    X = S / S.norm()
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def newton_schulz_gram(S: Tensor, steps: int = 5, name: str = "muon") -> Tensor:
    """The same in m x m matrices: X_j = R_j X_0, A_{j+1} = Q_j A_j Q_j."""
    a, b, c = NS_COEFFICIENTS[name]
    X = S / S.norm()
    A, R = X @ X.mT, None
    for j in range(steps):
        Q = a * torch.eye(len(A), dtype=A.dtype) + b * A + c * A @ A
        R = Q if R is None else Q @ R
        if j < steps - 1:
            A = Q @ (Q @ A)
    assert R is not None
    return R @ X


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
        a, b, c = NS_COEFFICIENTS[name]
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


# --- sections 4.5-4.8: the backward pass ------------------------------------------------------------------------------


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


@pytest.mark.parametrize("zeros", [(), (3,), (0,), (2, 3), (1, 4, 5)])
def test_the_backward_of_the_product_matrix_is_exact_at_gates_of_zero(zeros):
    x = uniform(0.2, 1.0, 6)
    x[list(zeros)] = 0.0
    x = leaf(x)
    P = products(x)
    dP = rand(7, 7)
    (true,) = torch.autograd.grad((P * dP).sum(), x)
    Z = P.mT @ dP.tril()
    by_hand = torch.stack([sum(Z[r, s] * P[r - 1, s] for s in range(r)) for r in range(1, 7)])
    close(by_hand, true)
    assert torch.isfinite(by_hand).all() and true.abs().min() > 0


def test_the_backward_of_one_dual_map_and_of_the_end_of_a_tile():
    L, N, d_in, d_out = 5, 7, 4, 3
    x, a, d = leaf(rand(L, d_in)), leaf(rand(N, d_in)), leaf(rand(N, d_out))
    W, S = leaf(rand(d_in, d_out)), leaf(rand(d_in, d_out))
    C, n, beta, f, m = (leaf(t) for t in (rand(L + 1, N), rand(L + 1, N), rand(L + 1), rand(L + 1), rand(L + 1)))
    y = dual(x, W, S, a, d, C[1:], beta[1:], f[1:])
    W_end, S_end = end_of_tile(W, S, a, d, C, beta, f, m, n)
    g, G, H = rand(L, d_out), rand(d_in, d_out), rand(d_in, d_out)
    names = (x, W, S, a, d, C, n, beta, f, m)
    true = torch.autograd.grad((y * g).sum() + (W_end * G).sum() + (S_end * H).sum(), names)

    with torch.no_grad():
        row = slice(1, None)
        scores, pull = x @ a.mT, g @ d.mT
        Dx = beta[row, None] * (g @ W.mT) + f[row, None] * (g @ S.mT) - (C[row] * pull) @ a
        DW = x.mT @ (beta[row, None] * g) + beta[-1] * G
        DS = x.mT @ (f[row, None] * g) + f[-1] * G + m[-1] * H
        Cw, nw = C[-1][:, None], n[-1][:, None]
        Da = -(C[row] * pull).mT @ x - Cw * (d @ G.mT) - nw * (d @ H.mT)
        Dd = -(C[row] * scores).mT @ g - Cw * (a @ G) - nw * (a @ H)
        DC, Dn = torch.zeros_like(C), torch.zeros_like(n)
        DC[row] = -scores * pull
        DC[-1] -= ((a @ G) * d).sum(-1)
        Dn[-1] = -((a @ H) * d).sum(-1)
        Dbeta, Df, Dm = torch.zeros_like(beta), torch.zeros_like(f), torch.zeros_like(m)
        Dbeta[row] = (g * (x @ W)).sum(-1)
        Df[row] = (g * (x @ S)).sum(-1)
        Dbeta[-1] += (W * G).sum()
        Df[-1] += (S * G).sum()
        Dm[-1] = (S * H).sum()
    for by_hand, expected in zip((Dx, DW, DS, Da, Dd, DC, Dn, Dbeta, Df, Dm), true):
        close(by_hand, expected)


def test_the_backward_from_the_coefficients_to_the_gates():
    L, N = 6, 8
    lr, momentum, retain = leaf(uniform(0, 1, L)), leaf(uniform(0, 1, L)), leaf(uniform(0, 1, L))
    window = leaf(rand(L, N))
    gates = Gates(lr=lr, momentum=momentum, retain=retain)
    C, beta, f, m, n = coefficients(gates, window)
    DC, Dbeta, Df, Dm, Dn = rand(L + 1, N), rand(L + 1), rand(L + 1), rand(L + 1), rand(L + 1, N)
    total = sum((x * g).sum() for x, g in ((C, DC), (beta, Dbeta), (f, Df), (m, Dm), (n, Dn)))
    true = torch.autograd.grad(total, (lr, momentum, retain, window))

    with torch.no_grad():
        P_m, P_r = products(momentum), products(retain)
        push = torch.cat([n, m[:, None]], -1)[1:]  # what each token adds to W
        Dmix = torch.cat([DC, Df[:, None]], -1)
        DP_r = torch.zeros_like(P_r)
        DP_r[:, 1:] = Dmix @ push.mT
        DP_r[:, 0] += Dbeta
        back = P_r[:, 1:].mT @ Dmix
        Dn_all, Dm_all = Dn.clone(), Dm.clone()
        Dn_all[1:] += back[:, :-1]
        Dm_all[1:] += back[:, -1]
        inner = P_m[1:, 1:].mT @ Dn_all[1:]  # gradient of diag(lr) Gamma
        Dlr, Dwindow = (inner * window).sum(-1), lr[:, None] * inner
        DP_m = torch.zeros_like(P_m)
        DP_m[1:, 1:] = Dn_all[1:] @ (lr[:, None] * window).mT
        DP_m[:, 0] += Dm_all

        def through_products(P: Tensor, dP: Tensor) -> Tensor:
            Z = P.mT @ dP.tril()
            return (Z[1:, :-1] * P[:-1, :-1]).sum(-1)

        by_hand = (Dlr, through_products(P_m, DP_m), through_products(P_r, DP_r), Dwindow)
    for mine, expected in zip(by_hand, true):
        close(mine, expected)


def test_the_backward_of_the_errors_at_the_anchor():
    spec, W0 = memory("mlp", 3)
    A = [leaf(w) for w in W0]
    k, v = leaf(rand(5, D)), leaf(rand(5, D))
    a, d = errors_at_anchor(spec, k, v, lambda i, x: x @ A[i], lambda i, g: g @ A[i].mT)
    Ga, Gd = [torch.zeros_like(a[0]), *(rand(*x.shape) for x in a[1:])], [rand(*x.shape) for x in d]
    total = sum((x * g).sum() for x, g in zip([*a, *d], [*Ga, *Gd]))
    true = torch.autograd.grad(total, (*A, k, v))

    with torch.no_grad():
        z = [x @ w for x, w in zip(a, A)]
        DA, Dz, Dd = [torch.zeros_like(w) for w in A], [torch.zeros_like(x) for x in z], [g.clone() for g in Gd]
        for i in range(2):  # errors were made from the top down, so their gradients go up
            p = d[i + 1] @ A[i + 1].mT
            Dz[i] += Dd[i] * p * gelu_curvature(z[i])
            Dp = Dd[i] * gelu_slope(z[i])
            Dd[i + 1] += Dp @ A[i + 1]
            DA[i + 1] += Dp.mT @ d[i + 1]
        Dz[2] += Dd[2]
        Dv, Dk = -Dd[2], Dd[2].clone()  # the residual adds k to the output
        for i in (2, 1, 0):
            DA[i] += a[i].mT @ Dz[i]
            Da = Ga[i] + Dz[i] @ A[i].mT
            if i:
                Dz[i - 1] += Da * gelu_slope(z[i - 1])
            else:
                Dk += Da
    for mine, expected in zip((*DA, Dk, Dv), true):
        close(mine, expected)


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


# --- section 10: costs ------------------------------------------------------------------------------------------------


def flops(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def sizes(structure: str, n: int, K: int, h: int, V: int) -> tuple[int, int, int]:
    """Parameters, first-group parameters and widths, as in section 10.1."""
    if structure == "gated_mlp":
        return 2 * K * h + h * V, 2 * K * h, K + 3 * h + V
    if n == 1:
        return K * V, K * V, K + V
    return K * h + (n - 2) * h * h + h * V, K * h, K + 2 * (n - 1) * h + V


CHUNKS = [(s, n, c, momentum) for s, n in STRUCTURES for c in (1, 5) for momentum in (True, False)]


@pytest.mark.parametrize("structure, n, c, momentum", CHUNKS)
def test_matmul_flops_of_one_chunk_follow_the_formulas(structure, n, c, momentum):
    b, K, V = 8, 6, 4
    spec = MemorySpec(key_dim=K, value_dim=V, structure=structure, depth=n, expansion=3.0, window=c)
    h, N, s = spec.hidden_dim, b + c - 1, int(momentum)
    P, P1, Q = sizes(structure, n, K, h, V)
    assert sum(x * y for x, y in spec.shapes) == P
    W = [rand(*shape) for shape in spec.shapes]
    k, v, q = rand(N, K), rand(N, V), rand(b, K)
    a: dict[int, Tensor] = {}
    d: list[Tensor] = []

    def at_anchor():
        a.clear()

        def fast(i: int, x: Tensor) -> Tensor:
            a[i] = x
            return x @ W[i]

        spec.network.forward(k, fast)

    def whole():
        d[:] = errors_at_anchor(spec, k, v, lambda i, x: x @ W[i], lambda i, g: g @ W[i].mT)[1]

    assert flops(at_anchor) == 2 * P * N
    assert flops(whole) == 2 * P * N + 2 * (P - P1) * N

    C = rand(b, N)
    shared: dict[int, Tensor] = {}

    def fast_read(i: int, x: Tensor) -> Tensor:
        y = x @ W[i]
        if momentum:
            y = y + x @ W[i]
        if id(a[i]) not in shared:  # maps with one input share their scores
            shared[id(a[i])] = x @ a[i].mT
        return y - (C * shared[id(a[i])]) @ d[i]

    assert flops(lambda: spec.network.forward(q, fast_read)) == b * (2 * (1 + s) * P + 2 * N * Q)
    update = flops(lambda: [a[i].mT @ d[i] for i in range(len(W)) for _ in range(1 + s)])
    assert update == b * 2 * (1 + s) * P * N / b

    def decode():
        a_one, d_one = errors_at_anchor(spec, k[:c], v[:c], lambda i, x: x @ W[i], lambda i, g: g @ W[i].mT)
        pushes = [x.mT @ y for x, y in zip(a_one, d_one)]
        return pushes, spec.network.forward(q[:1], lambda i, x: x @ W[i])

    assert flops(decode) == c * (6 * P - 2 * P1) + 2 * P
    L = b
    pushes, rows = rand(L, N + 1), rand(L + 1, L)
    assert flops(lambda: rows @ pushes) == L * 2 * (L + 1) * (N + 1)
    assert flops(lambda: rand(L, L) @ rand(L, N)) == L * 2 * L * N


@pytest.mark.parametrize("n", [1, 2, 3])
def test_matmul_flops_of_several_chunks_in_a_tile_follow_the_formulas(n):
    J, block, K, V = 3, 5, 6, 4
    spec = MemorySpec(key_dim=K, value_dim=V, structure="mlp" if n > 1 else "linear", depth=n, expansion=3.0)
    P, P1, Q = sizes("mlp", n, K, spec.hidden_dim, V)
    Q1, N = sum(spec.shapes[0]), J * block
    W = [rand(*shape) for shape in spec.shapes]
    one = torch.ones(1, dtype=f64)

    def tile():
        for j in range(J):
            a, d = [rand(j * block, i) for i, _ in spec.shapes], [rand(j * block, o) for _, o in spec.shapes]
            at = (torch.ones(1, j * block, dtype=f64), one, one)
            errors_at_anchor(
                spec,
                rand(block, K),
                rand(block, V),
                lambda i, x, a=a, d=d, at=at: dual(x, W[i], W[i], a[i], d[i], *at),
                lambda i, g, a=a, d=d, at=at: dual(g, W[i].mT, W[i].mT, d[i], a[i], *at),
            )

    forward, errors = 4 * P * N + Q * N * N * (1 - 1 / J), 4 * (P - P1) * N + (Q - Q1) * N * N * (1 - 1 / J)
    assert flops(tile) == pytest.approx(forward + errors)


def test_the_backward_of_the_dual_form_costs_twice_its_forward():
    L, N, d_in, d_out = 8, 10, 6, 5
    x, a, d, C = leaf(rand(L, d_in)), leaf(rand(N, d_in)), leaf(rand(N, d_out)), leaf(rand(L, N))
    W, S = leaf(rand(d_in, d_out)), leaf(rand(d_in, d_out))
    ones = torch.ones(L, dtype=f64)
    y: list[Tensor] = []
    forward = flops(lambda: y.append(dual(x, W, S, a, d, C, ones, ones)))
    assert flops(lambda: y[0].sum().backward()) == 2 * forward


@pytest.mark.parametrize("m, n", [(8, 8), (8, 12), (8, 13), (8, 32)])
def test_newton_schulz_flops_direct_and_in_gram_space(m, n):
    S = rand(m, n)
    for steps in (1, 3, 5):
        direct = steps * (4 * m * m * n + 2 * m**3)
        gram = 4 * m * m * n + (8 * steps - 6) * m**3
        assert flops(lambda steps=steps: newton_schulz(S, steps)) == direct
        assert flops(lambda steps=steps: newton_schulz_gram(S, steps)) == gram
        if steps > 1:
            assert (gram < direct) == (n > 1.5 * m)


def test_the_examples_of_section_10():
    K = V = 64
    h, b = 256, 64
    rows = {}
    for structure, n, c in itertools.product(("linear", "mlp", "gated_mlp"), (1, 2, 4), (1, 16)):
        if (structure == "mlp") == (n == 1):
            continue
        P, P1, Q = sizes(structure, n, K, h, V)
        N = b + c - 1
        r = N / b
        parts = [2 * P * r, 2 * (P - P1) * r, 4 * P + 2 * N * Q, 4 * P * r]
        rows[f"mlp {n}" if structure == "mlp" else structure, c] = (P, round(sum(parts) / 1e3))
    assert rows == {
        ("linear", 1): (4096, 57),
        ("linear", 16): (4096, 67),
        ("mlp 2", 1): (32768, 442),
        ("mlp 2", 16): (32768, 515),
        ("mlp 4", 1): (163840, 2146),
        ("mlp 4", 16): (163840, 2496),
        ("gated_mlp", 1): (49152, 639),
        ("gated_mlp", 16): (49152, 743),
    }
    d = K
    assert 5 * (4 * d * d * h + 2 * d**3) == 90 * d**3 and 4 * d * d * h + 34 * d**3 == 50 * d**3
    assert (round(2 * 90 * d**3 / b / 1e3), round(2 * 50 * d**3 / b / 1e3)) == (737, 410)
    assert round(12 * rows["mlp 2", 1][0] / 1e3) == 393


@pytest.mark.parametrize("structure, n", STRUCTURES)
@pytest.mark.parametrize("c", [1, 4])
@pytest.mark.parametrize("momentum", [True, False])
def test_state_bytes_follow_the_formula_and_do_not_grow(structure, n, c, momentum):
    K, V, B, H = 5, 3, 2, 3
    shape = {"key_dim": K, "value_dim": V, "structure": structure, "depth": n, "features": "monomials"}
    spec = MemorySpec(**shape, window=c, chunk_size=4, momentum=momentum)
    lifted = math.comb(K + 2, 2)
    P, *_ = sizes(structure, n, lifted, spec.hidden_dim, V)
    for dtype, size in ((torch.float32, 4), (torch.float64, 8)):
        state = spec.initial_state([torch.zeros(H, *shape, dtype=dtype) for shape in spec.shapes], batch=B)
        expected = B * H * size * ((2 + momentum) * P + (c - 1) * (K + V + 1)) + 8 * B
        assert state.nbytes == expected
    plain, W0 = memory(structure, n, window=c, chunk_size=4, momentum=momentum)
    before = plain.initial_state([w.unsqueeze(0) for w in W0], batch=1).nbytes
    q, k, v, gates = tokens(6, c)
    assert oracle(q, k, v, gates if momentum else Gates(lr=gates.lr), plain, W0)[1].nbytes == before
