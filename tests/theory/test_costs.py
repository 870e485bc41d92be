"""docs/theory.md, section 10: operations and bytes against their formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from formulas import (
    STRUCTURES,
    dual,
    errors_at_anchor,
    f64,
    leaf,
    memory,
    newton_schulz,
    newton_schulz_gram,
    oracle,
    rand,
    tokens,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mnemos.memory.spec import Gates, MemorySpec

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
