"""Muon after every token: the low-rank form of the window, the dense form and the reference are the same function."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import Case, inputs

from helpers import assert_close, every_backend
from mnemos.memory import Gates, MemorySpec, NeuralMemory, newton_schulz, reference_scan, rules, scan, step
from mnemos.memory.newton_schulz import NS_COEFFICIENTS, low_rank_newton_schulz, polynomials

WINDOWED = {"rule": "muon", "commit_every": 1, "momentum": False, "expansion": 2}
EXACT = 1e-10


def dense(spec: MemorySpec, monkeypatch) -> MemorySpec:
    """The same memory, computed on whole matrices."""
    with monkeypatch.context() as patch:
        patch.setattr(rules, "MAX_GROWTH", 0.0)
        spec = dataclasses.replace(spec)
        assert not spec.windowed
    return spec


@pytest.mark.parametrize("name", list(NS_COEFFICIENTS))
@pytest.mark.parametrize("shape", [(1, 4, 7), (3, 5, 4), (4, 9, 8), (8, 8, 30)])
def test_the_low_rank_step_and_its_gradient_are_those_of_the_whole_matrix(shape, name):
    c, d, e = shape
    g = torch.Generator().manual_seed(c)
    A, B, w = (torch.randn(6, *s, generator=g, dtype=torch.float64) for s in ((c, d), (c, e), (c,)))
    w = w.abs() + 0.1
    schedule = polynomials(NS_COEFFICIENTS[name], 5)
    results = []
    for low in (True, False):
        leaves = [x.clone().requires_grad_() for x in (A, B, w)]
        a, b, weight = leaves
        if low:
            made = a.mT @ low_rank_newton_schulz(a @ a.mT, b @ b.mT, weight, schedule) @ b
        else:
            made = newton_schulz(a.mT @ (weight.unsqueeze(-1) * b), 5, schedule)
        probe = torch.randn(made.shape, generator=torch.Generator().manual_seed(1), dtype=made.dtype)
        results.append((made, torch.autograd.grad((made * probe).sum(), leaves)))
    assert_close(results[0][0], results[1][0], 1e-11, "step")
    for name, x, y in zip(("A", "B", "weight"), results[0][1], results[1][1]):
        if name != "weight" or c > 1:  # of a single token only the direction counts
            assert_close(x, y, EXACT, f"gradient of {name}")


@every_backend
@pytest.mark.parametrize("structure", ["linear", "mlp"])
@pytest.mark.parametrize("what", ["equal keys", "zero gates", "zero errors", "one live token", "zero keys"])
def test_degenerate_windows_give_what_the_reference_gives(what, structure, backend):
    spec = MemorySpec(key_dim=5, value_dim=5, structure=structure, residual=False, window=4, chunk_size=8, **WINDOWED)
    assert spec.windowed
    x = inputs(Case(spec, ("retain", "gate")), length=19)
    if what == "equal keys":
        x.k = x.k[:, :1].expand_as(x.k).contiguous()
    elif what == "zero gates":
        x.gates.gate[:, 3:12] = 0.0
    elif what == "zero errors":  # W0 = 0 predicts 0
        x.W0, x.v = [torch.zeros_like(w) for w in x.W0], torch.zeros_like(x.v)
    elif what == "one live token":
        x.gates.gate[:] = 0.0
        x.gates.gate[:, 5] = 1.0
    else:
        x.k[:, 2:9] = 0.0
    arguments = x.q, x.k, x.v, x.gates, x.state(spec), spec
    y, state = scan(*arguments, backend=backend)
    ry, rstate = reference_scan(*arguments)
    assert torch.isfinite(y).all()
    assert_close(y, ry, EXACT, "y")
    for w, rw in zip(state.weights, rstate.weights):
        assert_close(w, rw, EXACT, "weights")


@pytest.mark.parametrize("scale", ["unit", "nuclear"])
def test_low_rank_and_dense_agree_over_several_chunks(scale, monkeypatch):
    spec = MemorySpec(key_dim=9, value_dim=8, window=6, chunk_size=16, muon_scale=scale, **WINDOWED)
    x = inputs(Case(spec, ("retain", "gate", "lag")), length=75)
    y, state = scan(x.q, x.k, x.v, x.gates, x.state(spec), spec, backend="torch")
    other = dense(spec, monkeypatch)
    z, held = scan(x.q, x.k, x.v, x.gates, x.state(other), other, backend="torch")
    assert_close(y, z, EXACT, "y")
    for w, v in zip(state.weights, held.weights):
        assert_close(w, v, EXACT, "weights")


def test_a_single_token_with_the_nuclear_scale_is_the_gradient_step():
    """<S, NS(S)> NS(S) of a matrix of rank one is S times the square of what Newton–Schulz makes of 1."""
    spec = MemorySpec(key_dim=4, value_dim=3, structure="linear", muon_scale="nuclear", chunk_size=1, **WINDOWED)
    descent = MemorySpec(key_dim=4, value_dim=3, structure="linear", chunk_size=1, momentum=False)
    a, b, c = NS_COEFFICIENTS["muon"][0]
    value = 1.0
    for _ in range(5):
        value = a * value + b * value**3 + c * value**5
    x = inputs(Case(spec, ()), length=1)
    _, state = scan(x.q, x.k, x.v, x.gates, x.state(spec), spec)
    gates = Gates(lr=x.gates.lr * value**2)
    _, expected = scan(x.q, x.k, x.v, gates, descent.initial_state(x.W0, 2), descent)
    assert_close(state.weights[0], expected.weights[0], 1e-12, "weights")


def test_the_state_has_no_accumulator_and_one_token_at_a_time_is_the_scan():
    memory = NeuralMemory(
        dim=32, heads=2, rule="muon", commit_every=1, momentum=False, window=4, chunk_size=8, gate="token*decay"
    ).double()
    assert memory.spec.windowed and not memory.initial_state(1).momentum
    x = torch.randn(2, 21, 32, dtype=torch.float64)
    y, state = memory(x)
    held, outputs = None, []
    with torch.no_grad():
        for t in range(21):
            out, held = memory(x[:, t : t + 1], held)
            outputs.append(out)
    assert_close(torch.cat(outputs, 1), y, EXACT, "y")
    for w, v in zip(held.weights, state.weights):
        assert_close(w, v, EXACT, "weights")


def test_combinations_outside_of_the_low_rank_form_are_computed_densely():
    base = {"key_dim": 8, "value_dim": 8, "rule": "muon", "chunk_size": 8}
    assert MemorySpec(**base, commit_every=1, momentum=False, window=8).windowed
    for options in (
        {"commit_every": 1},  # momentum: S has full rank
        {"commit_every": 2, "momentum": False},
        {"commit_every": 1, "momentum": False, "window": 9},  # longer than a map is wide
        {"commit_every": 1, "momentum": False, "ns_steps": 9},  # rounding would grow too much
    ):
        spec = MemorySpec(**base | options)
        assert spec.commits and spec.has_intervals and not spec.windowed
    with pytest.raises(ValueError, match="muon_scale='nuclear' goes with rule='muon'"):
        MemorySpec(key_dim=4, value_dim=4, muon_scale="nuclear")
    with pytest.raises(ValueError, match="muon_scale='frobenius' is unknown"):
        MemorySpec(**base, muon_scale="frobenius")


@pytest.mark.parametrize("scale", ["unit", "nuclear"])
def test_one_token_by_step_takes_windows_of_earlier_calls_along(scale):
    spec = MemorySpec(key_dim=6, value_dim=6, window=5, chunk_size=4, muon_scale=scale, **WINDOWED)
    x = inputs(Case(spec, ("retain", "gate", "lag")), length=14)
    y, _ = scan(x.q, x.k, x.v, x.gates, x.state(spec), spec)
    _, state = scan(*(z[:, :9] for z in (x.q, x.k, x.v)), x.gates.map(lambda g: g[:, :9]), x.state(spec), spec)
    for t in range(9, 14):
        token = [z[:, t : t + 1] for z in (x.q, x.k, x.v)]
        out, state = step(*token, x.gates.map(lambda g, t=t: g[:, t : t + 1]), state, spec)
        assert_close(out, y[:, t : t + 1], EXACT, f"y of token {t}")
