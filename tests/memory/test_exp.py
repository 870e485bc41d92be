"""Features "exp": memories whose first fast map is a list of pairs. However they are called, they are one function."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from cases import Case, Inputs, inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lists import (
    EXACT,
    HEADS,
    KINDS,
    SOFTMAX,
    assert_same_state,
    call,
    every_kind,
    exp_spec,
    start,
    x_rest,
)

from helpers import assert_close
from mnemos.memory import Gates, MemoryState, make_features, read, reference_scan, register_features, scan, step
from mnemos.memory.features import Monomials

STRUCTURES = [{"structure": "linear"}, {"depth": 2}, {"depth": 3, "expansion": 1.5}]


def grid() -> list[Case]:
    cases = []
    for shape, objective, (window, chunk), kind in itertools.product(
        STRUCTURES, ("l2", "dot"), [(1, 1), (1, 8), (5, 8), (11, 4), (5, 64)], ("after", "before")
    ):
        cases.append(Case(exp_spec(objective=objective, window=window, chunk_size=chunk, read=kind, **shape)))
    for shape, gates in itertools.product(STRUCTURES, [(), ("momentum",), ("retain",), ("gate", "lag")]):
        cases.append(Case(exp_spec(window=3, chunk_size=8, **shape), gates))
    for shape in STRUCTURES:
        cases.append(Case(exp_spec(chunk_size=8, momentum=False, key_dim=3, **shape), ("retain", "gate")))
    for window, kind in itertools.product((1, 5, 40), ("after", "before")):
        cases.append(Case(exp_spec(**SOFTMAX, window=window, read=kind, chunk_size=8)))
    cases += [Case(exp_spec(window=3, chunk_size=8, retention="start")), Case(exp_spec(depth=3, retention="start"))]
    return [*cases, *KINDS, Case(exp_spec(depth=1, chunk_size=8)), Case(exp_spec(depth=1, objective="dot", window=3))]


GRID = grid()
every_case = pytest.mark.parametrize("case", GRID, ids=str)


def gradients(y, state: MemoryState, leaves: dict) -> list:
    g = torch.Generator().manual_seed(7)
    parts = [y, *(x for x in state.tensors().values() if x.is_floating_point())]
    total = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum() for x in parts)
    return list(
        torch.autograd.grad(total, list(leaves.values()), materialize_grads=True, allow_unused=True, retain_graph=True)
    )


def assert_same(x: Inputs, first, second, tolerance: float = EXACT) -> None:
    """Outputs, states and every gradient of two runs."""
    assert_close(first[0], second[0], tolerance, "y")
    assert_same_state(first[1], second[1], tolerance)
    found, wanted = (gradients(*run, x.leaves()) for run in (first, second))
    for name, a, b in zip(x.leaves(), found, wanted):
        assert_close(a, b, tolerance, f"gradient of {name}")


# One function -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)  # both tests of a case follow each other
def expected(index: int):
    """Outputs, state and gradients by the reference in float64, of the numbers that float32 has."""
    case = GRID[index]
    x = inputs(Case(case.spec, case.gates, torch.float32), grad=True).double()
    y, state = call(reference_scan, x, case)
    return y.detach(), state.detach(), gradients(y, state, x.leaves())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("index", range(len(GRID)), ids=[str(c) for c in GRID])
def test_scan_is_the_reference_in_outputs_state_and_every_gradient(index, dtype):
    case = GRID[index]
    x = inputs(Case(case.spec, case.gates, torch.float32), grad=True)
    x = x.double() if dtype == torch.float64 else x
    y, state = call(scan, x, case)
    assert y.dtype == dtype and state.dtype == dtype
    ry, rstate, rgrads = expected(index)
    tolerance = EXACT if dtype == torch.float64 else 2e-5
    assert_close(y, ry, tolerance, "y")
    assert_same_state(state, rstate, tolerance)
    for name, a, b in zip(x.leaves(), gradients(y, state, x.leaves()), rgrads, strict=True):
        assert_close(a, b, tolerance, f"gradient of {name}")


@every_kind
def test_without_a_module_the_kernel_is_exp_of_the_inner_product(case):
    x = inputs(case, grad=True)
    x.features = None
    assert_same(x, call(scan, x, case), call(reference_scan, x, case))


@pytest.mark.parametrize("chunk", [16, 134, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fields", [{"structure": "linear"}, {"window": 3}, SOFTMAX], ids=str)
def test_scan_is_the_reference_over_several_tiles(fields, chunk):
    case = Case(exp_spec(**({"key_dim": 3, "value_dim": 3, "chunk_size": chunk} | fields)))
    x = inputs(case, length=201, batch=1, heads=2, grad=True)
    assert_same(x, call(scan, x, case), call(reference_scan, x, case))


@register_features
class Taylor(Monomials):
    """exp(q·k) of 2 dims, to rounding: its first 18 terms as features."""

    name = "test_taylor"

    def forward(self, x):
        powers = [x.new_ones(*x.shape[:-1], 1)]
        for i in range(1, self.degree + 1):
            scales = [math.comb(i, j) ** 0.5 / math.factorial(i) ** 0.5 for j in range(i + 1)]
            powers.append(torch.stack([s * x[..., 0] ** j * x[..., 1] ** (i - j) for j, s in enumerate(scales)], -1))
        return torch.cat(powers, -1)


@pytest.mark.parametrize("fields", [*STRUCTURES, {"structure": "linear", "objective": "dot"}], ids=str)
@pytest.mark.parametrize("window", [1, 5])
def test_the_list_is_the_memory_with_the_features_written_out(fields, window):
    """Against the ordinary engine, with 171 features and a first map that starts at 0."""
    shared = {"key_dim": 2, "value_dim": 2, "window": window, "chunk_size": 8} | fields
    listed, wide = Case(exp_spec(**shared)), Case(exp_spec(**(shared | {"features": "test_taylor", "degree": 17})))
    x = inputs(listed, grad=True)
    x.features = None
    y, state = call(scan, x, listed)
    first = torch.zeros(HEADS, *wide.spec.shapes[0], dtype=torch.float64)
    phi = make_features(wide.spec, HEADS)
    z, other = scan(x.q, x.k, x.v, x.gates, wide.spec.initial_state([first, *x.W0], batch=2), wide.spec, phi)
    assert_close(y, z, EXACT, "y")
    pairs = [state.pairs.weight, state.pairs.momentum]
    for share, matrix in zip(pairs, (other.weights[0], other.momentum[0])):
        built = phi(state.pairs.key).permute(0, 2, 3, 1) @ share.transpose(1, 2)
        assert_close(built, matrix, EXACT, "the map built from its pairs")
    for a, b in zip(state.weights, other.weights[1:]):
        assert_close(a, b, EXACT, "deeper maps")
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = {name: leaf for name, leaf in x.leaves().items() if window > 1 or name != "gates.decay"}
    found, wanted = (torch.autograd.grad((o * direction).sum(), list(leaves.values())) for o in (y, z))
    for name, a, b in zip(leaves, found, wanted):
        assert_close(a, b, EXACT, f"gradient of {name}")


@every_case
def test_token_by_token_is_one_scan(case):
    x = inputs(case)
    y, final = call(scan, x, case)
    state, outputs = start(x, case.spec), []
    for t in range(x.k.shape[1]):
        out, state = call(step, x, case, state, t, t + 1)
        outputs.append(out)
    assert_close(torch.cat(outputs, 1), y, EXACT, "y")
    assert_same_state(state, final)
    assert state.chunk_offset == final.chunk_offset


@every_kind
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(cuts=st.sets(st.integers(1, 40), max_size=5))
def test_any_split_into_calls_gives_the_same_outputs_state_and_gradients(case, cuts):
    x = inputs(case, length=41, grad=True)
    state, outputs = start(x, case.spec), []
    for lo, hi in zip([0, *sorted(cuts)], [*sorted(cuts), 41]):
        out, state = call(scan, x, case, state, lo, hi)
        outputs.append(out)
    assert_same(x, (torch.cat(outputs, 1), state), call(scan, x, case))


@every_case
def test_a_later_token_changes_nothing_before_it_at_all(case):
    x, z = inputs(case, length=30), inputs(case, length=30, seed=1)
    y, _ = call(scan, x, case)
    for t in (1, 8, 16, 29):
        mixed = Inputs(
            *(torch.cat([a[:, :t], b[:, t:]], 1) for a, b in zip((x.q, x.k, x.v), (z.q, z.k, z.v))), *x_rest(x)
        )
        names = ("lr", "momentum", "retain", "gate", "lag")
        timed = {n: (getattr(x.gates, n), getattr(z.gates, n)) for n in names}
        joined = {n: None if a is None else torch.cat([a[:, :t], b[:, t:]], 1) for n, (a, b) in timed.items()}
        mixed.gates = Gates(**joined, decay=x.gates.decay)
        changed, _ = call(scan, mixed, case)
        assert (changed[:, :t] - y[:, :t]).abs().max() == 0.0
        assert (changed[:, t:] - y[:, t:]).abs().max() > 0


@pytest.mark.parametrize("case", KINDS[1:4], ids=str)
def test_a_later_key_of_any_size_changes_nothing_before_it(case):
    x = inputs(case, length=12)
    y, _ = call(scan, x, case)
    x.k[:, 7:] *= 1e6
    x.q[:, 7:] *= 1e6
    changed, _ = call(scan, x, case)
    assert torch.equal(changed[:, :7], y[:, :7])


@every_kind
def test_masked_tokens_are_skipped_and_rows_go_on_from_different_positions(case):
    x = inputs(case, batch=3, length=29, grad=True)
    _, before = call(scan, x, case, hi=6)
    mask = torch.rand(3, 23, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0] = False
    mask[0, :5] = True
    first = call(scan, x, case, before, 6, mask=mask)
    assert first[0][~mask].abs().max() == 0.0
    assert first[1].pairs.length == int(first[1].position.max())
    assert_same(x, first, call(reference_scan, x, case, before, 6, mask=mask))
    more = inputs(case, batch=3, length=9, seed=5)
    more.features = x.features
    y, final = call(scan, more, case, first[1])
    ry, rfinal = call(reference_scan, more, case, first[1])
    assert_close(y, ry, EXACT, "y after")
    assert_same_state(final, rfinal)
    state, outputs = first[1], []
    for t in range(9):
        out, state = call(step, more, case, state, t, t + 1)
        outputs.append(out)
    assert_close(torch.cat(outputs, 1), y, EXACT, "y by steps")
    assert_same_state(state, final)


@every_kind
def test_a_step_skips_the_rows_that_are_masked(case):
    x = inputs(case, batch=3, length=9)
    _, state = call(scan, x, case, hi=8)
    mask = torch.tensor([[True], [False], [True]])
    y, after = call(step, x, case, state, 8, mask=mask)
    assert after.position.tolist() == [9, 8, 9] and y[1].abs().max() == 0.0
    assert_same_state(after.select([1]), state.select([1]), 0.0)


@every_kind
def test_packed_documents_are_the_documents_alone(case):
    bounds = [0, 9, 10, 24, 24, 29]
    x = inputs(case, batch=1, length=29, grad=True)
    packed = call(scan, x, case, start(x, case.spec, batch=5), cu_seqlens=torch.tensor(bounds))
    outputs, states = [], []
    for lo, hi in zip(bounds, bounds[1:]):
        one = start(x, case.spec, batch=1)
        if hi > lo:
            out, one = call(scan, x, case, one, lo, hi)
            outputs.append(out)
        states.append(one)
    assert_same(x, packed, (torch.cat(outputs, 1), MemoryState.stack(states)))


@every_kind
def test_writing_alone_and_reading_alone_are_the_halves_of_a_scan(case):
    x = inputs(case, length=21, grad=True)
    y, expected = call(scan, x, case)
    nothing, state = scan(None, x.k, x.v, x.gates, start(x, case.spec), case.spec, x.features)
    assert nothing is None
    assert_same_state(state, expected)
    if case.spec.read == "after":
        assert_close(read(x.q[:, -1:], state, case.spec, x.features), y[:, -1:], EXACT, "read")
    else:
        _, before = call(scan, x, case, hi=20)
        assert_close(read(x.q[:, -1:], before, case.spec, x.features), y[:, -1:], EXACT, "read")


@every_kind
def test_without_gradients_and_in_inference_mode_the_result_is_the_same(case):
    x = inputs(case, grad=True)
    y, state = call(scan, x, case)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            z, other = call(scan, x, case)
            assert not z.requires_grad
        assert_close(z, y, 1e-14, "y")
        assert_same_state(other, state, 1e-14)


def test_reading_an_empty_memory_gives_its_residual():
    for fields in ({}, {"structure": "linear"}, SOFTMAX):
        case = Case(exp_spec(**fields))
        x = inputs(case)
        y = read(x.q, start(x, case.spec), case.spec, x.features)
        assert torch.equal(y, x.q if case.spec.has_residual else torch.zeros_like(x.v))
