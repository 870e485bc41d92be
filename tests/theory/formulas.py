"""The formulas of docs/theory.md that several of its tests need, in float64. Section numbers are the document's.

Nothing here uses the engine: the formulas are written out again, and `reference_scan` (a token loop) is the oracle.
L tokens of a tile (row t of 0..L is the state after t tokens), N entries (gradients) of a tile, c window, b chunk size.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mnemos.memory.newton_schulz import NS_COEFFICIENTS, polynomials
from mnemos.memory.reference import reference_scan
from mnemos.memory.spec import Gates, MemorySpec

f64 = torch.float64
D = 4  # key and value dim of the small memories below
STRUCTURES = [("linear", 1), ("mlp", 2), ("mlp", 3), ("gated_mlp", 2)]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-11) -> None:
    error, size = (a - b).square().mean().sqrt().item(), b.square().mean().sqrt().item()
    assert error <= tolerance * max(size, 1e-30), f"relative RMS {error / max(size, 1e-30):.3e} > {tolerance:.0e}"


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


def network(spec: MemorySpec, x: Tensor, apply) -> Tensor:
    y = spec.network.forward(x, apply)
    return y + x if spec.has_residual else y


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


# --- section 7: the Muon rule -----------------------------------------------------------------------------------------


def newton_schulz(S: Tensor, steps: int = 5, name: str = "muon") -> Tensor:
    """Direct form, on a wide matrix."""
    X = S / S.norm()
    for a, b, c in polynomials(NS_COEFFICIENTS[name], steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def newton_schulz_gram(S: Tensor, steps: int = 5, name: str = "muon") -> Tensor:
    """The same in m x m matrices: X_j = R_j X_0, A_{j+1} = Q_j A_j Q_j."""
    X = S / S.norm()
    A, R = X @ X.mT, None
    for j, (a, b, c) in enumerate(polynomials(NS_COEFFICIENTS[name], steps)):
        Q = a * torch.eye(len(A), dtype=A.dtype) + b * A + c * A @ A
        R = Q if R is None else Q @ R
        if j < steps - 1:
            A = Q @ (Q @ A)
    assert R is not None
    return R @ X


# --- sections 4.5-4.8: the backward pass ------------------------------------------------------------------------------


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()
